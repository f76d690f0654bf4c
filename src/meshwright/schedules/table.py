"""A pipeline schedule is a table: for each tick and stage, the operations done there.

An operation is F (forward), B (backward; of the input alone where the backward is split) or W (gradient of the weights,
where it is split) of one microbatch on one of the stage's chunks of layers. One table drives the program that trains,
the simulation of its time and the picture. What is made in one tick is used on another stage in a later tick.

A table may have one operation per stage and tick, as papers draw them (`generate`), or several (`pack`), as the program
runs them.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("F", "B", "W")
"""In a tick a stage does at most one operation of each kind, in this order."""

PLACEMENTS = ("straight", "v")


class Op(NamedTuple):
    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        """``F3``, or ``F3.1`` on chunk 1."""
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Tick = tuple[tuple[Op, ...], ...]
"""For each stage, what it does in this tick, in the order of `KINDS`."""


@dataclass(frozen=True)
class Schedule:
    """Who does what when. `table[tick][stage]` are operations."""

    name: str
    stages: int
    microbatches: int
    table: tuple[Tick, ...]
    chunks: int = 1
    placement: str = "straight"
    """Where chunk c of stage s stands in the model: `straight` c * stages + s; `v`: chunk 1 runs back from the last stage."""
    splits_backward: bool = False
    delay: int = 1
    """The fewest ticks between making and using on another stage; 2 leaves a whole tick for the transfer."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that each (microbatch, chunk) goes through. The last one ends its stay in memory."""
        return KINDS if self.splits_backward else KINDS[:2]

    @property
    def positions(self) -> int:
        """The number of chunks of all stages together: places in the model, first to last."""
        return self.stages * self.chunks

    def position(self, stage: int, chunk: int) -> int:
        return position(self.placement, self.stages, stage, chunk)

    def at(self, position: int) -> tuple[int, int]:
        """(stage, chunk) of a position."""
        chunk, place = divmod(position, self.stages)
        return (self.stages - 1 - place if self.placement == "v" and chunk % 2 else place), chunk

    def needs(self, stage: int, op: Op) -> list[tuple[int, Op]]:
        """The (stage, operation) pairs whose results `op` on `stage` uses."""
        kind, microbatch, chunk = op
        if kind == "W":
            return [(stage, Op("B", microbatch, chunk))]
        place = self.position(stage, chunk)
        own = [(stage, Op("F", microbatch, chunk))] if kind == "B" else []
        place += 1 if kind == "B" else -1
        if not 0 <= place < self.positions:
            return own
        there, other = self.at(place)
        return [*own, (there, Op(kind, microbatch, other))]

    def order(self, stage: int) -> list[Op]:
        """What `stage` does, in order."""
        return [op for tick in self.table for op in tick[stage]]

    @functools.cached_property
    def tick_of(self) -> dict[tuple[int, Op], int]:
        """The tick of each (stage, operation)."""
        return {(stage, op): t for t, tick in enumerate(self.table) for stage, ops in enumerate(tick) for op in ops}

    def peak_in_flight(self) -> tuple[int, ...]:
        """For each stage, the most (microbatch, chunk) pairs it holds at once, each from its F until its last operation."""
        last = self.kinds[-1]
        peaks = []
        for stage in range(self.stages):
            held = most = 0
            for op in self.order(stage):
                held += op.kind == "F"
                most = max(most, held)
                held -= op.kind == last
            peaks.append(most)
        return tuple(peaks)


def position(placement: str, stages: int, stage: int, chunk: int) -> int:
    """The place in the model of a stage's chunk (`Schedule.placement`)."""
    return chunk * stages + (stages - 1 - stage if placement == "v" and chunk % 2 else stage)
