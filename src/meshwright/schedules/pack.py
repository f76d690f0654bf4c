"""The form that the program runs: several operations in a tick, and loops that hold only what their ticks need.

The program is a loop over ticks. In a tick a stage does at most one F, one B and one W, in that order; what they make is
sent to the neighbours at the tick's end (`delay` 1), or beside the next tick (`delay` 2).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, groupby
from typing import NamedTuple

from meshwright.config import require
from meshwright.schedules.place import earliest, ticks
from meshwright.schedules.table import KINDS, Schedule


def pack(schedule: Schedule, delay: int = 1) -> Schedule:
    """The same order on every stage, in the fewest ticks: each operation in the earliest tick that may have it.

    What is in flight stays as it is. Operations of one stage share a tick where their kinds come in the order F, B, W; one
    may use what another made in the same tick on the same stage, and on other stages what was made `delay` ticks before.
    """
    require(
        delay >= 1, f"pack: delay={delay} must be at least 1: what is sent can be used in the next tick at the earliest"
    )
    rank = {kind: i for i, kind in enumerate(KINDS)}
    tick_of = earliest(
        schedule,
        [schedule.order(stage) for stage in range(schedule.stages)],
        step=lambda stage, before, op: 0 if rank[before.kind] < rank[op.kind] else 1,
        lag=lambda stage, made, user: 0 if stage == user else delay,
    )
    return ticks(replace(schedule, delay=delay), tick_of)


class Segment(NamedTuple):
    """Ticks `first` to `last` (exclusive) that one loop runs, and the kinds that some stage does in them."""

    first: int
    last: int
    kinds: tuple[str, ...]


LOOP_COST = 2
"""What one more loop must save, counted in kinds that a tick's stages all skip: a loop is compiled, and starts anew."""

HEAD, HEAD_COST = "head", 0.1
"""The loss is computed in ticks with an F of the model's last chunk; carried in vain it weighs less than a kind."""


def segments(schedule: Schedule, most: int = 5) -> list[Segment]:
    """Cut the table into at most `most` loops such that few ticks carry kinds that no stage does in them.

    The program compiles each loop with the operations and transfers of its kinds alone. By dynamic programming over (kinds
    of the loop, loops so far): the fewest kinds carried in vain (the head is one), plus `LOOP_COST` for each loop.
    """
    last = schedule.at(schedule.positions - 1)
    is_last = lambda stage, op: op.kind == "F" and (stage, op.chunk) == last  # noqa: E731
    used = [{op.kind for ops in row for op in ops} for row in schedule.table]
    for kinds, row in zip(used, schedule.table, strict=True):
        kinds |= {HEAD} if any(is_last(stage, op) for stage, ops in enumerate(row) for op in ops) else set()
    all_kinds = (*schedule.kinds, HEAD)
    sets = [frozenset(kinds) for n in range(1, len(all_kinds) + 1) for kinds in combinations(all_kinds, n)]
    best: dict[tuple[frozenset[str], int], tuple[float, tuple[int, ...]]] = {}
    tick = 0
    for kinds, same in groupby(used):
        count = len(list(same))
        now: dict[tuple[frozenset[str], int], tuple[float, tuple[int, ...]]] = {}
        opened = [min((cost for (_, n), cost in best.items() if n == loops), default=None) for loops in range(most)]
        if not tick:
            opened[0] = (0, ())
        for loop in sets:
            if not kinds <= loop:
                continue
            waste = sum(HEAD_COST if kind == HEAD else 1 for kind in loop - kinds)
            for loops in range(1, most + 1):
                stay = best.get((loop, loops))
                start = opened[loops - 1]
                options = [stay] if stay else []
                options += [(start[0] + LOOP_COST, (*start[1], tick))] if start else []
                if options:
                    cost, firsts = min(options)
                    now[loop, loops] = (cost + waste * count, firsts)
        best, tick = now, tick + count
    firsts = min(best.values())[1]
    return list(_between(used, firsts, schedule.kinds))


def _between(used: list[set[str]], firsts: tuple[int, ...], kinds: tuple[str, ...]) -> Iterator[Segment]:
    for first, last in zip(firsts, (*firsts[1:], len(used)), strict=True):
        does = set().union(*used[first:last])
        yield Segment(first, last, tuple(kind for kind in kinds if kind in does))
