"""Ranks that each run a list of steps: time, messages, barriers and memory, without any numbers computed.

Small and exact, for programs that are written out: collectives are barriers over all ranks and do not overlap; a message
costs its sender and its receiver time; memory is looked at when a step starts, before what it makes and after what was
freed. The cost model is that of LLM-Training-Puzzles (S. Rush, 2023; `puzzles.py` has its programs and figures).
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from meshwright.config import require

Amount = float | Fraction
"""A time or a memory; fractions stay exact."""

Name = tuple[str | int, ...]
"""What is held: ("weight", 3), ("activation", layer, microbatch)."""


@dataclass(frozen=True)
class Step:
    """One thing a rank does. Without a `kind` it takes no time and is not recorded: loading, summing, freeing."""

    kind: str = ""
    time: Amount = 0
    needs: tuple[Name, ...] = ()
    """What must be held when it starts."""
    makes: tuple[tuple[Name, Amount], ...] = ()
    """What it leaves behind, and how much memory that takes; in place of what had the same name."""
    frees: tuple[Name, ...] = ()
    """What is given up when it ends."""
    layer: int | None = None
    microbatch: int | None = None
    to: int | None = None
    """A message to this rank: the one thing that it needs."""
    source: int | None = None
    """A message from this rank: the one thing that it makes. Messages between two ranks arrive in order, by first word."""
    barrier: bool = False
    """Every rank does this step at once, from when the last one is ready."""


class Record(NamedTuple):
    rank: int
    step: Step
    start: Amount
    end: Amount
    memory: Amount
    """What the rank holds at the start."""


@dataclass(frozen=True)
class Run:
    """What happened, in order for each rank."""

    records: tuple[tuple[Record, ...], ...]

    @property
    def last_start(self) -> Amount:
        """When the last step starts."""
        return max(record.start for rank in self.records for record in rank)

    @property
    def end(self) -> Amount:
        return max(record.end for rank in self.records for record in rank)

    @property
    def peaks(self) -> tuple[Amount, ...]:
        """For each rank, the most memory at the start of a step."""
        return tuple(max(record.memory for record in rank) for rank in self.records)

    @property
    def counts(self) -> Counter[str]:
        """How many steps of each kind there were."""
        return Counter(record.step.kind for rank in self.records for record in rank)


def run(programs: Sequence[Sequence[Step]]) -> Run:
    """Run one program per rank to its end.

    Refuses steps that need what is not held, messages that are not the awaited ones, barriers of different kinds, and ranks that
    wait for each other.
    """
    ranks = [_Rank(number, program) for number, program in enumerate(programs)]
    messages: dict[tuple[int, int, str | int], deque[tuple[Amount, Name]]] = {}
    while True:
        moved = [rank.go(messages) for rank in ranks]  # a list: every rank moves as far as it can
        at_barrier = [rank for rank in ranks if rank.step and rank.step.barrier]
        if at_barrier and len(at_barrier) == len(ranks):
            kinds = sorted({f"{rank.step.kind} of layer {rank.step.layer}" for rank in at_barrier if rank.step})
            require(len(kinds) == 1, f"ranks meet in different collectives: {', '.join(kinds)}")
            together = max(rank.now for rank in ranks)
            for rank in ranks:
                rank.do(together)
        elif not any(moved):
            break
    stuck = [f"rank {rank.number} in {rank.step.kind} of layer {rank.step.layer}" for rank in ranks if rank.step]
    require(not stuck, f"ranks wait for each other: {'; '.join(stuck)}")
    return Run(tuple(tuple(rank.records) for rank in ranks))


class _Rank:
    """A rank in the middle of its program."""

    def __init__(self, number: int, program: Sequence[Step]) -> None:
        self.number, self.program, self.at = number, program, 0
        self.now: Amount = 0
        self.held: dict[Name, Amount] = {}
        self.records: list[Record] = []

    @property
    def step(self) -> Step | None:
        return self.program[self.at] if self.at < len(self.program) else None

    def go(self, messages: dict) -> bool:
        """Do steps until one must wait; tell whether any was done."""
        first = self.at
        while (step := self.step) and not step.barrier:
            start = self.now
            if step.source is not None:
                name = step.makes[0][0]
                waiting = messages.get((step.source, self.number, name[0]))
                if not waiting:
                    break
                sent, what = waiting.popleft()
                require(
                    what == name, f"rank {self.number} waits for {name} from rank {step.source}, which sends {what}"
                )
                start = max(start, sent)
            self.do(start)
            if step.to is not None:
                queue = messages.setdefault((self.number, step.to, step.needs[0][0]), deque())
                queue.append((self.now, step.needs[0]))
        return self.at > first

    def do(self, start: Amount) -> None:
        step = self.program[self.at]
        lacks = [name for name in step.needs if name not in self.held]
        require(not lacks, f"rank {self.number}, {step.kind or 'step'} of layer {step.layer}: {lacks} is not held")
        self.now = start + step.time
        if step.kind:
            self.records.append(Record(self.number, step, start, self.now, sum(self.held.values())))
        self.held.update(step.makes)
        for name in step.frees:
            require(name in self.held, f"rank {self.number} frees {name}, which it does not hold")
            del self.held[name]
        self.at += 1


def tidy(program: Iterable[Step], keep: Iterable[str] = ("weight", "state")) -> list[Step]:
    """The program with everything freed as soon as nothing later needs it, except names that begin with a word of `keep`."""
    keep = set(keep)
    live: set[Name] = set()
    steps = []
    for step in reversed(list(program)):
        made = [name for name, _ in step.makes]
        used = dict.fromkeys((*step.needs, *made))
        frees = tuple(name for name in used if name not in live and name[0] not in keep)
        live = (live - set(made)) | set(step.needs)
        steps.append(replace(step, frees=frees))
    return steps[::-1]
