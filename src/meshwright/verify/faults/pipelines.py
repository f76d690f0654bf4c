"""Faults of pipelines: of the timetable that the loops read, of what a stage holds, and of the ends that stages share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.engine import Engine, place
from meshwright.layout import letters_of
from meshwright.model import params as parameters
from meshwright.parallel import accumulate, pipeline
from meshwright.parallel.layer import Layer
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.timetable import Timetable
from meshwright.verify.faults.fault import Fault, Patch, first_only

Tree = Any
Columns = dict[str, np.ndarray]

# ---- the timetable ---------------------------------------------------------------------------------------------


def _timetable(change: Callable[[Timetable, Columns], Columns], *, training: bool = True) -> Patch:
    """Change the columns of every loop of training, or of the forward passes of evaluation."""

    def wrong(right: Any) -> Any:
        def timetable(schedule: Any) -> Timetable:
            table = right(schedule)
            if any("B" in loop.kinds for loop in table.loops) != training:
                return table
            loops = [
                replace(loop, columns=change(table, {name: column.copy() for name, column in loop.columns.items()}))
                for loop in table.loops
            ]
            return replace(table, loops=tuple(loops))

        return timetable

    return pipeline, "timetable", wrong


def _exchanged(name: str) -> Patch:
    """The last stage takes microbatch 1 for microbatch 2, and the other way round."""

    def change(table: Timetable, columns: Columns) -> Columns:
        if name in columns:
            own = columns[name][:, -1]
            columns[name][:, -1] = np.select([own == 1, own == 2], [2, 1], own)
        return columns

    return _timetable(change)


def _ring_too_small(table: Timetable, columns: Columns) -> Columns:
    depth = table.depths["stash"] - 1
    return {name: column % depth if name.endswith("_stash") else column for name, column in columns.items()}


def _next_slot(name: str, ring: str, stage: int) -> Patch:
    """A stage reads the slot after the one in which what it needs waits."""

    def change(table: Timetable, columns: Columns) -> Columns:
        if name in columns:
            columns[name][:, stage] = (columns[name][:, stage] + 1) % table.depths[ring]
        return columns

    return _timetable(change)


def _last_weights_lost(table: Timetable, columns: Columns) -> Columns:
    """Stage 0 leaves out the W of the last microbatch."""
    if "W" in columns:
        last = columns["W_microbatch"][:, 0] == table.schedule.microbatches - 1
        columns["W"][last, 0] = 0
    return columns


def _one_tick_too_few(right: Any) -> Any:
    def timetable(schedule: Any) -> Timetable:
        *loops, last = right(schedule).loops
        if "B" in last.kinds:
            last = replace(last, columns={name: column[:-1] for name, column in last.columns.items()})
        return replace(right(schedule), loops=(*loops, last))

    return timetable


def _other_chunk(table: Timetable, columns: Columns) -> Columns:
    if "B" in columns:
        columns["B_chunk"][:, 0] = columns["B"][:, 0] - columns["B_chunk"][:, 0]
    return columns


def _every_stage_is_last(table: Timetable, columns: Columns) -> Columns:
    return columns | {"F_last": columns["F"]}


def _last_microbatch_not_counted(table: Timetable, columns: Columns) -> Columns:
    if "F_last" in columns:
        columns["F_last"][columns["F_microbatch"] == table.schedule.microbatches - 1] = 0
    return columns


# ---- a stage ---------------------------------------------------------------------------------------------------


def _layer_twice(right: Any) -> Any:
    """A row without a layer takes the one before it."""

    def at(self: Layer, chunk: jax.Array, i: Any) -> tuple[Any, Tree, jax.Array]:
        row, weights, number = right(self, chunk, i)
        before = right(self, chunk, jnp.maximum(i - 1, 0))
        choose = lambda own, other: jnp.where(number < 0, other, own)  # noqa: E731
        return jax.tree.map(choose, (row, weights, number), before)

    return at


def _layer_skipped(right: Any) -> Any:
    """Every chunk runs as many layers as all of them have."""

    def at(self: Layer, chunk: jax.Array, i: Any) -> tuple[Any, Tree, jax.Array]:
        row, weights, number = right(self, chunk, i)
        stages = self.engine.layout.stages
        least = min(len(own) for chunks in stages.layers for own in chunks)
        return row, weights, jnp.where(jnp.asarray(i) < least, number, -1)

    return at


def _numbered_by_row(right: Any) -> Any:
    def at(self: Layer, chunk: jax.Array, i: Any) -> tuple[Any, Tree, jax.Array]:
        row, weights, number = right(self, chunk, i)
        return row, weights, jnp.where(number < 0, number, row)

    return at


def _sent_back(right: Any) -> Any:
    return lambda x, axis, by=1: right(x, axis, -by)


def _mean_of_means(right: Any) -> Any:
    def share(self: Pipeline, ends: Tree, x: jax.Array, part: Tree) -> jax.Array:
        parts = self.engine.layout.config.microbatches
        mean = 1 / jnp.maximum(self.objective.count(part), 1) / parts
        return right(replace(self, scale=mean), ends, x, part)

    return share


def _first_stage_only(right: Any) -> Any:
    return lambda x, axes: first_only(x, axes) if axes == ("pipe",) else right(x, axes)


# ---- what stages share -----------------------------------------------------------------------------------------


def _ends(change: Callable[[Engine, str, jax.Array], jax.Array]) -> Patch:
    """Change the gradients of the parameters that every stage has, before they are summed over pipe."""

    def wrong(right: Any) -> Any:
        def reduce(engine: Engine, gradients: Tree) -> Tree:
            def leaf(path: str, g: jax.Array) -> jax.Array:
                return change(engine, path, g) if "pipe" in engine.layout.gradient_axes(letters_of(path)) else g

            return right(engine, jax.tree.map(leaf, parameters.names(engine.layout.model), gradients))

        return reduce

    return accumulate, "reduce", wrong


def _first_copy(engine: Engine, path: str, g: jax.Array) -> jax.Array:
    return jnp.where(place(("pipe",)) == 0, g, 0) if path == "embedding/tokens_VD" else g


def _averaged(engine: Engine, path: str, g: jax.Array) -> jax.Array:
    return g / engine.layout.config.pipe


FAULTS = (
    Fault(
        "microbatches-exchanged",
        "the last stage works on the wrong microbatch's documents and targets",
        "pipe=2 microbatches=4",
        (_exchanged("F_microbatch"),),
        "pipeline",
        "forward stage 1 chunk 0",
        settings=("model.layers=4",),
    ),
    Fault(
        "backward-of-another-microbatch",
        "the last stage's backward pass runs with another microbatch's documents",
        "pipe=2 microbatches=4",
        (_exchanged("B_microbatch"),),
        "pipeline",
        "backward stage 1 chunk 0",
        settings=("model.layers=4",),
    ),
    Fault(
        "stale-stash-slot",
        "what stages keep for backward passes has one slot too few: a microbatch overwrites another that still waits",
        "pipe=2 microbatches=4",
        (_timetable(_ring_too_small),),
        "pipeline",
        "backward stage 0 chunk 0",
        settings=("model.layers=4",),
    ),
    Fault(
        "gradient-from-the-wrong-slot",
        "a stage's backward pass takes the gradient that waits for another microbatch",
        "pipe=2 microbatches=4 schedule=gpipe",
        (_next_slot("B_slope", "slope", -1),),
        "pipeline",
        "backward stage 1 chunk 0",
        settings=("model.layers=4",),
    ),
    Fault(
        "tape-of-another-microbatch",
        "a split backward pass makes the weights' gradients from what another microbatch left",
        "pipe=2 microbatches=4 schedule=zb-h2",
        (_next_slot("W_tape", "tape", 0),),
        "pipeline",
        "gradient stage 0 chunk 0",
        settings=("model.layers=4",),
    ),
    Fault(
        "weights-gradient-lost",
        "a stage of a split backward pass leaves out one W",
        "pipe=2 microbatches=4 schedule=zb-h1",
        (_timetable(_last_weights_lost),),
        "pipeline",
        "gradient stage 0 chunk 0",
        settings=("model.layers=4",),
    ),
    Fault(
        "last-tick-missing",
        "the loop over ticks ends one tick early: the first stage drops the last microbatch's gradient",
        "pipe=2 microbatches=4",
        ((pipeline, "timetable", _one_tick_too_few),),
        "pipeline",
        "gradient stage 0 chunk 0",
        settings=("model.layers=4",),
    ),
    Fault(
        "wrong-chunk",
        "an interleaved stage's backward pass runs the layers of its other chunk",
        "pipe=2 microbatches=2 schedule=interleaved",
        (_timetable(_other_chunk),),
        "pipeline",
        "backward stage 0",
        settings=("model.layers=4",),
    ),
    Fault(
        "layer-run-twice",
        "a stage with fewer layers than the others runs its last one twice",
        "pipe=2 microbatches=2 stage_layers=3,2",
        ((Layer, "at", _layer_twice),),
        "pipeline",
        "forward stage 1 chunk 0",
        settings=("model.layers=5",),
    ),
    Fault(
        "layer-skipped",
        "every stage runs as many layers as the shortest has: the others lose some",
        "pipe=2 microbatches=2 stage_layers=3,2",
        ((Layer, "at", _layer_skipped),),
        "pipeline",
        "forward stage 0 chunk 0",
        settings=("model.layers=5",),
    ),
    Fault(
        "dropout-by-row",
        "dropout's random numbers are those of a layer's place on its stage, not in the model",
        "pipe=2 microbatches=2",
        ((Layer, "at", _numbered_by_row),),
        "pipeline",
        "forward stage 1 chunk 0",
        settings=("model.layers=4", "model.dropout_residual=0.3"),
    ),
    Fault(
        "sent-to-the-stage-before",
        "results go to the stage before, and gradients to the next",
        "pipe=3 microbatches=2",
        ((pipeline, "shift", _sent_back),),
        "pipeline",
        "forward stage 1 chunk 0",
        settings=("model.layers=3",),
    ),
    Fault(
        "loss-of-every-stage",
        "every stage counts a loss of what it made, not the last one alone",
        "pipe=2 microbatches=2",
        (_timetable(_every_stage_is_last),),
        "pipeline",
        "loss",
        settings=("model.layers=4",),
    ),
    Fault(
        "pipeline-mean-of-means",
        "each microbatch's loss is its own mean, so tokens weigh unequally",
        "pipe=2 microbatches=2",
        ((Pipeline, "share", _mean_of_means),),
        "pipeline",
        "loss",
        settings=("model.layers=4",),
    ),
    Fault(
        "split-head-of-the-first-stage",
        "with the vocabulary split over pipe, the head works on what the first stage has instead of the last",
        "pipe=2 microbatches=2 split_vocabulary=true",
        ((pipeline, "sum_over", _first_stage_only),),
        "pipeline",
        "loss",
        settings=("model.layers=4",),
    ),
    Fault(
        "untied-copies",
        "the gradients of a tied embedding from the first and the last stage are not summed",
        "pipe=2 microbatches=2",
        (_ends(_first_copy),),
        "pipeline",
        "gradient embedding/tokens_VD",
        settings=("model.layers=4", "model.tied_embeddings=true"),
    ),
    Fault(
        "ends-averaged",
        "the gradients of embedding, head and last norm are averaged over the stages",
        "pipe=2 microbatches=2",
        (_ends(_averaged),),
        "pipeline",
        "gradient",
        settings=("model.layers=4",),
    ),
    Fault(
        "evaluation-misses-a-microbatch",
        "the forward passes of an evaluation leave out the last microbatch's loss",
        "pipe=2 microbatches=2",
        (_timetable(_last_microbatch_not_counted, training=False),),
        "pipeline",
        "evaluation",
        settings=("model.layers=4",),
    ),
)
