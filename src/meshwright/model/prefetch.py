"""The stack of layers, each layer's whole weights gathered while its neighbour computes (`layout.prefetch`).

ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054) gathers a layer's weights where they are used, so a layer waits for
them. Here one turn of the loop gathers what the next turn needs, and nothing in it waits for that. An ordinary scan would
save what it carries, every layer's whole weights, for the backward pass; so the pass backward is written out. It saves of
a layer its input and what `train.remat` names, and holds whole weights from recomputation to the gradient of the input.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.engine import Engine
from meshwright.layout import Layout
from meshwright.model.replay import keeping, names_kept, replayed

Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Stack:
    """What all layers have in common."""

    engine: Engine
    layer: Callable[[Engine, Leaves, jax.Array, Any, jax.Array], jax.Array]
    """(engine, leaves, x, constants, number) -> x."""
    letters: tuple[str, ...]
    """Of each leaf; L is the first."""
    remat: str

    def own(self, leaves: Leaves, number: jax.Array) -> Leaves:
        """A layer's leaves."""
        return tuple(lax.dynamic_index_in_dim(w, number, keepdims=False) for w in leaves)

    def whole(self, leaves: Leaves, number: jax.Array) -> Leaves:
        """A layer's leaves, those that ZeRO splits gathered and in the compute dtype."""
        own = zip(self.own(leaves, number), self.letters, strict=True)
        return tuple(self.engine.fetched(w, letters) for w, letters in own)

    def run(self, engine: Engine, own: Leaves, whole: Leaves, x: jax.Array, constants: Any, number: Any) -> jax.Array:
        """A layer on `whole`, whose gradients go to `own`; for its engine, weights were gathered once a step."""
        layout = Layout(replace(engine.layout.config, gather="step"), engine.layout.model)
        leaves = tuple(
            self.engine.fetched(w, letters, before=v) for w, v, letters in zip(own, whole, self.letters, strict=True)
        )
        return self.layer(replace(engine, layout=layout), leaves, x, constants, number)

    def scan(self, one: Callable, carry: Any, xs: Any = None, *, reverse: bool = False) -> Any:
        count = self.engine.layout.model.layers
        unroll = count if self.engine.unroll_layers else 1
        return lax.scan(one, carry, (jnp.arange(count, dtype=jnp.uint32), xs), reverse=reverse, unroll=unroll)


def prefetches(engine: Engine) -> bool:
    """Whether weights are gathered a layer ahead: it is asked for, and ZeRO splits weights that are gathered in use."""
    return engine.layout.config.prefetch and engine.observe is None and any(engine.zero_axes("DF"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_ahead(stack: Stack, leaves: Leaves, x: jax.Array, constants: Any) -> jax.Array:
    """What the last layer makes of `x`. `leaves`: [L, ...] each. `constants` have no gradient."""
    return _forward(stack, leaves, x, constants)[0]


def _forward(stack: Stack, leaves: Leaves, x: jax.Array, constants: Any) -> tuple[jax.Array, Any]:
    last = jnp.uint32(stack.engine.layout.model.layers - 1)

    def one(carry: tuple[jax.Array, Leaves], step: tuple[jax.Array, None]) -> tuple[Any, Any]:
        (x, whole), (number, _) = carry, step
        ahead = stack.whole(leaves, jnp.minimum(number + 1, last))
        engine, kept = keeping(stack.engine, names_kept(stack.remat))
        y = stack.run(engine, stack.own(leaves, number), whole, x, constants, number)
        return (y, ahead), {"x": x} | kept

    (y, whole), kept = stack.scan(one, (x, stack.whole(leaves, jnp.uint32(0))))
    return y, (leaves, constants, kept, whole)


def _backward(stack: Stack, saved: Any, dy: jax.Array) -> tuple[Leaves, jax.Array, None]:
    leaves, constants, kept, whole = saved  # the forward pass ends with the last layer's weights

    def one(carry: tuple[jax.Array, Leaves], step: tuple[jax.Array, Any]) -> tuple[Any, Leaves]:
        (dy, whole), (number, kept) = carry, step
        ahead = stack.whole(leaves, jnp.maximum(number, 1) - 1)
        engine = replayed(stack.engine, kept)
        layer = lambda own, x: stack.run(engine, own, whole, x, constants, number)  # noqa: E731
        _, back = jax.vjp(layer, stack.own(leaves, number), kept["x"])
        gradients, dx = back(dy)
        dtypes = (
            stack.engine.gradient_dtype(w.dtype, letters) for w, letters in zip(leaves, stack.letters, strict=True)
        )
        return (dx, ahead), tuple(g.astype(dtype) for g, dtype in zip(gradients, dtypes, strict=True))

    (dx, _), gradients = stack.scan(one, (dy, whole), kept, reverse=True)
    return tuple(g.astype(w.dtype) for g, w in zip(gradients, leaves, strict=True)), dx, None


run_ahead.defvjp(_forward, _backward)
