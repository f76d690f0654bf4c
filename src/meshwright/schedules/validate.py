"""Is a table a right schedule? Every fault names the tick, the stage and the operation."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.config import Refused
from meshwright.schedules.table import KINDS, PLACEMENTS, Op, Schedule


class Fault(NamedTuple):
    """What is wrong, and where; `tick` and `stage` are None where the fault is of no one place."""

    text: str
    tick: int | None = None
    stage: int | None = None
    op: Op | None = None

    def __str__(self) -> str:
        place = [f"tick {self.tick}"] if self.tick is not None else []
        place += [f"stage {self.stage}"] if self.stage is not None else []
        place += [str(self.op)] if self.op is not None else []
        return ", ".join(place) + (": " if place else "") + self.text


def validate(schedule: Schedule) -> Schedule:
    """Return `schedule`, or refuse it with its first fault."""
    for fault in faults(schedule):
        raise Refused(f"schedule {schedule.name}: {fault}")
    return schedule


def faults(schedule: Schedule) -> Iterator[Fault]:
    """What is wrong with a schedule: its sizes; else its operations; else who waits for whom."""
    found = False
    for check in (_sizes, _operations, _dependencies):
        for fault in check(schedule):
            found = True
            yield fault
        if found:
            return


def _sizes(schedule: Schedule) -> Iterator[Fault]:
    for name in ("stages", "microbatches", "chunks", "delay"):
        if getattr(schedule, name) < 1:
            yield Fault(f"{name}={getattr(schedule, name)} must be at least 1")
    if schedule.placement not in PLACEMENTS:
        yield Fault(f"placement={schedule.placement!r} is not known; allowed: {', '.join(PLACEMENTS)}")
    for tick, row in enumerate(schedule.table):
        if len(row) != schedule.stages:
            yield Fault(f"has operations for {len(row)} stages, but there are {schedule.stages}", tick)


def _operations(schedule: Schedule) -> Iterator[Fault]:
    """Each operation is known, is done once on each stage, and a tick has one of each kind at most, in order."""
    seen: dict[tuple[int, Op], int] = {}
    for tick, row in enumerate(schedule.table):
        for stage, ops in enumerate(row):
            before = -1
            for op in ops:
                unknown = _unknown(schedule, op)
                if unknown:
                    yield Fault(unknown, tick, stage, op)
                    continue
                if (stage, op) in seen:
                    yield Fault(f"is done a second time; the first was in tick {seen[stage, op]}", tick, stage, op)
                seen.setdefault((stage, op), tick)
                rank = KINDS.index(op.kind)
                if rank <= before:
                    yield Fault(
                        f"comes after {KINDS[before]}; a stage does at most one F, one B and one W in a tick, in this order",
                        tick,
                        stage,
                        op,
                    )
                before = rank
    for kind in schedule.kinds:
        for stage in range(schedule.stages):
            for chunk in range(schedule.chunks):
                for microbatch in range(schedule.microbatches):
                    op = Op(kind, microbatch, chunk)
                    if (stage, op) not in seen:
                        yield Fault("is never done", None, stage, op)


def _unknown(schedule: Schedule, op: Op) -> str:
    if op.kind not in schedule.kinds:
        return f"is of no known kind; this schedule has {', '.join(schedule.kinds)}"
    if not 0 <= op.microbatch < schedule.microbatches:
        return f"microbatch {op.microbatch} does not exist; there are 0 to {schedule.microbatches - 1}"
    if not 0 <= op.chunk < schedule.chunks:
        return f"chunk {op.chunk} does not exist; there are 0 to {schedule.chunks - 1}"
    return ""


def _dependencies(schedule: Schedule) -> Iterator[Fault]:
    """What an operation uses was made: in an earlier tick, or earlier in its tick; on another stage `delay` ticks before."""
    for (stage, op), tick in schedule.tick_of.items():
        for there, need in schedule.needs(stage, op):
            made = schedule.tick_of[there, need]
            if there != stage and made + schedule.delay > tick:
                ticks = "a tick" if schedule.delay == 1 else f"{schedule.delay} ticks"
                yield Fault(
                    f"uses {need} of stage {there}, which is done in tick {made}; it must be {ticks} before",
                    tick,
                    stage,
                    op,
                )
            if there == stage and (made, KINDS.index(need.kind)) >= (tick, KINDS.index(op.kind)):
                yield Fault(f"uses {need} of the same stage, which is done in tick {made}, not before", tick, stage, op)
