"""Faults of a step as a whole: what a token weighs, the global norm, the update."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.engine import Engine, place, sum_over
from meshwright.layout import Axes, Layout, letters_of
from meshwright.model import params as parameters
from meshwright.model.forward import Objective
from meshwright.parallel import accumulate
from meshwright.train import optim
from meshwright.verify.faults.fault import Fault, Patch

Tree = Any


def _norm_of_one_shard(right: Any) -> Any:
    def squared_norm(engine: Engine, tree: Tree) -> jax.Array:
        def leaf(path: str, g: jax.Array) -> jax.Array:
            axes = engine.layout.live(*(a for dim in engine.layout.updated(letters_of(path)) for a in dim))
            return jnp.where(place(axes) == 0, g, 0)

        return right(engine, jax.tree.map(leaf, parameters.names(engine.layout.model), tree))

    return squared_norm


def _norm_counts_copies(right: Any) -> Any:
    def squared_norm(engine: Engine, tree: Tree) -> jax.Array:
        def leaf(path: str, g: jax.Array) -> jax.Array:
            whole = not any(engine.layout.updated(letters_of(path)))
            return g * math.sqrt(engine.layout.config.device_count) if whole else g

        return right(engine, jax.tree.map(leaf, parameters.names(engine.layout.model), tree))

    return squared_norm


def _stale_shards() -> tuple[Patch, ...]:
    """ZeRO-1's gather left out: each device updates its shard, and the other shards stay as they were."""
    old: list[Tree] = []

    def remembering(right: Any) -> Any:
        def updated_shards(engine: Engine, params: Tree) -> Tree:
            old[:] = [params]
            return right(engine, params)

        return updated_shards

    def forgetting(right: Any) -> Any:
        def stored_from_updated(engine: Engine, params: Tree) -> Tree:
            def leaf(path: str, new: jax.Array, before: jax.Array) -> jax.Array:
                for dim, axes in enumerate(engine.layout.updated(letters_of(path))):
                    if "fsdp" in axes:
                        own = new.shape[dim] // engine.layout.config.fsdp
                        index = jnp.arange(new.shape[dim]).reshape([-1 if i == dim else 1 for i in range(new.ndim)])
                        new = jnp.where(index < own, new, before)
                return new

            return jax.tree.map(leaf, parameters.names(engine.layout.model), right(engine, params), old[0])

        return stored_from_updated

    return (accumulate, "updated_shards", remembering), (accumulate, "stored_from_updated", forgetting)


def _decays_norms_where_sharded(right: Any) -> Any:
    def transformation(config: Any, layout: Layout) -> Any:
        return right(replace(config, decay_exempt=()) if layout.live("fsdp") else config, layout)

    return transformation


@dataclass(frozen=True)
class _Mean:
    """An objective whose loss is already a mean: over the targets of `axes`, of the microbatch that is at hand."""

    right: Objective
    axes: Axes

    @property
    def engine(self) -> Engine:
        return self.right.engine

    def loss_sum(self, params: Tree, batch: Tree, key: Any) -> jax.Array:
        return self.right.loss_sum(params, batch, key) / jnp.maximum(sum_over(self.right.count(batch), self.axes), 1)


def _mean_of_microbatch_means(right: Any) -> Any:
    def accumulated(objective: Objective, working: Tree, batch: Tree, key: Any, scale: jax.Array):
        tokens, parts = (
            objective.engine.layout.live(*accumulate.TOKEN_AXES),
            objective.engine.layout.config.microbatches,
        )
        return right(_Mean(objective, tokens), working, batch, key, jnp.ones_like(scale) / parts)

    return accumulated


def _mean_of_device_means(right: Any) -> Any:
    def accumulated(objective: Objective, working: Tree, batch: Tree, key: Any, scale: jax.Array):
        layout = objective.engine.layout
        n = layout.degree(layout.live(*accumulate.TOKEN_AXES)) * layout.config.microbatches
        return right(_Mean(objective, ()), working, batch, key, jnp.ones_like(scale) / n)

    return accumulated


def _last_microbatch_dropped(right: Any) -> Any:
    def accumulated(objective: Objective, working: Tree, batch: Tree, key: Any, scale: jax.Array):
        rows, parts = batch["mask_BT"].shape[0], objective.engine.layout.config.microbatches
        kept_B = jnp.arange(rows) < rows - rows // parts
        return right(objective, working, batch | {"mask_BT": batch["mask_BT"] & kept_B[:, None]}, key, scale)

    return accumulated


def _counted_by_every_tensor_rank(right: Any) -> Any:
    def count(self: Objective, batch: Tree) -> jax.Array:
        return right(self, batch) * self.engine.layout.config.tensor

    return count


FAULTS = (
    Fault(
        "norm-of-one-shard",
        "the global norm is that of one shard",
        "fsdp=2",
        ((accumulate, "squared_norm", _norm_of_one_shard),),
        "norm",
    ),
    Fault(
        "norm-counts-copies",
        "the global norm counts replicated parameters once for every device",
        "data=2 tensor=2",
        ((accumulate, "squared_norm", _norm_counts_copies),),
        "norm",
    ),
    Fault(
        "stale-shards",
        "ZeRO-1's updated shards are not gathered: devices keep the old values of the others",
        "fsdp=2 zero=1",
        _stale_shards(),
        "sgd",
    ),
    Fault(
        "decay-on-norms",
        "weight decay also acts on norms and biases where parameters are sharded",
        "fsdp=2",
        ((optim, "transformation", _decays_norms_where_sharded),),
        "sgd",
    ),
    Fault(
        "mean-of-microbatch-means",
        "each microbatch's loss is its own mean, so tokens weigh unequally",
        "microbatches=2",
        ((accumulate, "_accumulated", _mean_of_microbatch_means),),
        "accumulation",
    ),
    Fault(
        "mean-of-device-means",
        "each device's loss is its own mean, so tokens weigh unequally",
        "data=2",
        ((accumulate, "_accumulated", _mean_of_device_means),),
        "accumulation",
    ),
    Fault(
        "last-microbatch-dropped",
        "the last microbatch gives no gradient",
        "microbatches=2",
        ((accumulate, "_accumulated", _last_microbatch_dropped),),
        "accumulation",
    ),
    Fault(
        "tokens-counted-twice",
        "the number of tokens is summed over tensor too, where all ranks see the same tokens",
        "tensor=2",
        ((Objective, "count", _counted_by_every_tensor_rank),),
        "loss",
    ),
)
