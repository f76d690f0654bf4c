"""How long operations take, and so when each can start."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.schedules.place import At, Orders, earliest
from meshwright.schedules.table import Op, Schedule


@dataclass(frozen=True)
class Times:
    """The time of each kind of operation on one chunk, in any one unit; integers and fractions stay exact.

    A backward that is not split takes B + W; so either give both, or the whole as B.
    """

    F: float
    B: float
    W: float = 0
    send: float = 0
    """From the end of an operation until its result can be used on another stage."""
    factors: Mapping[int | tuple[int, int], float] = field(default_factory=dict)
    """Uneven stages: how many times as long operations take, by stage or by (stage, chunk); 1 where nothing is said."""

    def of(self, schedule: Schedule, stage: int, op: Op) -> float:
        """The time that `op` takes on `stage`."""
        whole = op.kind == "B" and not schedule.splits_backward
        time = self.B + self.W if whole else getattr(self, op.kind)
        factor = self.factors.get((stage, op.chunk), self.factors.get(stage)) if self.factors else None
        return time if factor is None else time * factor


def starts(schedule: Schedule, orders: Orders, times: Times) -> dict[At, float]:
    """When each operation starts: when its stage is free and what it uses has arrived. Stages keep their order."""
    return earliest(
        schedule,
        orders,
        step=lambda stage, before, op: times.of(schedule, stage, before),
        lag=lambda stage, made, user: times.of(schedule, stage, made) + (times.send if stage != user else 0),
    )
