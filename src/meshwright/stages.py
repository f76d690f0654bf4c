"""Which layers a pipeline stage holds: any number of layers over any number of stages and chunks, none lost, none twice.

Nothing here imports JAX.
"""

import functools
from dataclasses import dataclass

from meshwright.config import LayoutConfig, ModelConfig, require
from meshwright.schedules.files import read_csv
from meshwright.schedules.generate import make, require_known
from meshwright.schedules.table import Schedule, position

NEARLY = 1.05
"""How much more work than the least the busiest stage may have where that saves rows without a layer."""


def schedule_of(layout: LayoutConfig) -> Schedule:
    """The schedule that a layout names, for its stages and microbatches; refused where it does not fit them."""
    return _schedule(layout.schedule, layout.pipe, layout.microbatches, layout.chunks)


@functools.lru_cache(maxsize=64)
def _schedule(name: str, stages: int, count: int, chunks: int) -> Schedule:
    if not name.endswith(".csv"):
        return make(name, stages, count, 2 if name == "interleaved" and chunks == 1 else chunks)
    schedule = read_csv(name)
    for setting, has, wanted in (
        ("layout.pipe", schedule.stages, stages),
        ("layout.microbatches", schedule.microbatches, count),
        ("layout.chunks", schedule.chunks, schedule.chunks if chunks == 1 else chunks),
    ):
        require(
            has == wanted, f"schedule {name} is for {setting}={has}, but the layout has {wanted}; set {setting}={has}"
        )
    return schedule


@dataclass(frozen=True)
class Stages:
    """The layers of each stage and chunk: `layers[stage][chunk]` are their numbers in the model.

    On the devices every chunk has the same number of rows (`rows`), stage after stage and chunk after chunk; a row without
    a layer holds zeros and is skipped.
    """

    layers: tuple[tuple[range, ...], ...]

    @property
    def rows(self) -> int:
        return max(len(chunk) for stage in self.layers for chunk in stage)

    @functools.cached_property
    def layer_of_row(self) -> tuple[int, ...]:
        """For each row of the arrays on the devices, its layer, or -1."""
        chunks = [chunk for stage in self.layers for chunk in stage]
        return tuple(n for chunk in chunks for n in (*chunk, *[-1] * (self.rows - len(chunk))))

    @functools.cached_property
    def row_of_layer(self) -> tuple[int, ...]:
        """For each layer of the model, its row of the arrays on the devices."""
        rows = {layer: row for row, layer in enumerate(self.layer_of_row) if layer >= 0}
        return tuple(rows[layer] for layer in range(len(rows)))

    @property
    def in_order(self) -> bool:
        """Whether the rows are the model's layers, in order."""
        return self.layer_of_row == tuple(range(len(self.layer_of_row)))


@functools.lru_cache(maxsize=64)
def stages_of(layout: LayoutConfig, model: ModelConfig) -> Stages:
    """The layers of each stage and chunk of a layout; refused by name where they cannot be."""
    if layout.pipe == 1:
        if not layout.schedule.endswith(".csv"):
            require_known(layout.schedule)
        return Stages(((range(model.layers),),))
    if layout.chunks > model.layers:
        _require_layers(layout.pipe, layout.chunks, model.layers)  # before a schedule is made for so many
    schedule = schedule_of(layout)
    counts = (
        _asked(layout, model, schedule) if layout.stage_layers != "balanced" else _balanced(layout, model, schedule)
    )
    by_position = {}
    first = 0
    for place in range(schedule.positions):
        stage, chunk = schedule.at(place)
        by_position[place] = range(first, first + counts[stage][chunk])
        first += counts[stage][chunk]
    at = lambda stage, chunk: by_position[position(schedule.placement, schedule.stages, stage, chunk)]  # noqa: E731
    return Stages(tuple(tuple(at(s, c) for c in range(schedule.chunks)) for s in range(schedule.stages)))


