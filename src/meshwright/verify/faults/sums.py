"""Faults of what is summed or gathered over devices: matmuls, their gradients, gradients of parameters."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright import engine
from meshwright.compat import varying
from meshwright.engine import Engine, place, sum_over
from meshwright.layout import Axes, letters_of
from meshwright.model import params as parameters
from meshwright.parallel import accumulate
from meshwright.verify.faults.fault import Fault, first_only, replaced

Tree = Any


def _without_tensor_sum(right: Any) -> Any:
    scatter_sum = engine.scatter_sum

    def unscattered(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        return scatter_sum(jnp.where(place(axes) == 0, x, 0), axes, dim)

    def contract(self: Engine, *args: Any) -> jax.Array:
        with (
            replaced(engine, "sum_over", lambda _: first_only),
            replaced(engine, "scatter_sum", lambda _: unscattered),
        ):
            return right(self, *args)

    return contract


def _reversed_gather(right: Any) -> Any:
    def gather(x: jax.Array, axes: Axes, dim: int, *, same: bool = False) -> jax.Array:
        y = right(x, axes, dim, same=same)
        return jnp.roll(y, x.shape[dim], dim) if axes == ("tensor",) and not same else y

    return gather


def _layer_input_gradient_lost(right: Any) -> Any:
    """The gather's transpose, a scatter-sum, keeps one rank's part of the gradient."""

    def gather(x: jax.Array, axes: Axes, dim: int, *, same: bool = False) -> jax.Array:
        y = right(x, axes, dim, same=same)
        if axes != ("tensor",) or same:
            return y
        return jnp.where(place(axes) == 0, y, lax.stop_gradient(y))

    return gather


def _gradient_averaged(right: Any) -> Any:
    def reduce(engine: Engine, gradients: Tree) -> Tree:
        n = engine.layout.degree(engine.layout.live("data"))
        return jax.tree.map(lambda g: g / n, right(engine, gradients))

    return reduce


def _averaged_zero3(right: Any) -> Any:
    def gather_weight(w: jax.Array, axes: Axes, dim: int, compute: Any, reduce: Any, ring: int = 0) -> jax.Array:
        whole = right(w, axes, dim, compute, reduce)
        n = math.prod(lax.axis_size(axis) for axis in axes)
        return whole / n + lax.stop_gradient(whole - whole / n)

    return gather_weight


def _gradient_shards_shifted(right: Any) -> Any:
    def scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        y = right(x, axes, dim)
        return engine.shift(y, "fsdp") if axes == ("fsdp",) else y

    return scatter


def _sum_in_bfloat16(right: Any) -> Any:
    def reduce(engine: Engine, gradients: Tree) -> Tree:
        return right(engine, jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(g.dtype), gradients))

    return reduce


def _unsummed_over_tensor(is_meant: Callable[[str], bool]) -> Callable[[Any], Any]:
    """The gradients of some leaves taken from one tensor rank instead of summed over all."""

    def wrong(right: Any) -> Any:
        def reduce(engine: Engine, gradients: Tree) -> Tree:
            def leaf(path: str, g: jax.Array) -> jax.Array:
                axes = engine.layout.live("tensor")
                over = axes and set(axes) <= varying(g) and is_meant(path)
                return jnp.where(place(axes) == 0, g, 0) if over else g

            return right(engine, jax.tree.map(leaf, parameters.names(engine.layout.model), gradients))

        return reduce

    return wrong


def _summed_over_tensor_too(right: Any) -> Any:
    """Gradients of norm weights that every tensor rank already has whole, summed over tensor."""

    def reduce(engine: Engine, gradients: Tree) -> Tree:
        def leaf(path: str, g: jax.Array) -> jax.Array:
            axes = engine.layout.live("tensor") if "scale_" in path else ()
            return g if set(axes) <= varying(g) else sum_over(g, axes)

        return right(engine, jax.tree.map(leaf, parameters.names(engine.layout.model), gradients))

    return reduce


FAULTS = (
    Fault(
        "missing-tensor-sum",
        "the partial results of a row-parallel matmul are not summed over tensor",
        "tensor=2 sequence_parallel=false",
        ((Engine, "_contract", _without_tensor_sum),),
        "forward",
        "layers/0/attention_out",
    ),
    Fault(
        "missing-scatter-sum",
        "under sequence parallelism the partial results are scattered without being summed",
        "tensor=2",
        ((Engine, "_contract", _without_tensor_sum),),
        "forward",
        "layers/0/attention_out",
    ),
    Fault(
        "gather-out-of-order",
        "the tokens gathered before a column-parallel matmul come in the wrong order of ranks",
        "tensor=2",
        ((engine, "gather", _reversed_gather),),
        "forward",
        "layers/0/q",
    ),
    Fault(
        "input-gradient-not-summed",
        "the gradient that a column-parallel matmul passes back is one rank's part, not the sum over tensor",
        "tensor=2",
        ((engine, "gather", _layer_input_gradient_lost),),
        "backward",
    ),
    Fault(
        "gradient-averaged",
        "gradients are averaged over data where the loss is already a mean over all tokens",
        "data=2",
        ((accumulate, "reduce", _gradient_averaged),),
        "gradient",
    ),
    Fault(
        "zero3-gradient-averaged",
        "ZeRO-3's scatter-sum averages over fsdp",
        "fsdp=2",
        ((engine, "gather_weight", _averaged_zero3),),
        "gradient",
    ),
    Fault(
        "gradient-shards-shifted",
        "ZeRO-2's scatter-sum hands each device its neighbour's shard",
        "fsdp=2 zero=2",
        ((accumulate, "scatter_sum", _gradient_shards_shifted),),
        "gradient",
    ),
    Fault(
        "gradient-sum-bfloat16",
        "gradients are rounded to bfloat16 before they are summed",
        "data=2",
        ((accumulate, "reduce", _sum_in_bfloat16),),
        "gradient",
    ),
    Fault(
        "norm-weight-not-reduced",
        "under sequence parallelism the gradients of norm weights are not summed over tensor",
        "tensor=2",
        ((accumulate, "reduce", _unsummed_over_tensor(lambda path: "scale_" in path)),),
        "gradient",
    ),
    Fault(
        "norm-weight-summed-twice",
        "without sequence parallelism the gradients of norm weights are summed over tensor, which all have whole",
        "tensor=2 sequence_parallel=false",
        ((accumulate, "reduce", _summed_over_tensor_too),),
        "gradient",
    ),
    Fault(
        "shared-kv-not-summed",
        "the gradients of key/value heads that ranks share are not summed over tensor",
        "tensor=4 microbatches=2",
        ((accumulate, "reduce", _unsummed_over_tensor(lambda path: "K" in letters_of(path))),),
        "gradient",
        "layers/attention/",
        settings=("model.heads=8", "model.kv_heads=2"),
        families=("llama",),
    ),
)
