"""The order of operations on each stage, for the schedules of the literature.

All are written for enough microbatches; fewer are the same order with the others left out, which waits for nothing new and
holds no more. R is the number of stages, s the stage (0 first), n the number of microbatches.

Sources: GPipe (Huang et al. 2019, arXiv 1811.06965); 1F1B (PipeDream-Flush: Narayanan et al. 2020, arXiv 2006.09503);
interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2); eager 1F1B (Zhuang et al. 2022, arXiv 2211.05322,
section 4); ZB-H1, ZB-H2 (Qi et al. 2023, arXiv 2401.10241, section 2); ZB-V (the same, version 2; Qi et al. 2024, arXiv
2405.15362, as V-ZB); DualPipe-V (DeepSeek 2025, github.com/deepseek-ai/DualPipe: DualPipe "cut in half" after Sea AI Lab).
"""

from collections import Counter, deque

from meshwright.schedules.table import Op


class Row:
    """One stage's order, written by kinds: which microbatch is meant is always the next one."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._next: Counter[tuple[str, int]] = Counter()
        self._pending: deque[tuple[int, int]] = deque()

    def add(self, words: str, times: int = 1) -> None:
        """Append `words`, `times` times over.

        A word is F0, B0 (kind and chunk: of the next microbatch), BW0 (a whole backward: B, then its W) or W (of the oldest
        B that has not had its own).
        """
        for word in words.split() * times:
            if word == "W":
                self.ops.append(Op("W", *self._pending.popleft()))
                continue
            kind, chunk = word[0], int(word[-1])
            microbatch = self._next[kind, chunk]
            self._next[kind, chunk] += 1
            self.ops.append(Op(kind, microbatch, chunk))
            if word.startswith("BW"):
                self.ops.append(Op("W", microbatch, chunk))
            elif kind == "B":
                self._pending.append((microbatch, chunk))


def gpipe(R: int, s: int, n: int) -> list[Op]:
    """All forward, then all backward."""
    row = Row()
    row.add("F0", n)
    row.add("B0", n)
    return row.ops


def one_f_one_b(R: int, s: int, n: int, ahead: int = 1) -> list[Op]:
    """`ahead` (R-s-1) forwards, then one forward and one backward by turns; needs n >= ahead (R-1)."""
    warm = ahead * (R - s - 1)
    row = Row()
    row.add("F0", warm)
    row.add("F0 B0", n - warm)
    row.add("B0", warm)
    return row.ops


def interleaved(R: int, s: int, n: int, v: int) -> list[Op]:
    """1F1B over v chunks: R microbatches through one chunk, then the same through the next; n a multiple of R."""
    turns = [(group + i, chunk) for group in range(0, n, R) for chunk in range(v) for i in range(R)]
    forward = [Op("F", microbatch, chunk) for microbatch, chunk in turns]
    backward = [Op("B", microbatch, v - 1 - chunk) for microbatch, chunk in turns]
    warm = min(2 * (R - s - 1) + (v - 1) * R, len(turns))
    pairs = zip(forward[warm:], backward, strict=False)
    return [*forward[:warm], *(op for pair in pairs for op in pair), *backward[len(turns) - warm :]]


def zb_h(R: int, s: int, n: int, ahead: int) -> list[Op]:
    """ZB-H1 (`ahead` 1) and ZB-H2 (2): 1F1B with W put off, so that each stage holds ahead (R-1) + 1; needs n at least that."""
    warm, late = ahead * (R - s - 1), ahead * s
    row = Row()
    row.add("F0", warm)
    row.add("F0 B0", late)
    row.add("F0 B0 W", n - warm - late)
    row.add("B0 W", warm)
    row.add("W", late)
    return row.ops


def zb_v(R: int, s: int, n: int) -> list[Op]:
    """ZB-V: down one chunk and up the other, 2R of them held on each stage; needs n >= 2R-1."""
    row = Row()
    row.add("F0", 2 * (R - s) - 1)
    row.add("F1 F0", s)
    row.add("F1 B1 W", R - s)
    row.add("F0 B0 W F1 B1 W", n - 2 * R + 1 + s)
    row.add("B0 W F1 B1 W", R - s - 1)
    row.add("B0 B1", s)
    row.add("B0 W", R - s)
    row.add("W", 2 * s)
    return row.ops


def dualpipe_v(R: int, s: int, n: int) -> list[Op]:
    """DualPipe-V: forward of one chunk beside the backward of the other, its eight steps; needs n >= 2R."""
    row = Row()
    row.add("F0", 2 * (R - s - 1))
    row.add("F0 F1", s + 1)
    row.add("B1 W F1", R - s - 1)
    row.add("F0 BW1 F1 BW0", n - 2 * R + s + 1)
    row.add("BW1 F1 BW0", R - s - 1)
    whole = s + 1  # of the next 2 (s + 1) backwards, the first are whole and the others put their W off
    row.add(" ".join(["BW1 BW0"] * (whole // 2) + ["BW1 B0"] * (whole % 2) + ["B1 B0"] * (whole // 2)))
    row.add("W B0", R - s - 1)
    row.add("W", s + 1)
    return row.ops
