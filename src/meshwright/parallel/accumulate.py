"""Gradients of one step: microbatches, then one reduction. Data parallelism and ZeRO 0 to 3 are what stands here.

A parameter's working copy counts as different on every device along the axes over which its activations are split
(`Layout.gradient_axes`), so that backward passes add nothing across devices; after the last microbatch each gradient is
reduced once, onto the shards that the optimiser updates. ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.compat import vary, varying
from meshwright.dims import TOKEN_AXES
from meshwright.engine import Engine, gather, scatter_sum, sum_over, take_shard, wider
from meshwright.layout import Axes, Spec, letters_of
from meshwright.model import forward
from meshwright.model import params as parameters
from meshwright.model.forward import Objective
from meshwright.parallel.pipeline import Pipeline, running_schedule

Tree = dict[str, Any]


def loss_and_gradients(
    objective: Objective, params: Tree, batch: Tree, key: jax.Array | None
) -> tuple[jax.Array, Tree, jax.Array]:
    """The global loss, every gradient in `layout.updated`, and the global number of targets.

    The loss is the sum over all targets of the global batch divided by their number, once, however it is split.
    `params` are in `layout.stored`; `batch` is this device's shard.
    """
    engine = objective.engine
    tokens, pipe = engine.layout.live(*TOKEN_AXES), engine.layout.live("pipe")
    total = sum_over(objective.count(batch), tokens)
    scale = 1 / jnp.maximum(total, 1)
    working = enter(engine, params)
    if pipe:
        pipeline = Pipeline(objective, working, microbatches(engine, batch), key, scale)
        loss, gradients = pipeline.loss_and_gradients(running_schedule(objective))
    else:
        loss, gradients = _accumulated(objective, working, batch, key, scale)
    return sum_over(loss, (*pipe, *tokens)), reduce(engine, gradients), total


def _accumulated(
    objective: Objective, working: Tree, batch: Tree, key: Any, scale: jax.Array
) -> tuple[jax.Array, Tree]:
    """This device's share of the loss and of the gradients, added up over the microbatches."""
    engine, count = objective.engine, objective.engine.layout.config.microbatches

    def one(microbatch):
        share = lambda working: objective.loss_sum(working, microbatch, key) * scale  # noqa: E731
        loss, gradients = jax.value_and_grad(share)(working)
        return loss, jax.tree.map(lambda g: g.astype(wider(g.dtype, engine.reduce_dtype)), gradients)

    if count == 1:
        return one(batch)
    tokens = engine.layout.live(*TOKEN_AXES)
    zero_like = lambda w: vary(jnp.zeros(w.shape, wider(w.dtype, engine.reduce_dtype)), tuple(varying(w)))  # noqa: E731
    zero = vary(jnp.zeros((), engine.logits_dtype), tokens), jax.tree.map(zero_like, working)
    add = lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None)  # noqa: E731
    return lax.scan(add, zero, microbatches(engine, batch))[0]


def loss_sum(objective: Objective, params: Tree, batch: Tree) -> jax.Array:
    """The loss summed over all targets of a global batch, without dropout; equal on every device."""
    engine = objective.engine
    working, tokens, pipe = enter(engine, params), engine.layout.live(*TOKEN_AXES), engine.layout.live("pipe")
    if pipe:
        return sum_over(Pipeline(objective, working, microbatches(engine, batch)).loss_sum(), (*pipe, *tokens))
    return sum_over(objective.loss_sum(working, batch, None), tokens)


def hidden(objective: Objective, working: Tree, batch: Tree) -> jax.Array:
    """x_BTD after the last norm, without dropout, on every stage of a pipeline."""
    engine = objective.engine
    if not engine.layout.live("pipe"):
        return forward.hidden(engine, working, batch)
    parts = jax.tree.map(lambda a: a[None], batch)
    return forward.after_layers(engine, working, Pipeline(objective, working, parts).last_stream())


