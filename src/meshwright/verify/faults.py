"""Planted faults: what goes wrong in other systems, put inside the engine, so that `verify` can be seen to find it.

Each is a context manager that replaces a function of the engine, the model, the accumulation or the optimiser by one
that makes the mistake. Where the mistake would leave an array different on devices that must agree, JAX's
varying-axes types would refuse the program before it ran; such a fault is planted in a form that types as correct
(one device's part is sent to all).
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright import engine, layout
from meshwright.compat import vary, varying
from meshwright.config import Refused, RunConfig, override
from meshwright.engine import Engine, place, sum_over
from meshwright.layout import Axes, Layout, letters_of
from meshwright.model import forward, gpt, llama
from meshwright.model import params as parameters
from meshwright.model.forward import Objective
from meshwright.model.loss import CrossEntropy
from meshwright.parallel import accumulate
from meshwright.train import optim, step

Tree = Any
Patch = tuple[Any, str, Callable[[Any], Any]]
"""What to replace: an object, the name of its function, and the wrong function made from the right one."""


@dataclass(frozen=True)
class Fault:
    """One planted fault. It shows on `layout`, with `settings` added to the configuration."""

    name: str
    says: str
    """What is wrong."""
    layout: str
    patches: tuple[Patch, ...]
    kind: str
    """What `bisect` must call it (`Place.kind`)."""
    at: str = ""
    """Where `bisect` must find it: the beginning of `Place.at`."""
    settings: tuple[str, ...] = ()
    families: tuple[str, ...] = ("gpt", "llama")


@contextlib.contextmanager
def planted(name: str) -> Iterator[Fault]:
    """Run with the fault `name` inside; everything is as it was afterwards."""
    fault = named(name)
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        for patch in fault.patches:
            stack.enter_context(_replaced(*patch))
        _forget()
        yield fault


@contextlib.contextmanager
def _replaced(owner: Any, attribute: str, wrong: Callable[[Any], Any]) -> Iterator[None]:
    right = getattr(owner, attribute)
    setattr(owner, attribute, wrong(right))
    try:
        yield
    finally:
        setattr(owner, attribute, right)


def _forget() -> None:
    """Drop what was traced or planned with other functions."""
    layout._plan.cache_clear()
    jax.clear_caches()


def named(name: str) -> Fault:
    if name not in FAULTS:
        raise Refused(f"fault {name!r} is not known; allowed: {', '.join(FAULTS)}")
    return FAULTS[name]


def configured(fault: Fault, config: RunConfig) -> RunConfig:
    """`config` with what the fault needs to show; refused where its family has no place for the fault."""
    if config.model.family not in fault.families:
        raise Refused(
            f"fault {fault.name!r} has no place in model.family={config.model.family!r};"
            f" it shows in {', '.join(fault.families)}"
        )
    return override(config, fault.settings)


# ---- the mistakes ----------------------------------------------------------------------------------------


def _first_only(x: jax.Array, axes: Axes) -> jax.Array:
    """The part of the first device along `axes`, sent to all: what a missing sum leaves, typed as a sum."""
    return lax.psum(jnp.where(place(axes) == 0, vary(x, axes), 0), axes) if axes else x


def _without_tensor_sum(right: Any) -> Any:
    scatter_sum = engine.scatter_sum

    def unscattered(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        return scatter_sum(jnp.where(place(axes) == 0, x, 0), axes, dim)

    def contract(self: Engine, *args: Any) -> jax.Array:
        with (
            _replaced(engine, "sum_over", lambda _: _first_only),
            _replaced(engine, "scatter_sum", lambda _: unscattered),
        ):
            return right(self, *args)

    return contract


def _reversed_gather(right: Any) -> Any:
    def gather(x: jax.Array, axes: Axes, dim: int, *, same: bool = False) -> jax.Array:
        y = right(x, axes, dim, same=same)
        return jnp.roll(y, x.shape[dim], dim) if axes == ("tensor",) and not same else y

    return gather


def _gradient_averaged(right: Any) -> Any:
    def reduce(engine: Engine, gradients: Tree) -> Tree:
        n = engine.layout.degree(engine.layout.live("data"))
        return jax.tree.map(lambda g: g / n, right(engine, gradients))

    return reduce


def _gradient_shards_shifted(right: Any) -> Any:
    def scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        y = right(x, axes, dim)
        return engine.shift(y, "fsdp") if axes == ("fsdp",) else y

    return scatter


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


def _averaged_zero3(right: Any) -> Any:
    def gather_weight(w: jax.Array, axes: Axes, dim: int, compute: Any, reduce: Any, ring: int = 0) -> jax.Array:
        whole = right(w, axes, dim, compute, reduce)
        n = math.prod(lax.axis_size(axis) for axis in axes)
        return whole / n + lax.stop_gradient(whole - whole / n)

    return gather_weight


def _sum_in_bfloat16(right: Any) -> Any:
    def reduce(engine: Engine, gradients: Tree) -> Tree:
        return right(engine, jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(g.dtype), gradients))

    return reduce


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


def _same_initial_shards(right: Any) -> Any:
    return lambda local_size, axes, dim, rank: right(local_size, (), dim, rank)


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


def _padding_has_probability(right: Any) -> Any:
    def chunk(self: CrossEntropy, *args: Any) -> Any:
        own = self.engine.layout
        padded = replace(own, model=replace(own.model, vocab_size=own.padded_vocab_size()))
        return right(replace(self, engine=replace(self.engine, layout=padded)), *args)

    return chunk


def _embedding_off_by_one(right: Any) -> Any:
    def lookup(self: Engine, table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
        axes = self.layout.live("tensor")
        return right(self, table_VD, ids_BT + jnp.asarray(place(axes) > 0).astype(ids_BT.dtype))

    return lookup


def _first_positions(right: Any) -> Any:
    def residual_shard(self: Engine, x_BT: jax.Array) -> jax.Array:
        own = right(self, x_BT)
        return vary(x_BT[:, : own.shape[1]], tuple(varying(own)))

    return residual_shard


def _local_positions(right: Any) -> Any:
    def rope_tables(model: Any, positions_BT: jax.Array, dtype: Any) -> Any:
        n = lax.axis_size("tensor")
        return right(model, positions_BT % (positions_BT.shape[1] // n), dtype)

    return rope_tables


def _across_documents(right: Any) -> Any:
    def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array, **options: Any):
        split = "tensor" in varying(q_BTNH)
        return right(q_BTNH, k_BSKH, v_BSKH, jnp.zeros_like(segments_BT) if split else segments_BT, **options)

    return attend


def _same_data_everywhere(right: Any) -> Any:
    def put_batch(run: Any, batch: Tree, letters: Any) -> Tree:
        n = run.layout.degree(run.layout.activation("B")[0])
        first = {name: np.concatenate([array[: len(array) // n]] * n) for name, array in batch.items()}
        return right(run, first, letters)

    return put_batch


def _same_dropout_on_every_shard(right: Any) -> Any:
    def offset(self: Engine, letters: str, letter: str, local_size: int) -> Any:
        return 0 if letter == "T" else right(self, letters, letter, local_size)

    return offset


def _layer_input_gradient_lost(right: Any) -> Any:
    """The gather's transpose, a scatter-sum, keeps one rank's part of the gradient."""

    def gather(x: jax.Array, axes: Axes, dim: int, *, same: bool = False) -> jax.Array:
        y = right(x, axes, dim, same=same)
        if axes != ("tensor",) or same:
            return y
        return jnp.where(place(axes) == 0, y, lax.stop_gradient(y))

    return gather


_ALL = (
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
    Fault(
        "initial-shards-equal",
        "every shard draws the same random numbers for its initial weights",
        "fsdp=2",
        ((parameters, "_global_index", _same_initial_shards),),
        "initial",
    ),
    Fault(
        "dropout-shards-equal",
        "under sequence parallelism every rank draws the mask of the first one",
        "tensor=2",
        ((Engine, "offset", _same_dropout_on_every_shard),),
        "dropout",
        settings=("model.dropout_residual=0.3",),
    ),
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
    Fault(
        "padding-has-probability",
        "the padding of the vocabulary takes part in the softmax",
        "tensor=2",
        ((CrossEntropy, "chunk", _padding_has_probability),),
        "loss",
        settings=("model.vocab_size=101",),
    ),
    Fault(
        "embedding-off-by-one",
        "a rank's part of the vocabulary begins one row too early",
        "tensor=2",
        ((Engine, "lookup", _embedding_off_by_one),),
        "forward",
        "embedding",
    ),
    Fault(
        "positions-of-the-first-shard",
        "under sequence parallelism every rank takes the positions of the first one",
        "tensor=2",
        ((Engine, "residual_shard", _first_positions),),
        "forward",
        "embedding",
        families=("gpt",),
    ),
    Fault(
        "rope-by-local-position",
        "rotary angles are those of the position within a rank's part of the sequence",
        "tensor=2",
        ((forward, "rope_tables", _local_positions),),
        "forward",
        "layers/0/q",
        families=("llama",),
    ),
    Fault(
        "attention-across-documents",
        "the mask that keeps documents apart is dropped where heads are split",
        "tensor=2",
        ((gpt, "attend", _across_documents), (llama, "attend", _across_documents)),
        "forward",
        "layers/0/attention",
    ),
    Fault(
        "same-data-on-every-device",
        "all data-parallel ranks train on the first one's sequences",
        "data=2",
        ((step, "put_batch", _same_data_everywhere),),
        "forward",
        "embedding",
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
)
FAULTS = {fault.name: fault for fault in _ALL}
"""Every planted fault by its name."""
