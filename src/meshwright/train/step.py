"""The training step: the only program of a run that is compiled for training, and the only `jit` of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright import random
from meshwright.dims import TOKEN_AXES
from meshwright.engine import sum_over, wider
from meshwright.model.forward import Objective
from meshwright.parallel import accumulate
from meshwright.train import optim
from meshwright.train.state import Run

Tree = Any

COMPILER_OPTIONS = {"TPU v5": {"xla_tpu_scoped_vmem_limit_kib": "32768"}}
"""By device kind. TPU v5p: vector memory for one operation, 16 MiB if unsaid. With 32 MiB the compiler finds tiles for a
layer's matmuls whose cycles it estimates at 2% above the chip's rate, instead of 7 to 18%; with more, compiling takes
longer than the last 1% is worth (Llama-3.1-8B, libtpu 0.0.52, docs/aot.md)."""

OFFLOADED = ("all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter")
OFFLOAD_OPTIONS = {
    "TPU v5": {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true" for kind in OFFLOADED},
}
"""By device kind. TPU v5p: gathers and scatter-sums, over one, two or three dimensions of the torus, by the SparseCores,
so that weights and their gradients move beside matmuls (`train.sparse_cores`). Not with a tensor axis, where the gathers
of the residual stream are waited for whoever carries them out, and the SparseCores' rate is not known; nor in a pipeline's
branches, where it is not tried (docs/aot.md)."""


def compiler_options(run: Run) -> dict[str, str]:
    """What the step's compiler is asked for beyond its defaults."""
    kind = run.mesh.devices.flat[0].device_kind
    offload = run.config.train.sparse_cores and not run.layout.live("pipe", "tensor")
    return COMPILER_OPTIONS.get(kind, {}) | (OFFLOAD_OPTIONS.get(kind, {}) if offload else {})


def objective_of(run: Run) -> Objective:
    return Objective(run.engine, run.config.train, run.remat)


def train_step(run: Run) -> Any:
    """The compiled step ``(state, batch) -> (state, metrics)``; the state's memory is given over (donated).

    Metrics, equal on all devices: loss; grad_norm before clipping; clip_factor; lr; targets (global count);
    skipped (1.0 where the norm was not finite, and then parameters and optimiser state are bit for bit the old ones).
    """
    config, objective = run.config, objective_of(run)
    transformation, rate = run.transformation, optim.learning_rate(config.optim, config.train.steps)
    at_rest, working = run.shardings(at_rest=True), run.shardings()

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        key = dropout_key(run, state["step"])
        loss, gradients, targets = accumulate.loss_and_gradients(objective, state["params"], batch, key)
        norm = jnp.sqrt(accumulate.squared_norm(run.engine, gradients))
        clip = clip_factor(norm, config.optim.clip_norm)
        gradients = jax.tree.map(lambda g: g * clip.astype(g.dtype), gradients)
        old = accumulate.updated_shards(run.engine, state["params"])
        with jax.numpy_dtype_promotion("standard"):  # optax adds its int32 counts to floats
            updates, opt = transformation.update(gradients, state["opt"], old)
            lr = jnp.asarray(rate(state["step"]), jnp.float32)
        new = jax.tree.map(lambda p, u: moved(p, lr, u), old, updates)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        choose = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        new, opt = jax.tree.map(choose, (new, opt), (old, state["opt"]))
        params = accumulate.stored_from_updated(run.engine, new)
        state = {"params": params, "opt": opt, "step": state["step"] + 1}
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "clip_factor": clip,
            "lr": lr,
            "targets": targets,
            "skipped": 1.0 - finite.astype(jnp.float32),
        }
        return state, metrics

    specs, batch_specs = run.specs(), run.batch_specs(objective.batch_letters)
    inner = jax.shard_map(
        step, mesh=run.mesh, in_specs=(specs, batch_specs), out_specs=(specs, PartitionSpec()), check_vma=True
    )

    def offloaded(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        state = state | {"opt": jax.device_put(state["opt"], working["opt"])}
        return inner(state, batch)

    metrics = NamedSharding(run.mesh, PartitionSpec())
    return jax.jit(
        offloaded if config.optim.offload else inner,
        donate_argnums=0,
        out_shardings=(at_rest, metrics),
        compiler_options=compiler_options(run),
    )


def moved(p: jax.Array, lr: jax.Array, update: jax.Array) -> jax.Array:
    """A parameter after its update, computed in the wider of the two dtypes."""
    wide = wider(p.dtype, update.dtype)
    return (p.astype(wide) - lr.astype(wide) * update.astype(wide)).astype(p.dtype)


def clip_factor(norm: jax.Array, limit: float) -> jax.Array:
    """What gradients are multiplied by so that their global norm is at most `limit` (0: no limit)."""
    return jnp.minimum(1, limit / jnp.maximum(norm, 1e-12)) if limit else jnp.ones_like(norm)


def dropout_key(run: Run, step: jax.Array) -> jax.Array | None:
    model = run.config.model
    if not (model.dropout_attention or model.dropout_embedding or model.dropout_residual):
        return None
    return random.key_of(run.config.train.seed, "dropout", step)


def eval_step(run: Run) -> Any:
    """The compiled ``(params, batch) -> (loss sum, targets)``: token-weighted, without dropout."""
    objective = objective_of(run)
    tokens = run.layout.live(*TOKEN_AXES)

    def step(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        return accumulate.loss_sum(objective, params, batch), sum_over(objective.count(batch), tokens)

    return run.manual(step, (run.specs()["params"], run.batch_specs(objective.batch_letters)), PartitionSpec())


def own_rows(run: Run, sequences: int) -> np.ndarray | None:
    """The rows of a global batch of `sequences` that this process's devices hold; None where they hold all."""
    held = NamedSharding(run.mesh, run.batch_specs({"b": "B"})["b"]).addressable_devices_indices_map((sequences,))
    rows = sorted({row for index in held.values() if index for row in range(*index[0].indices(sequences))})
    return None if len(rows) == sequences else np.array(rows)


def put_batch(run: Run, batch: dict[str, Any], letters: dict[str, str]) -> Tree:
    """A batch of numpy arrays on the devices, each device its shard.

    `batch` is global, or holds the rows that `own_rows` names of a batch of `train.sequences`.
    """
    specs = run.batch_specs(letters)
    rows = own_rows(run, run.config.train.sequences) if jax.process_count() > 1 else None

    def on_devices(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        shape = array.shape if rows is None else (run.config.train.sequences, *array.shape[1:])

        def shard(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(shape[0])
            before = 0 if rows is None else first - int(np.searchsorted(rows, first))  # rows that are not here
            return array[(slice(first - before, last - before), *index[1:])]

        return jax.make_array_from_callback(shape, NamedSharding(run.mesh, spec), shard)

    return {name: on_devices(array, specs[name]) for name, array in batch.items()}
