"""The layers of a pipeline stage, a chunk at a time: forward, and backward whole or in two parts.

What a layer keeps for its backward pass is explicit: its input, and the named arrays that `train.remat` chooses. The
backward pass runs the layer once more with the kept arrays in the place of those it names, so that the compiler leaves
out what leads only to them. A split backward pass (Qi et al. 2023, arXiv:2401.10241) first computes the gradient of the
input, and leaves for each matmul its input and the gradient by its result: the tape from which the weights' gradients are
made later, without a look at the layer itself.
"""

import functools
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.compat import vary
from meshwright.engine import Engine, place
from meshwright.model.forward import Objective
from meshwright.model.layers import Tokens
from meshwright.model.replay import keeping, names_kept, replayed

Tree = Any


@dataclass(frozen=True)
class Layer:
    """One stage's layers, inside `jax.shard_map`."""

    objective: Objective
    weights: Tree
    """This stage's rows of every layer parameter: [chunks x rows, ...]."""
    matmuls: list = field(default_factory=list)
    """(equation, paths of its weights) of each matmul of a layer, once `input_gradient` has been traced."""

    @property
    def engine(self) -> Engine:
        return self.objective.engine

    @property
    def rows(self) -> int:
        return self.engine.layout.stages.rows

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arrays that are kept."""
        return names_kept(self.objective.remat)

    def at(self, chunk: jax.Array, i: Any) -> tuple[Any, Tree, jax.Array]:
        """(row, weights, number in the model) of a chunk's layer; the number is -1 where the row has none."""
        layout = self.engine.layout
        one_chunk = len(layout.stages.layers[0]) == 1
        row = i if one_chunk else chunk * self.rows + i
        weights = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, row, keepdims=False), self.weights)
        numbers = jnp.array(layout.stages.layer_of_row, jnp.int32).reshape(layout.config.pipe, -1)
        return row, weights, vary(numbers, ("pipe",))[place(("pipe",)), row]

    def _each(self, one: Callable, carry: Any, *, backward: bool = False, xs: Any = None) -> Any:
        """`one` over the rows of a chunk: in a loop, or one after another.

        What each row makes, and takes of `xs`, is a row of every array in a loop, else an element of a list: no copies.
        """
        if not self.engine.unroll_layers:
            return lax.scan(one, carry, (jnp.arange(self.rows, dtype=jnp.int32), xs), reverse=backward)
        made: list = [None] * self.rows
        for i in reversed(range(self.rows)) if backward else range(self.rows):
            carry, made[i] = one(carry, (i, None if xs is None else xs[i]))
        return carry, made

    def _where_layer(self, number: jax.Array, run: Callable, skip: Callable, *operands: Any) -> Any:
        """`run`, but `skip` in a row without a layer."""
        full = -1 not in self.engine.layout.stages.layer_of_row
        return run(*operands) if full else lax.cond(number >= 0, run, skip, *operands)

    def _block(
        self, engine: Engine, weights: Tree, x: jax.Array, tokens: Tokens | None, number: jax.Array
    ) -> jax.Array:
        return self.objective.block(engine, weights, x, tokens, number.astype(jnp.uint32))

    # ---- forward ----

    def _kept(self, weights: Tree, x: jax.Array, tokens: Tokens | None, number: jax.Array) -> tuple[jax.Array, Tree]:
        """A layer's result and what it keeps."""
        engine, kept = keeping(self.engine, self.names)
        y = self._block(engine, weights, x, tokens, number)
        return y, {"x": x} | kept

    def forward(self, chunk: jax.Array, x: jax.Array, tokens: Tokens | None) -> tuple[jax.Array, Tree]:
        """A chunk's result, and what its layers keep (`_each`)."""

        def one(x: jax.Array, step: Any) -> tuple[jax.Array, Tree]:
            _, weights, number = self.at(chunk, step[0])
            run = lambda x: self._kept(weights, x, tokens, number)  # noqa: E731
            skip = lambda x: (x, jax.tree.map(zeros, jax.eval_shape(run, x)[1]))  # noqa: E731
            return self._where_layer(number, run, skip, x)

        return self._each(one, x)

    # ---- backward ----

    def backward(
        self, chunk: jax.Array, kept: Tree, dy: jax.Array, tokens: Tokens | None, sums: Tree
    ) -> tuple[jax.Array, Tree]:
        """The gradient by a chunk's input; those of its weights are added to `sums`, which are shaped like `weights`."""

        def one(carry: tuple[jax.Array, Tree], step: Any) -> tuple[Any, None]:
            row, weights, number = self.at(chunk, step[0])
            own = step[1]

            def run(dy: jax.Array, sums: Tree) -> tuple[jax.Array, Tree]:
                block = lambda w, x: self._block(replayed(self.engine, own), w, x, tokens, number)  # noqa: E731
                _, back = jax.vjp(block, weights, own["x"])
                dw, dx = back(dy)
                return dx, add_row(sums, row, dw)

            return self._where_layer(number, run, lambda dy, sums: (dy, sums), *carry), None

        return self._each(one, (dy, sums), backward=True, xs=kept)[0]

    # ---- a backward pass in two parts ----

    def input_gradient(
        self, chunk: jax.Array, kept: Tree, dy: jax.Array, tokens: Tokens | None, sums: Tree
    ) -> tuple[jax.Array, Tree, Tree]:
        """`backward` without the weights of matmuls, and the tape of those: for each its input and its result's gradient."""

        def one(carry: tuple[jax.Array, Tree], step: Any) -> tuple[Any, Tree]:
            row, weights, number = self.at(chunk, step[0])
            own = step[1]

            def run(dy: jax.Array, sums: Tree) -> tuple[tuple[jax.Array, Tree], Tree]:
                block = functools.partial(self._taped, own, tokens, number)
                _, results = jax.eval_shape(lambda: block(weights, own["x"], None))
                probes = [jax.tree.map(zeros, result) for _, result in results]
                _, back, inputs = jax.vjp(block, weights, own["x"], probes, has_aux=True)
                dw, dx, slopes = back(dy)
                taped = {path for _, paths in self.matmuls for path in paths}
                return (dx, add_row(sums, row, dw, without=taped)), [
                    (x, s) for (x, _), s in zip(inputs, slopes, strict=True)
                ]

            skip = lambda dy, sums: ((dy, sums), jax.tree.map(zeros, jax.eval_shape(run, dy, sums)[1]))  # noqa: E731
            return self._where_layer(number, run, skip, *carry)

        (dx, sums), tape = self._each(one, (dy, sums), backward=True, xs=kept)
        return dx, sums, tape

    def _taped(
        self, kept: Tree, tokens: Tokens | None, number: jax.Array, weights: Tree, x: jax.Array, probes: Any
    ) -> tuple[jax.Array, list]:
        """A layer whose matmuls take their weights as constants; `probes` are zeros that are added to their results.

        Also each matmul's input and result; `self.matmuls` says which they are.
        """
        paths = {id(w): path for path, w in jax.tree_util.tree_leaves_with_path(weights)}
        arrays: list = []
        self.matmuls.clear()

        def defer(engine: Engine, equation: str, x: jax.Array, large: tuple[jax.Array, ...]) -> Any:
            result = engine.einsum(equation, x, *map(lax.stop_gradient, large))
            result = result if probes is None else jax.tree.map(jnp.add, result, probes[len(arrays)])
            self.matmuls.append((equation, tuple(paths[id(w)] for w in large)))
            arrays.append((x, result))
            return result

        return self._block(replace(replayed(self.engine, kept), defer=defer), weights, x, tokens, number), arrays

    def weight_gradients(self, chunk: jax.Array, tape: Tree, sums: Tree) -> Tree:
        """The gradients of the weights of a chunk's matmuls, from their tape, added to `sums`."""

        def one(sums: Tree, step: Any) -> tuple[Tree, None]:
            row, weights, number = self.at(chunk, step[0])

            def run(sums: Tree) -> Tree:
                at = dict(jax.tree_util.tree_leaves_with_path(weights))
                for (equation, paths), (x, slopes) in zip(self.matmuls, step[1], strict=True):
                    matmul = functools.partial(self.engine.einsum, equation, x)
                    _, back = jax.vjp(matmul, *(at[path] for path in paths))
                    found = dict(zip(paths, back(slopes), strict=True))
                    sums = jax.tree_util.tree_map_with_path(
                        lambda path, total, found=found: add_at(total, row, found[path]) if path in found else total,
                        sums,
                    )
                return sums

            return self._where_layer(number, run, lambda sums: sums, sums), None

        return self._each(one, sums, xs=tape)[0]


def zeros(kind: Any) -> jax.Array:
    """Zeros of a shape, dtype and varying axes (`jax.eval_shape` inside `jax.shard_map` tells them)."""
    return vary(jnp.zeros(kind.shape, kind.dtype), tuple(kind.manual_axis_type.varying))


def add_at(total: jax.Array, row: jax.Array, gradient: jax.Array) -> jax.Array:
    old = lax.dynamic_index_in_dim(total, row, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, old + gradient.astype(total.dtype), row, 0)


def add_row(sums: Tree, row: jax.Array, gradients: Tree, without: Set[Any] = frozenset()) -> Tree:
    """Each sum with a row's gradient added, but for the paths in `without`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, total, g: total if path in without else add_at(total, row, g), sums, gradients
    )
