"""zb-auto: a zero-bubble schedule searched for given times and a limit of what each stage holds.

After the automatic schedule of Qi et al. 2023 (arXiv 2401.10241, section 3.1): each stage does some forwards first, then
backwards and forwards by turns; W fills what would be idle, and makes room where the memory is full. The paper tries
a few rules of when to warm up longer and which gaps to fill. Here both are numbers per stage, the paper's choices are where
the search begins, and each number is then moved for as long as that helps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.config import Refused, require
from meshwright.schedules.orders import zb_h
from meshwright.schedules.place import Orders, one_by_one
from meshwright.schedules.table import Op, Schedule
from meshwright.schedules.times import Times, starts

MEASURES = ("total", "longest_stage")
OPERATIONS = 3_000_000
"""How many operations a search may place, in all it tries: a few seconds."""
GAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""From which gap on W is done in it, in times of W. Below 1 it ends after what it waited for has come."""


@dataclass(frozen=True)
class Choice:
    """What is searched, for each stage."""

    warm: tuple[int, ...]
    """Forwards before the first backward; no stage has more than the one before it."""
    gap: tuple[float, ...]
    """Idle time, in times of W, in which W is done."""


@dataclass(frozen=True)
class _Task:
    """Sizes, times and limits by stage."""

    microbatches: int
    F: tuple[float, ...]
    B: tuple[float, ...]
    W: tuple[float, ...]
    send: float
    limit: tuple[float, ...]
    kept: float

    @property
    def stages(self) -> int:
        return len(self.F)

    def held(self, f: int, b: int, w: int) -> float:
        """What a stage holds after f forwards, b backwards and w weight gradients."""
        return f - b + self.kept * (b - w)


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
    require(0 <= kept <= 1, f"zb-auto: kept={kept} must be from 0 to 1")
    shape = Schedule("zb-auto", stages, microbatches, (), splits_backward=True)
    task = _task(shape, times, stages if memory_limit is None else memory_limit, kept)

    def cost(orders: Orders) -> tuple[float, float]:
        total, longest = _measures(shape, orders, times)
        return (total, longest) if measure == "total" else (longest, total)

    known = [
        tuple(zb_h(stages, s, max(microbatches, ahead * (stages - 1) + 1), ahead) for s in range(stages))
        for ahead in (1, 2)
    ]
    known = [[[op for op in row if op.microbatch < microbatches] for row in rows] for rows in known]
    candidates = [rows for rows in known if _keeps(task, rows)]
    candidates.append(_improved(task, measure))
    return one_by_one(shape, min(candidates, key=cost))


def _task(shape: Schedule, times: Times, memory_limit: float | Sequence[float], kept: float) -> _Task:
    stages = range(shape.stages)
    limit = tuple(memory_limit) if isinstance(memory_limit, Sequence) else (memory_limit,) * shape.stages
    require(
        len(limit) == shape.stages and min(limit) >= 1,
        f"zb-auto: memory_limit={memory_limit} must be at least 1 microbatch, for all or for each of {shape.stages} stages",
    )
    F, B, W = (tuple(times.of(shape, stage, Op(kind, 0)) for stage in stages) for kind in "FBW")
    return _Task(shape.microbatches, F, B, W, times.send, limit, kept)


def _measures(shape: Schedule, orders: Orders, times: Times) -> tuple[float, float]:
    """Total time and longest stage, as `asynchronous` has them."""
    start = starts(shape, orders, times)
    ends = [start[s, row[-1]] + times.of(shape, s, row[-1]) for s, row in enumerate(orders)]
    return max(ends), max(end - start[s, orders[s][0]] for s, end in enumerate(ends))


def _keeps(task: _Task, orders: Orders) -> bool:
    """Whether no stage holds more than its limit."""
    for stage, row in enumerate(orders):
        done = {"F": 0, "B": 0, "W": 0}
        for op in row:
            done[op.kind] += 1
            if task.held(*done.values()) > task.limit[stage] + 1e-9:
                return False
    return True


# ---- the search ----