def _asked(layout: LayoutConfig, model: ModelConfig, schedule: Schedule) -> list[list[int]]:
    """The layers of each [stage][chunk] as `layout.stage_layers` says."""
    numbers, text = [int(n) for n in layout.stage_layers.split(",")], f"layout.stage_layers={layout.stage_layers}"
    parts = "1 part" if len(numbers) == 1 else f"{len(numbers)} parts"
    or_chunks = f" or for each of their {schedule.positions} chunks" if schedule.chunks > 1 else ""
    require(
        len(numbers) in (schedule.stages, schedule.positions),
        f"{text} names {parts}; write one for each of the {schedule.stages} stages (layout.pipe){or_chunks}",
    )
    require(
        sum(numbers) == model.layers,
        f"{text} has {sum(numbers)} layers, but the model has {model.layers} (model.layers); every layer is on one stage",
    )
    if len(numbers) == schedule.positions:
        counts = [[numbers[schedule.position(s, c)] for c in range(schedule.chunks)] for s in range(schedule.stages)]
    else:
        counts = [_evenly(n, schedule.chunks) for n in numbers]
    for stage, own in enumerate(counts):
        rule = "every stage needs one" if schedule.chunks == 1 else f"each of its {schedule.chunks} chunks needs one"
        require(
            min(own) >= 1,
            f"{text} leaves stage {stage} {'a chunk ' if schedule.chunks > 1 else ''}without a layer; {rule}",
        )
    return counts


def _require_layers(stages: int, chunks: int, layers: int) -> None:
    require(
        stages * chunks <= layers,
        f"layout.pipe={stages} x {chunks} {'chunk' if chunks == 1 else 'chunks'} need at least {stages * chunks} layers,"
        f" but the model has {layers} (model.layers); lower layout.pipe or layout.chunks",
    )


def _balanced(layout: LayoutConfig, model: ModelConfig, schedule: Schedule) -> list[list[int]]:
    """The split whose busiest stage has the least work, the head's counted; among nearly equal ones that with the fewest rows."""
    _require_layers(layout.pipe, schedule.chunks, model.layers)
    last = schedule.at(schedule.positions - 1)[0]
    extra = [0.0 if s != last or layout.split_vocabulary else _head_in_layers(model) for s in range(schedule.stages)]
    return [_evenly(n, schedule.chunks) for n in _least_work(model.layers, schedule.chunks, tuple(extra))]


@functools.lru_cache(maxsize=64)
def _least_work(layers: int, chunks: int, extra: tuple[float, ...]) -> list[int]:
    """Layers of each stage, which has `extra` work beside them."""
    positions = len(extra) * chunks
    least = -(-layers // positions)
    splits = [_filled(layers, chunks, extra, rows) for rows in range(least, layers - positions + 2)]
    work = [max(n + e for n, e in zip(split, extra, strict=True)) for split in splits]
    return splits[next(i for i, w in enumerate(work) if w <= NEARLY * min(work))]


def _filled(layers: int, chunks: int, extra: tuple[float, ...], rows: int) -> list[int]:
    """Layers of each stage, one after another to the stage with the least work, at most `rows` a chunk."""
    counts = [chunks] * len(extra)
    for _ in range(layers - len(extra) * chunks):
        free = [s for s, n in enumerate(counts) if n < rows * chunks]
        counts[min(free, key=lambda s: (counts[s] + extra[s], s))] += 1
    return counts


def _evenly(layers: int, chunks: int) -> list[int]:
    return [layers // chunks + (c < layers % chunks) for c in range(chunks)]


def _head_in_layers(model: ModelConfig) -> float:
    """The multiplications of the head for one token, in those of a layer's matrices (the embedding has none)."""
    if not model.is_language_model:
        return 0.0
    matrices = 3 if model.family == "llama" else 2
    layer = 2 * (model.heads + model.kv_heads) * model.head_size + matrices * model.d_ff
    return model.vocab_size / layer
