"""What the search for a difference answers: where it begins, and one sentence."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a layout first differs.

    `kind`: model (one device itself is wrong), forward, loss, backward, gradient (of parameters, with one microbatch),
    accumulation (of the step), pipeline (right without it; `at` says what of it and which stage), or the check of
    `Result.failed` that alone differs.
    """

    kind: str
    at: str
    sentence: str


def listed(names: tuple[str, ...], most: int = 6) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