def _improved(task: _Task, measure: str) -> Orders:
    """The best of the paper's choices, each of its numbers moved for as long as that makes it better."""
    tries = max(1, OPERATIONS // (3 * task.stages * task.microbatches))

    def built(choice: Choice) -> tuple[tuple[float, float, float], Choice, Orders]:
        total, longest, idle, orders = _build(task, choice)
        first, second = (total, longest) if measure == "total" else (longest, total)
        return (first, second, idle), choice, orders

    best = min((built(choice) for choice in _first_choices(task)), key=lambda result: result[0])
    improved = True
    while improved and tries > 0:
        improved = False
        for number in range(task.stages):
            for choice in _neighbours(task, best[1], number):
                tries -= 1
                result = built(choice)
                if result[0] < best[0]:
                    best, improved = result, True
                if tries <= 0:
                    return best[2]
    return best[2]


def _first_choices(task: _Task) -> Iterator[Choice]:
    """The warm-ups of ZB-H1 and ZB-H2, and the two that fill the time until the first backward, just not and just beyond."""
    R = task.stages
    until = [sum(task.F[s:]) + sum(task.B[s + 1 :]) + 2 * (R - 1 - s) * task.send for s in range(R)]
    fills = [until[s] / task.F[s] + 1e-9 for s in range(R)] if min(task.F) > 0 else [R for _ in range(R)]
    warms = [
        [R - s for s in range(R)],
        [2 * (R - s) - 1 for s in range(R)],
        [int(fill) for fill in fills],
        [int(fill) + 1 for fill in fills],
    ]
    for warm in warms:
        for gap in GAPS:
            yield Choice(_allowed(task, warm), (gap,) * R)


def _allowed(task: _Task, warm: Sequence[int]) -> tuple[int, ...]:
    """`warm` within the limits, and nowhere more than on the stage before."""
    allowed, most = [], task.microbatches
    for wish, limit in zip(warm, task.limit, strict=True):
        most = min(most, int(limit + 1e-9), max(wish, 1))
        allowed.append(most)
    return tuple(allowed)


def _neighbours(task: _Task, choice: Choice, stage: int) -> Iterator[Choice]:
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


def _build(task: _Task, choice: Choice) -> tuple[float, float, float, Orders]:
    """(total, longest stage, idle time of all stages, orders) of one choice.

    Stages are advanced in turn, each until what it needs next has not been made. A stage before another always has its
    forward further on, and holds fewer than its limit when its turn is F or has W to do: so none waits for ever.
    """
    R, M = task.stages, task.microbatches
    made: dict[str, list[list[float]]] = {"F": [[] for _ in range(R)], "B": [[] for _ in range(R)]}
    rows: list[list[Op]] = [[] for _ in range(R)]
    weighed, clock, first = [0] * R, [0.0] * R, [0.0] * R
    idle = 0.0
    turn = ["F"] * R
    ready = list(range(R))
    while ready:
        s = ready.pop()
        F, B = made["F"][s], made["B"][s]

        def weigh(s: int = s) -> None:
            rows[s].append(Op("W", weighed[s]))
            weighed[s] += 1
            clock[s] += task.W[s]

        while len(B) < M:
            kind = "F" if len(F) < choice.warm[s] else "B" if len(F) == M else turn[s]
            source = s - 1 if kind == "F" else s + 1
            m = len(F) if kind == "F" else len(B)
            arrival = clock[s]
            if 0 <= source < R:
                if len(made[kind][source]) <= m:
                    break
                arrival = made[kind][source][m] + task.send
            while kind == "F" and task.held(len(F) + 1, len(B), weighed[s]) > task.limit[s] + 1e-9:
                weigh()
            while weighed[s] < len(B) and _fills(arrival - clock[s], task.W[s], choice.gap[s]):
                weigh()
            start = max(clock[s], arrival)
            if rows[s]:
                idle += start - clock[s]
            else:
                first[s] = start
            clock[s] = start + (task.F[s] if kind == "F" else task.B[s])
            rows[s].append(Op(kind, m))
            made[kind][s].append(clock[s])
            turn[s] = "B" if kind == "F" else "F"
            target = s + 1 if kind == "F" else s - 1
            if 0 <= target < R:
                ready.append(target)
        if len(B) == M:
            while weighed[s] < M:
                weigh()
    if any(len(row) < 3 * M for row in rows):
        raise Refused("zb-auto: a choice of the search stands still; this is a fault of the search, please report it")
    return max(clock), max(end - begin for end, begin in zip(clock, first, strict=True)), idle, rows


def _fills(gap_s: float, w_s: float, least: float) -> bool:
    """Whether W is done in an idle time: where it fits, or where the time is more than `least` of it."""
    return gap_s > 0 and (gap_s >= w_s or gap_s > least * w_s)
