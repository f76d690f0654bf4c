"""From orders to times: what each stage does one after another, and the earliest that each operation can start.

The same rule serves tables with one operation per tick, packed tables and simulated seconds: an operation starts when the
one before it on its stage, and those whose results it uses, let it. They differ only in how long each of them takes to do so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.config import Refused, require
from meshwright.schedules.table import Op, Schedule

Orders = Sequence[Sequence[Op]]
"""For each stage, its operations in order."""

At = tuple[int, Op]
"""An operation on a stage."""


def earliest(
    schedule: Schedule,
    orders: Orders,
    step: Callable[[int, Op, Op], Any],
    lag: Callable[[int, Op, int], Any],
) -> dict[At, Any]:
    """The earliest start of every operation, in the order in which they become known.

    Args:
        schedule: gives the stages and who needs whom; its table is not read.
        orders: for each stage, its operations in order.
        step: (stage, before, op): the time from the start of the operation just before on the stage to the start of `op`.
        lag: (stage, made, user): the time from the start of `made` on `stage` to where stage `user` may use its result.

    Refuses orders that wait for each other, naming the stages and what they wait for.
    """
    start: dict[At, Any] = {}
    done = [0] * schedule.stages
    waiting: dict[At, list[int]] = {}
    ready = list(reversed(range(schedule.stages)))
    while ready:
        stage = ready.pop()
        order = orders[stage]
        while done[stage] < len(order):
            op = order[done[stage]]
            needs = schedule.needs(stage, op)
            missing = next((need for need in needs if need not in start), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(stage)
                break
            times = [start[need] + lag(need[0], need[1], stage) for need in needs]
            if done[stage]:
                before = order[done[stage] - 1]
                times.append(start[stage, before] + step(stage, before, op))
            start[stage, op] = max(times, default=0)
            done[stage] += 1
            ready += waiting.pop((stage, op), ())
    if waiting:
        raise Refused(_deadlock(schedule, orders, done, waiting))
    return start


def _deadlock(schedule: Schedule, orders: Orders, done: list[int], waiting: Mapping[At, list[int]]) -> str:
    waits = sorted((stage, need) for need, stages in waiting.items() for stage in stages)
    text = "; ".join(f"stage {s} waits with {orders[s][done[s]]} for {op} of stage {there}" for s, (there, op) in waits)
    return f"schedule {schedule.name}: the orders wait for each other and stand still: {text}; move what is waited for forward"


def ticks(schedule: Schedule, tick_of: Mapping[At, int]) -> Schedule:
    """`schedule` with the table that has each operation in the given tick; those of one stage and tick in the order F, B, W."""
    table: list[list[list[Op]]] = [[[] for _ in range(schedule.stages)] for _ in range(max(tick_of.values()) + 1)]
    for (stage, op), tick in tick_of.items():
        table[tick][stage].append(op)
    return replace(schedule, table=tuple(tuple(tuple(ops) for ops in tick) for tick in table))


def one_by_one(schedule: Schedule, orders: Orders) -> Schedule:
    """`schedule` with the table that has one operation per stage and tick, each as early as its stage's order allows."""
    require_complete(schedule, orders)
    delay = schedule.delay
    lag = lambda stage, made, user: 1 if stage == user else delay  # noqa: E731
    return ticks(schedule, earliest(schedule, orders, lambda stage, before, op: 1, lag))


def from_orders(
    name: str,
    orders: Orders,
    microbatches: int,
    *,
    chunks: int = 1,
    placement: str = "straight",
    splits_backward: bool = False,
) -> Schedule:
    """The schedule in which each stage does its operations in the given order, each as early as that allows.

    Refuses operations that are missing, double or unknown, and orders that wait for each other.
    """
    return one_by_one(Schedule(name, len(orders), microbatches, (), chunks, placement, splits_backward), orders)


def require_complete(schedule: Schedule, orders: Orders) -> None:
    """Refuse orders that do not hold each operation of each microbatch and chunk exactly once."""
    require(
        len(orders) == schedule.stages,
        f"schedule {schedule.name}: there are orders for {len(orders)} stages, but {schedule.stages} stages",
    )
    wanted = {
        Op(kind, microbatch, chunk)
        for kind in schedule.kinds
        for microbatch in range(schedule.microbatches)
        for chunk in range(schedule.chunks)
    }
    for stage, order in enumerate(orders):
        seen: set[Op] = set()
        for op in order:
            require(op not in seen, f"schedule {schedule.name}: stage {stage} has {op} twice; once is right")
            require(
                op in wanted,
                f"schedule {schedule.name}: stage {stage} has {op}, but kinds are {' '.join(schedule.kinds)}, microbatches 0 to"
                f" {schedule.microbatches - 1}, chunks 0 to {schedule.chunks - 1}",
            )
            seen.add(op)
        lacks = sorted(wanted - seen)
        require(not lacks, f"schedule {schedule.name}: stage {stage} never does {', '.join(map(str, lacks[:4]))}")
