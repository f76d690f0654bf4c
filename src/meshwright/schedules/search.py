"""zb-auto: a zero-bubble schedule searched for given times and a limit of what each stage holds.

After the automatic schedule of Qi et al. 2023 (arXiv 2401.10241, section 3.1): each stage does some forwards first, then
backwards and forwards by turns; W fills what would be idle, and makes room where the memory is full. The paper tries
a few rules of when to warm up longer and which gaps to fill. Here both are numbers per stage, the paper's choices are where
the search begins, and each number is then moved for as long as that helps.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from meshwright.config import require
from meshwright.schedules.orders import zb_h
from meshwright.schedules.place import one_by_one
from meshwright.schedules.table import Op, Schedule
from meshwright.schedules.times import Times
from meshwright.schedules.trial import ROUNDING, Choice, Rows, Task, build, follow, keeps, keeps_row

MEASURES = ("total", "longest_stage")
OPERATIONS = 2_000_000
"""How many operations each half of a search may place, in all it tries: a second or two."""
GAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""From which gap on W is done in it, in times of W. Below 1 it ends after what it waited for has come."""
MOVES = (1, 2, 3, 6)
"""How many places later an operation is tried."""
CLOSE = 1 + ROUNDING
"""A measure this near to the least is the least."""


def search(
    stages: int,
    microbatches: int,
    times: Times,
    memory_limit: float | Sequence[float] | None = None,
    *,
    kept: float = 1,
    measure: str = "total",
) -> Schedule:
    """The fastest schedule found, one chunk per stage; never slower than ZB-H1 and ZB-H2 where they keep the limit.

    Args:
        times: of each operation (`Times`); uneven stages are fine.
        memory_limit: what each stage, or every stage, may hold, in microbatches; R where nothing is said, as in 1F1B.
        kept: the part of a microbatch's memory that is held from the end of B to the end of W.
        measure: what is made small: `total`, or `longest_stage` as in the paper, where a stage need not wait for the others
            at the end of a step (`Timeline.longest_stage`).
    """
    require(measure in MEASURES, f"zb-auto: measure={measure!r} is not known; allowed: {', '.join(MEASURES)}")
    for setting, value in (("stages", stages), ("microbatches", microbatches)):
        require(value >= 1, f"zb-auto: {setting}={value} must be at least 1")
    require(0 <= kept <= 1, f"zb-auto: kept={kept} must be from 0 to 1")
    shape = Schedule("zb-auto", stages, microbatches, (), splits_backward=True)
    task = _task(shape, times, stages if memory_limit is None else memory_limit, kept, measure)

    known = [_zb_h(stages, microbatches, ahead) for ahead in (1, 2)]
    candidates = [rows for rows in known if keeps(task, rows)]
    candidates.append(_improved(task))
    best = min(candidates, key=lambda rows: follow(task, rows) or (math.inf,))
    return one_by_one(shape, _moved(task, best))


def _zb_h(stages: int, microbatches: int, ahead: int) -> Rows:
    """ZB-H1 or ZB-H2."""
    rows = [zb_h(stages, s, max(microbatches, ahead * (stages - 1) + 1), ahead) for s in range(stages)]
    return [[op for op in row if op.microbatch < microbatches] for row in rows]


def _task(shape: Schedule, times: Times, memory_limit: float | Sequence[float], kept: float, measure: str) -> Task:
    stages = range(shape.stages)
    limit = tuple(memory_limit) if isinstance(memory_limit, Sequence) else (memory_limit,) * shape.stages
    require(
        len(limit) == shape.stages and min(limit) >= 1,
        f"zb-auto: memory_limit={memory_limit} must be at least 1 microbatch, for all or for each of {shape.stages} stages",
    )
    F, B, W = (tuple(times.of(shape, stage, Op(kind, 0)) for stage in stages) for kind in "FBW")
    return Task(shape.microbatches, F, B, W, times.send, limit, kept, measure)


# ---- the search ----


def _improved(task: Task) -> Rows:
    """The best of the paper's choices, each of its numbers moved for as long as that makes it better."""
    tries = max(1, OPERATIONS // task.placed)
    (cost, rows), choice = min(((build(task, c), c) for c in _first_choices(task)), key=lambda found: found[0][0])
    improved = True
    while improved and cost[0] > task.least * CLOSE:
        improved = False
        for stage in range(task.stages):
            for changed in _neighbours(task, choice, stage):
                tries -= 1
                found = build(task, changed)
                if found[0] < cost:
                    (cost, rows), choice, improved = found, changed, True
                if tries <= 0:
                    return rows
    return rows


def _moved(task: Task, rows: Rows) -> Rows:
    """`rows` with single operations moved to later places on their stage, for as long as that makes it better."""
    tries = OPERATIONS // task.placed
    cost = follow(task, rows)
    assert cost is not None
    improved = True
    while improved and cost[0] > task.least * CLOSE:
        improved = False
        for stage, at, further in itertools.product(range(task.stages), range(3 * task.microbatches), MOVES):
            if at + further >= 3 * task.microbatches:
                continue
            row = [
                *rows[stage][:at],
                *rows[stage][at + 1 : at + 1 + further],
                rows[stage][at],
                *rows[stage][at + 1 + further :],
            ]
            changed = [*rows[:stage], row, *rows[stage + 1 :]]
            found = follow(task, changed) if keeps_row(task, stage, row) else None
            tries -= 1
            if found is not None and found < cost:
                cost, rows, improved = found, changed, True
            if tries <= 0:
                return rows
    return rows


def _first_choices(task: Task) -> Iterator[Choice]:
    """The warm-ups of ZB-H1 and ZB-H2, and the two that fill the time until the first backward, just not and just beyond."""
    R = task.stages
    until = [sum(task.F[s:]) + sum(task.B[s + 1 :]) + 2 * (R - 1 - s) * task.send for s in range(R)]
    fills = [until[s] / task.F[s] + ROUNDING for s in range(R)] if min(task.F) > 0 else [R for _ in range(R)]
    warms = [
        [R - s for s in range(R)],
        [2 * (R - s) - 1 for s in range(R)],
        [int(fill) for fill in fills],
        [int(fill) + 1 for fill in fills],
    ]
    for warm in warms:
        for gap in GAPS:
            yield Choice(_allowed(task, warm), (gap,) * R)


def _allowed(task: Task, warm: Sequence[int]) -> tuple[int, ...]:
    """`warm` within the limits, and nowhere more than on the stage before."""
    allowed, most = [], task.microbatches
    for wish, limit in zip(warm, task.limit, strict=True):
        most = min(most, int(limit + ROUNDING), max(wish, 1))
        allowed.append(most)
    return tuple(allowed)


def _neighbours(task: Task, choice: Choice, stage: int) -> Iterator[Choice]:
    """The choices that differ in one number of `stage`, or in the warm-up of all stages up to it or from it on."""
    stages = range(task.stages)
    for change in (1, -1):
        for moved in ({stage}, set(stages[: stage + 1]), set(stages[stage:])):
            warm = tuple(w + change * (s in moved) for s, w in enumerate(choice.warm))
            if warm == _allowed(task, warm):
                yield Choice(warm, choice.gap)
    for gap in GAPS:
        if gap != choice.gap[stage]:
            yield Choice(choice.warm, (*choice.gap[:stage], gap, *choice.gap[stage + 1 :]))
