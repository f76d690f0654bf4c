"""The schedules that have names: `make` gives the table of one, for any number of stages and microbatches.

A table here has one operation per stage and tick, as papers draw it, each as early as its stage's order allows. The orders
and their sources are in `orders.py`; zb-auto is searched for the given times (`search.py`).
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.config import Refused, require
from meshwright.schedules import orders
from meshwright.schedules.place import one_by_one
from meshwright.schedules.search import search
from meshwright.schedules.table import Op, Schedule
from meshwright.schedules.times import Times

NAMES = {
    "gpipe": "all forward, then all backward; holds every microbatch",
    "1f1b": "one forward, one backward by turns; stage s holds R-s microbatches",
    "eager-1f1b": "1F1B with twice the warm-up: a transfer has a whole turn; stage s holds 2(R-s)-1",
    "interleaved": "1F1B over several chunks per stage: a bubble as many times smaller, more transfers",
    "zb-h1": "1F1B with the weights' gradients in the bubbles; holds R, the bubble is a third",
    "zb-h2": "the same with twice in flight: no bubble inside a stage where F, B and W take equal times; holds 2R-1",
    "zb-v": "zero bubble on a V of two chunks per stage: no bubble inside a stage, holds 2R half chunks, as 1F1B",
    "dualpipe-v": "DeepSeek's DualPipe cut in half: forward beside backward of the other chunk of a V; holds 2R+1 half chunks",
    "zb-auto": "searched: the zero-bubble paper's automatic schedule, for given times and a limit of what is in flight",
}
"""What each schedule is. R is the number of stages."""


@dataclass(frozen=True)
class _Recipe:
    order: Callable[[int, int, int, int], list[Op]]
    """(R, stage, microbatches, chunks) to the stage's order."""
    least: Callable[[int, int], int]
    """(R, microbatches) to how many microbatches the order is written for: at least as many."""
    chunks: int = 1
    """Chunks per stage; 0: as many as asked, at least 2."""
    placement: str = "straight"
    splits_backward: bool = False


_RECIPES = {
    "gpipe": _Recipe(lambda R, s, n, v: orders.gpipe(R, s, n), lambda R, m: m),
    "1f1b": _Recipe(lambda R, s, n, v: orders.one_f_one_b(R, s, n), lambda R, m: max(m, R)),
    "eager-1f1b": _Recipe(lambda R, s, n, v: orders.one_f_one_b(R, s, n, ahead=2), lambda R, m: max(m, 2 * R - 1)),
    "interleaved": _Recipe(orders.interleaved, lambda R, m: -(-m // R) * R, chunks=0),
    "zb-h1": _Recipe(lambda R, s, n, v: orders.zb_h(R, s, n, 1), lambda R, m: max(m, R), splits_backward=True),
    "zb-h2": _Recipe(lambda R, s, n, v: orders.zb_h(R, s, n, 2), lambda R, m: max(m, 2 * R - 1), splits_backward=True),
    "zb-v": _Recipe(lambda R, s, n, v: orders.zb_v(R, s, n), lambda R, m: max(m, 2 * R - 1), 2, "v", True),
    "dualpipe-v": _Recipe(lambda R, s, n, v: orders.dualpipe_v(R, s, n), lambda R, m: max(m, 2 * R), 2, "v", True),
}


def require_known(name: str) -> None:
    """Refuse a name that no schedule has."""
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise Refused(f"layout.schedule={name!r} is not known; known: {', '.join(NAMES)}{hint}")


def make(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    *,
    times: Times | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> Schedule:
    """The schedule called `name`, one operation per stage and tick.

    Args:
        chunks: per stage; 1 is the schedule's own number: 2 for zb-v and dualpipe-v.
        times: for zb-auto: of its operations; F = B = W and no transfers where nothing is said.
        memory_limit: for zb-auto: the microbatches that a stage may hold; as many as stages where nothing is said.

    Refuses unknown names, other numbers of chunks, and times and limits for schedules that do not take them.
    """
    require_known(name)
    for setting, value in (("stages (layout.pipe)", stages), ("layout.microbatches", microbatches)):
        require(value >= 1, f"schedule {name}: {setting}={value} must be at least 1")
    if name == "zb-auto":
        require(chunks == 1, f"schedule zb-auto has 1 chunk per stage, not layout.chunks={chunks}; zb-v has 2")
        return search(stages, microbatches, times or Times(1, 1, 1), memory_limit)
    require(times is None and memory_limit is None, f"schedule {name} takes no times and no memory_limit; zb-auto does")
    recipe = _RECIPES[name]
    if recipe.chunks == 0:
        require(
            chunks >= 2,
            f"schedule {name} needs layout.chunks of at least 2, not {chunks}; 1f1b has one chunk per stage",
        )
    else:
        require(
            chunks in (1, recipe.chunks),
            f"schedule {name} has {recipe.chunks} {'chunk' if recipe.chunks == 1 else 'chunks'} per stage, not"
            f" layout.chunks={chunks}; set it to {recipe.chunks}, or take schedule interleaved",
        )
    chunks = recipe.chunks or chunks
    shape = Schedule(name, stages, microbatches, (), chunks, recipe.placement, recipe.splits_backward)
    written_for = recipe.least(stages, microbatches)
    rows = [recipe.order(stages, stage, written_for, chunks) for stage in range(stages)]
    return one_by_one(shape, [[op for op in row if op.microbatch < microbatches] for row in rows])
