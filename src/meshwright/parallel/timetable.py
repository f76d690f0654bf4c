"""A schedule as the numbers that one compiled loop reads: who does what on which microbatch, and in which slot it waits.

Every value that waits (an input that has arrived, what a forward pass keeps, what a split backward pass leaves for its
weights) has a slot of a ring of buffers on its stage. Slots are given out here, before anything runs: the fewest that do.
Within a tick the order is F (which keeps, and at the model's end makes the gradient that the last B uses), B, W, arrivals.
"""

import functools
import heapq
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from meshwright.schedules.pack import Segment, pack, segments
from meshwright.schedules.table import Op, Schedule

FORWARD, BACKWARD, WEIGHTS, ARRIVAL = range(4)
"""The order within a tick."""


@dataclass(frozen=True)
class Channel:
    """What travels from stage to stage in one direction: results of F (activations) or of B (their gradients)."""

    kind: str
    by: int
    """To the next stage (1), to the one before (-1), or nowhere (0): from one chunk of a stage to another of its own."""

    @property
    def name(self) -> str:
        return f"{self.kind}{self.by:+d}"


@dataclass(frozen=True)
class Loop:
    """A run of ticks with the same kinds of work: `columns[name]` are i32[ticks, stages]."""

    kinds: tuple[str, ...]
    columns: dict[str, np.ndarray]


@dataclass(frozen=True)
class Timetable:
    """What the loops read.

    Columns of work, for each kind k: `k` (1 where the stage does it), `k_microbatch`, `k_chunk`, and `k_first` and
    `k_last` (1 where the chunk is the model's first or last; left out of a loop without). Columns of slots: `F_input`,
    `F_stash`, `F_slope` (where the loss's gradient waits for the last B), `B_slope`, `B_stash`, `B_tape`, `W_tape`; and for
    each channel the slot that what arrives at the tick's end gets. A slot equal to the depth of its ring is no slot.
    """

    schedule: Schedule
    loops: tuple[Loop, ...]
    channels: tuple[Channel, ...]
    depths: dict[str, int] = field(default_factory=dict)
    """Slots of each ring: input, stash, slope, tape."""


@functools.lru_cache(maxsize=16)
def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """The forward passes of a schedule's first microbatches alone, each as early as can be: for evaluation."""
    orders = [
        [op for op in schedule.order(stage) if op.kind == "F" and op.microbatch < microbatches]
        for stage in range(schedule.stages)
    ]
    one_by_one = zip_longest(*([(op,) for op in row] for row in orders), fillvalue=())
    return pack(replace(schedule, microbatches=microbatches, table=tuple(one_by_one)))


@functools.lru_cache(maxsize=16)
def timetable(schedule: Schedule) -> Timetable:
    """The timetable of a valid schedule."""
    rings = {
        "input": _inputs(schedule),
        "stash": _stashes(schedule),
        "slope": _slopes(schedule),
        "tape": _tapes(schedule),
    }
    slots, depths = {}, {}
    for name, stays in rings.items():
        slots[name], depths[name] = _give_out(schedule.stages, stays)
    columns, channels = _columns(schedule, slots, depths)
    loops = tuple(_loop(segment, columns) for segment in segments(schedule))
    return Timetable(schedule, loops, channels, depths)


def _loop(segment: Segment, columns: dict[str, np.ndarray]) -> Loop:
    """A segment's rows, without what no stage does in them."""
    rows = {name: column[segment.first : segment.last] for name, column in columns.items()}
    ends = [name for name in rows if name.endswith(("_first", "_last")) and not rows[name].any()]
    return Loop(segment.kinds, {name: column for name, column in rows.items() if name not in ends})


@dataclass(frozen=True, order=True)
class _Stay:
    """Something that waits on a stage from one moment to another; moments are (tick, order within the tick)."""

    begin: tuple[int, int]
    end: tuple[int, int]
    stage: int
    what: tuple[int, int]
    """(microbatch, chunk)"""


def _inputs(schedule: Schedule) -> list[_Stay]:
    """Activations, from their arrival to the F that uses them."""
    stays = []
    for (stage, op), tick in schedule.tick_of.items():
        source = _maker(schedule, stage, op, -1) if op.kind == "F" else None
        if source:
            made = schedule.tick_of[source]
            local = source[0] == stage
            arrival = (made, FORWARD) if local else (made + schedule.delay - 1, ARRIVAL)
            stays.append(_Stay(arrival, (tick, FORWARD), stage, op[1:]))
    return stays