def microbatches(engine: Engine, batch: Tree) -> Tree:
    """This device's shard of a batch in equal parts: each array [M, B / M, ...]."""
    count = engine.layout.config.microbatches
    return jax.tree.map(lambda a: a.reshape(count, a.shape[0] // count, *a.shape[1:]), batch)


def enter(engine: Engine, params: Tree) -> Tree:
    """Working copies: gathered once where `layout.gather` is `step`, and varying over `gradient_axes`."""
    layout = engine.layout

    def leaf(path: str, w: jax.Array) -> jax.Array:
        letters = letters_of(path)
        for dim, axes in enumerate(_difference(layout.stored(letters), layout.working(letters))):
            w = gather(w.astype(engine.compute_dtype), axes, dim, same=True) if axes else w
        return w if layout.reduced_by_layer(letters) else vary(w, layout.gradient_axes(letters))

    return jax.tree.map(leaf, parameters.names(layout.model), params)


def reduce(engine: Engine, gradients: Tree) -> Tree:
    """Each gradient summed over its `gradient_axes` and brought into `layout.updated`.

    Where the optimiser's shard is smaller than the gradient, ZeRO-2 and 3 scatter the sum; ZeRO-1 sums, then keeps its shard.
    """
    layout = engine.layout

    def leaf(path: str, g: jax.Array) -> jax.Array:
        letters = letters_of(path)
        onto = _difference(layout.updated(letters), layout.working(letters))
        left = () if layout.reduced_by_layer(letters) else layout.gradient_axes(letters)
        for dim, axes in enumerate(onto):
            if layout.config.zero >= 2:
                g = scatter_sum(g, axes, dim)
                left = tuple(axis for axis in left if axis not in axes)
        g = sum_over(g, left)
        for dim, axes in enumerate(onto):
            if layout.config.zero == 1:
                g = take_shard(g, axes, dim)
        return g

    return jax.tree.map(leaf, parameters.names(layout.model), gradients)


def updated_shards(engine: Engine, params: Tree) -> Tree:
    """The part of each parameter that this device updates: `layout.stored` -> `layout.updated`. Moves nothing."""
    return _between(engine, params, take_shard, engine.layout.updated, engine.layout.stored)


def stored_from_updated(engine: Engine, params: Tree) -> Tree:
    """The whole stored parameters from the updated shards: ZeRO-1 and 2's gather."""
    whole = lambda w, axes, dim: gather(w, axes, dim, same=True)  # noqa: E731
    return _between(engine, params, whole, engine.layout.updated, engine.layout.stored)


def _between(engine: Engine, params: Tree, move: Any, fine: Any, coarse: Any) -> Tree:
    def leaf(path: str, w: jax.Array) -> jax.Array:
        letters = letters_of(path)
        for dim, axes in enumerate(_difference(fine(letters), coarse(letters))):
            w = move(w, axes, dim)
        return w

    return jax.tree.map(leaf, parameters.names(engine.layout.model), params)


def _difference(fine: Spec, coarse: Spec) -> tuple[Axes, ...]:
    """The axes that split each dim in `fine` but not in `coarse`."""
    return tuple(tuple(axis for axis in a if axis not in b) for a, b in zip(fine, coarse, strict=True))


def squared_norm(engine: Engine, tree: Tree) -> jax.Array:
    """The squared norm of a tree in `layout.updated`: each logical number counted once, equal on every device."""
    sums: dict[Axes, jax.Array] = {}
    for path, g in zip(jax.tree.leaves(parameters.names(engine.layout.model)), jax.tree.leaves(tree), strict=True):
        split = {axis for axes in engine.layout.updated(letters_of(path)) for axis in axes}
        axes = engine.layout.live(*split)
        assert varying(g) == set(axes), f"{path} varies over {varying(g)}, is split over {axes}"
        square = jnp.sum(jnp.square(g.astype(engine.wide_dtype)))
        sums[axes] = sums[axes] + square if axes in sums else square
    return functools.reduce(jnp.add, (sum_over(square, axes) for axes, square in sums.items()))
