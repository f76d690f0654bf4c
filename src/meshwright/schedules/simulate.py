"""The time of a pipeline schedule, operation by operation: free-running stages, and the one program that couples them.

`asynchronous` is the model of the papers: a stage starts its next operation when it is free and its inputs have arrived
(Qi et al. 2023, arXiv 2401.10241, section 3.1, with T_comm between stages). `executor` is the program that trains: one
loop over ticks, with a transfer between neighbours in each tick.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.schedules.pack import pack, segments
from meshwright.schedules.place import At
from meshwright.schedules.table import Op, Schedule
from meshwright.schedules.times import Times, starts

__all__ = ["Span", "Timeline", "Times", "Transfer", "asynchronous", "executor", "executor_form"]


class Span(NamedTuple):
    """One operation in time."""

    stage: int
    op: Op
    start: float
    end: float


class Transfer(NamedTuple):
    """The result of `op`, which `source` makes and `target` uses, on its way."""

    source: int
    target: int
    op: Op
    leave: float
    arrive: float


@dataclass(frozen=True)
class Timeline:
    """When everything happens, in the unit of `times`."""

    schedule: Schedule
    times: Times
    spans: tuple[tuple[Span, ...], ...]
    """For each stage, its operations in order."""
    transfers: tuple[Transfer, ...]
    """In order of leaving."""
    total: float
    """From the start of the first operation to the end of the last."""

    @property
    def busy(self) -> tuple[float, ...]:
        """For each stage, the time of its operations together."""
        return tuple(sum(span.end - span.start for span in stage) for stage in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The share of all stages' time in which they do nothing."""
        return 1 - sum(self.busy) / (len(self.spans) * self.total)

    @property
    def longest_stage(self) -> float:
        """The longest time from a stage's first operation to the end of its last one."""
        return max(stage[-1].end - stage[0].start for stage in self.spans)

    @property
    def stage_bubble_fraction(self) -> float:
        """The bubble rate of the zero-bubble papers: `longest_stage` in place of `total`.

        That is the share lost in steps that follow each other with no barrier between them, where a stage that ends early
        starts the next step early (Qi et al. 2023, section 5.3 and its optimizer post-validation).
        """
        return 1 - sum(self.busy) / (len(self.spans) * self.longest_stage)

    @cached_property
    def in_flight(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """For each stage, (time, held from then on): (microbatch, chunk) pairs, each from the start of its F to its last end."""
        last = self.schedule.kinds[-1]
        stages = []
        for spans in self.spans:
            changes = [(span.start, 1) for span in spans if span.op.kind == "F"]
            changes += [(span.end, -1) for span in spans if span.op.kind == last]
            held, steps = 0, []
            for time, change in sorted(changes):  # at one time, what ends makes room first
                held += change
                if steps and steps[-1][0] == time:
                    steps.pop()
                steps.append((time, held))
            stages.append(tuple(steps))
        return tuple(stages)

    @property
    def peaks(self) -> tuple[int, ...]:
        """For each stage, the most it holds at once."""
        return tuple(max(held for _, held in steps) for steps in self.in_flight)


def asynchronous(schedule: Schedule, times: Times) -> Timeline:
    """The schedule on stages that each follow their order and wait for nothing else than what they use."""
    start = starts(schedule, [schedule.order(stage) for stage in range(schedule.stages)], times)
    end = {at: time + times.of(schedule, *at) for at, time in start.items()}
    transfers = [
        Transfer(source, target, op, end[source, op], end[source, op] + times.send)
        for source, target, op in _sent(schedule)
    ]
    return _timeline(schedule, times, start, end, transfers, max(end.values()))


def executor(schedule: Schedule, times: Times) -> Timeline:
    """The schedule as one program runs it, tick by tick, each stage its operations of a tick one after another.

    At a tick's end each stage waits for what its neighbours send, whether or not it holds anything: the transfer is part of
    the loop. With `schedule.delay` 1, a stage starts tick t+1 when it and the neighbours that it receives from have ended tick t,
    plus `times.send`. With 2 the transfer runs beside the next tick: tick t+1 needs the neighbours' tick t-1. Loops
    (`pack.segments`) without F or without B have no transfer of that direction.
    """
    stages, delay = range(schedule.stages), min(schedule.delay, 2)
    kinds = [set(segment.kinds) for segment in segments(schedule) for _ in range(segment.first, segment.last)]
    sources = [_sources(schedule, stage) for stage in stages]
    tick_end: list[list[float]] = []
    start: dict[At, float] = {}
    end: dict[At, float] = {}
    for tick, row in enumerate(schedule.table):
        ends = []
        for stage in stages:
            waits = [tick_end[tick - 1][stage]] if tick else [0]
            if tick >= delay:
                made = tick_end[tick - delay]
                waits += [made[s] + times.send for kind, s in sources[stage] if kind in kinds[tick - delay]]
            now = max(waits)
            for op in row[stage]:
                start[stage, op] = now
                now += times.of(schedule, stage, op)
                end[stage, op] = now
            ends.append(now)
        tick_end.append(ends)
    transfers = []
    for source, target, op in _sent(schedule):
        leave = tick_end[schedule.tick_of[source, op]][source]
        transfers.append(Transfer(source, target, op, leave, leave + times.send))
    return _timeline(schedule, times, start, end, transfers, max(end.values()))


def executor_form(schedule: Schedule, times: Times) -> Schedule:
    """The fastest form for the program: the table itself, or packed with a delay of 1 or 2; among equals, fewest loops."""
    forms = [schedule, pack(schedule, 1), pack(schedule, 2)]
    return min(forms, key=lambda form: (executor(form, times).total, len(segments(form)), len(form.table)))


def _sent(schedule: Schedule) -> list[tuple[int, int, Op]]:
    """(source, target, operation) for each result that another stage uses, in table order."""
    sent = []
    for stage, op in schedule.tick_of:
        if op.kind == "W":
            continue
        place = schedule.position(stage, op.chunk) + (1 if op.kind == "F" else -1)
        target = schedule.at(place)[0] if 0 <= place < schedule.positions else stage
        if target != stage:
            sent.append((stage, target, op))
    return sent


def _sources(schedule: Schedule, stage: int) -> set[tuple[str, int]]:
    """(kind, neighbour) for each direction in which `stage` receives."""
    sources = set()
    for chunk in range(schedule.chunks):
        place = schedule.position(stage, chunk)
        for kind, other in (("F", place - 1), ("B", place + 1)):
            if 0 <= other < schedule.positions:
                sources.add((kind, schedule.at(other)[0]))
    return {(kind, other) for kind, other in sources if other != stage}


def _timeline(
    schedule: Schedule,
    times: Times,
    start: dict[At, float],
    end: dict[At, float],
    transfers: list[Transfer],
    total: float,
) -> Timeline:
    spans = tuple(
        tuple(Span(stage, op, start[stage, op], end[stage, op]) for op in schedule.order(stage))
        for stage in range(schedule.stages)
    )
    return Timeline(schedule, times, spans, tuple(sorted(transfers, key=lambda t: (t.leave, t.source))), total)