def _slopes(schedule: Schedule) -> list[_Stay]:
    """Gradients by a chunk's result, from their arrival (the last chunk's: from its own F) to the B that uses them."""
    stays = []
    for (stage, op), tick in schedule.tick_of.items():
        if op.kind != "B":
            continue
        source = _maker(schedule, stage, op, 1)
        if source is None:
            arrival = (schedule.tick_of[stage, op._replace(kind="F")], FORWARD)
        else:
            made, local = schedule.tick_of[source], source[0] == stage
            arrival = (made, BACKWARD) if local else (made + schedule.delay - 1, ARRIVAL)
        stays.append(_Stay(arrival, (tick, BACKWARD), stage, op[1:]))
    return stays


def _stashes(schedule: Schedule) -> list[_Stay]:
    """What F keeps for B."""
    at = schedule.tick_of
    return [
        _Stay((tick, FORWARD), (at[stage, op._replace(kind="B")], BACKWARD), stage, op[1:])
        for (stage, op), tick in at.items()
        if op.kind == "F" and (stage, op._replace(kind="B")) in at
    ]


def _tapes(schedule: Schedule) -> list[_Stay]:
    """What B leaves for W."""
    at = schedule.tick_of
    return [
        _Stay((tick, BACKWARD), (at[stage, op._replace(kind="W")], WEIGHTS), stage, op[1:])
        for (stage, op), tick in at.items()
        if op.kind == "B" and schedule.splits_backward
    ]


def _maker(schedule: Schedule, stage: int, op: Op, by: int) -> tuple[int, Op] | None:
    """Who makes what `op` uses: the same kind and microbatch at the position `by` away; None at the model's end."""
    place = schedule.position(stage, op.chunk) + by
    if not 0 <= place < schedule.positions:
        return None
    source, chunk = schedule.at(place)
    return source, op._replace(chunk=chunk)


Slots = dict[tuple[int, tuple[int, int]], int]


def _give_out(stages: int, stays: list[_Stay]) -> tuple[Slots, int]:
    """A slot for each (stage, (microbatch, chunk)), the fewest; a slot is free again after its end. And how many there are."""
    slots: Slots = {}
    depth = 0
    for stage in range(stages):
        free: list[int] = []
        used: list[tuple[tuple[int, int], int]] = []
        count = 0
        for stay in sorted(s for s in stays if s.stage == stage):
            while used and used[0][0] < stay.begin:
                heapq.heappush(free, heapq.heappop(used)[1])
            if not free:
                free, count = [count], count + 1
            slot = slots[stage, stay.what] = heapq.heappop(free)
            heapq.heappush(used, (stay.end, slot))
        depth = max(depth, count)
    return slots, depth


def _columns(
    schedule: Schedule, slots: dict[str, Slots], depths: dict[str, int]
) -> tuple[dict[str, np.ndarray], tuple[Channel, ...]]:
    ticks, stages = len(schedule.table), schedule.stages
    nothing = lambda: np.zeros((ticks, stages), np.int32)  # noqa: E731
    none_of = lambda ring: np.full((ticks, stages), depths[ring], np.int32)  # noqa: E731
    columns = {f"{kind}{what}": nothing() for kind in schedule.kinds for what in _WORK}
    columns |= {f"{kind}_{ring}": none_of(ring) for kind, rings in _RINGS.items() for ring in rings}
    channels: dict[str, Channel] = {}
    for (stage, op), tick in schedule.tick_of.items():
        place = schedule.position(stage, op.chunk)
        work = 1, op.microbatch, op.chunk, int(place == 0), int(place == schedule.positions - 1)
        for what, value in zip(_WORK, work, strict=True):
            columns[op.kind + what][tick, stage] = value
        for ring in _RINGS[op.kind]:
            if (op.kind, ring) == ("F", "slope") and place < schedule.positions - 1:
                continue  # only the model's last F makes a gradient
            columns[f"{op.kind}_{ring}"][tick, stage] = slots[ring].get((stage, op[1:]), depths[ring])
        target = _maker(schedule, stage, op, {"F": 1, "B": -1}.get(op.kind, schedule.positions))
        if target:
            ring = "input" if op.kind == "F" else "slope"
            channel = Channel(op.kind, (target[0] - stage + 1) % stages - 1 if stages > 1 else 0)
            channels.setdefault(channel.name, channel)
            column = columns.setdefault(channel.name, none_of(ring))
            arrival = tick + (schedule.delay - 1 if channel.by else 0)
            column[arrival, target[0]] = slots[ring][target[0], target[1][1:]]
    return columns, tuple(channels[name] for name in sorted(channels))


_WORK = ("", "_microbatch", "_chunk", "_first", "_last")
_RINGS = {"F": ("input", "stash", "slope"), "B": ("slope", "stash", "tape"), "W": ("tape",)}
