"""What a schedule comes to for given times, as fast as a search needs it: one chunk per stage, the backward split.

`build` makes the schedule of a choice, `follow` times one that is there; both as `times.starts` would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.schedules.table import Op

ROUNDING = 1e-9
"""Limits are kept up to this, for kept parts that are not whole numbers."""

Rows = list[list[Op]]
"""For each stage, its operations in order."""
Cost = tuple[float, float, float]


@dataclass(frozen=True)
class Choice:
    """What is searched, for each stage."""

    warm: tuple[int, ...]
    """Forwards before the first backward; no stage has more than the one before it."""
    gap: tuple[float, ...]
    """Idle time, in times of W, in which W is done."""


@dataclass(frozen=True)
class Task:
    """Sizes, times and limits by stage."""

    microbatches: int
    F: tuple[float, ...]
    B: tuple[float, ...]
    W: tuple[float, ...]
    send: float
    limit: tuple[float, ...]
    kept: float
    measure: str

    @property
    def stages(self) -> int:
        return len(self.F)

    @property
    def placed(self) -> int:
        """Operations of all stages."""
        return 3 * self.stages * self.microbatches

    def cost(self, first: Sequence[float], last: Sequence[float], rest: float) -> "Cost":
        """What is made small: the measure, then the other one, then `rest`; of when stages begin and end."""
        total, longest = max(last), max(end - begin for begin, end in zip(first, last, strict=True))
        return (total, longest, rest) if self.measure == "total" else (longest, total, rest)

    @property
    def least(self) -> float:
        """No schedule has a smaller measure: the work of a stage, for `total` after the first forward has reached it."""
        work = [self.microbatches * (f + b + w) for f, b, w in zip(self.F, self.B, self.W, strict=True)]
        if self.measure == "longest_stage":
            return max(work)
        return max(sum(self.F[:s]) + s * self.send + time for s, time in enumerate(work))

    def held(self, f: int, b: int, w: int) -> float:
        """What a stage holds after f forwards, b backwards and w weight gradients."""
        return f - b + self.kept * (b - w)


def keeps(task: Task, rows: Rows) -> bool:
    """Whether no stage holds more than its limit."""
    return all(keeps_row(task, stage, row) for stage, row in enumerate(rows))


def keeps_row(task: Task, stage: int, row: Sequence[Op]) -> bool:
    done = {"F": 0, "B": 0, "W": 0}
    for op in row:
        done[op.kind] += 1
        if task.held(*done.values()) > task.limit[stage] + ROUNDING:
            return False
    return True


def build(task: Task, choice: Choice) -> tuple[Cost, Rows]:
    """The schedule of one choice; its cost ends with the idle time of all stages.

    Each stage goes on until what it needs next has not been made. None waits for ever: by turns, a stage whose warm-up is not
    longer than that of the stage before needs no forward that the other can only make after one of its own backwards; and a
    warm-up within the limit leaves room for the next forward once the weights' gradients are done.
    """
    R, M = task.stages, task.microbatches
    made: dict[str, list[list[float]]] = {"F": [[] for _ in range(R)], "B": [[] for _ in range(R)]}
    rows: Rows = [[] for _ in range(R)]
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
            while kind == "F" and task.held(len(F) + 1, len(B), weighed[s]) > task.limit[s] + ROUNDING:
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
    assert sum(map(len, rows)) == task.placed, f"{choice} stands still"
    return task.cost(first, clock, idle), rows


def follow(task: Task, rows: Rows) -> Cost | None:
    """The cost of given rows, which ends with the sum of all starts of F and B; None if they wait for each other."""
    R, M = task.stages, task.microbatches
    took = {"F": task.F, "B": task.B, "W": task.W}
    end: dict[str, list[list[float | None]]] = {kind: [[None] * M for _ in range(R)] for kind in "FB"}
    clock, first, done, starts = [0.0] * R, [0.0] * R, [0] * R, 0.0
    ready = list(range(R))
    while ready:
        s = ready.pop()
        row = rows[s]
        while done[s] < len(row):
            kind, m, _ = row[done[s]]
            if kind != "F" and end["F" if kind == "B" else "B"][s][m] is None:
                break
            source = s - 1 if kind == "F" else s + 1 if kind == "B" else R
            start = clock[s]
            if 0 <= source < R:
                came = end[kind][source][m]
                if came is None:
                    break
                start = max(start, came + task.send)
            if done[s] == 0:
                first[s] = start
            done[s] += 1
            clock[s] = start + took[kind][s]
            if kind != "W":
                end[kind][s][m] = clock[s]
                starts += start
                target = s + 1 if kind == "F" else s - 1
                if 0 <= target < R:
                    ready.append(target)
    return task.cost(first, clock, starts) if sum(done) == task.placed else None


def _fills(gap: float, w: float, least: float) -> bool:
    """Whether W is done in an idle time: where it fits, or where the time is more than `least` of it."""
    return gap > 0 and (gap >= w or gap > least * w)
