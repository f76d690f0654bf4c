"""Documents to rows: every token but a document's first is a target exactly once an epoch.

A document of n tokens has n - 1 targets. It is cut into pieces of at most T targets; a piece's inputs are the tokens
one before its targets, so neighbouring pieces share one token. A piece never sees another one: it has its own segment
and its positions start at 0.

Pieces go into rows of T by best fit, longest first (best-fit decreasing; for language models Ding et al. 2024,
arXiv:2404.10830). Since a piece's length is a whole number up to T, equal lengths are placed together (as the
histogram packing of Krell et al. 2021, arXiv:2107.02027), and the work does not grow with the number of documents.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rows:
    """Which pieces each row holds: those from `first_R[r]` up to `first_R[r + 1]`.

    `source_P`: where a piece's first input stands in the corpus; `length_P`: its targets; `offset_P`: where it begins
    in its row.
    """

    row_length: int
    first_R: np.ndarray
    source_P: np.ndarray
    length_P: np.ndarray
    offset_P: np.ndarray

    def __len__(self) -> int:
        return len(self.first_R) - 1

    @property
    def targets(self) -> int:
        """Targets in one epoch."""
        return int(self.length_P.sum())


def cut(start_N: np.ndarray, length_N: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and length of the pieces of documents that start at `start_N` and have `length_N` tokens, in order."""
    targets_N = np.maximum(length_N.astype(np.int64) - 1, 0)
    pieces_N = -(-targets_N // row_length)
    document_P = np.repeat(np.arange(len(pieces_N)), pieces_N)
    within_P = _count_up(pieces_N) * row_length
    return start_N[document_P] + within_P, np.minimum(targets_N[document_P] - within_P, row_length)


def pack(start_N: np.ndarray, length_N: np.ndarray, row_length: int, packing: bool = True) -> Rows:
    """The rows of T = `row_length` that hold the given documents; without `packing`, one piece a row.

    Rows are in the order of their earliest piece, and so are the pieces of a row.
    """
    source_P, length_P = cut(start_N, length_N, row_length)
    bin_P = best_fit(length_P, row_length) if packing else np.arange(len(length_P))
    _, earliest_R, row_P = np.unique(bin_P, return_index=True, return_inverse=True)
    rank_R = np.empty(len(earliest_R), np.int64)
    rank_R[np.argsort(earliest_R)] = np.arange(len(earliest_R))
    row_P = rank_R[row_P]
    order_P = np.argsort(row_P, kind="stable")
    first_R = np.concatenate([[0], np.cumsum(np.bincount(row_P, minlength=len(rank_R)))])
    length_P = length_P[order_P]
    before_P = np.cumsum(length_P) - length_P
    offset_P = before_P - np.repeat(before_P[first_R[:-1]], np.diff(first_R))
    return Rows(row_length, first_R, source_P[order_P], length_P, offset_P)


def best_fit(length_P: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item: longest first, into the fullest bin that still has room, else into a new bin."""
    bin_P = np.empty(len(length_P), np.int64)
    room: dict[int, np.ndarray] = {}  # bins by the room they have left
    rooms = 0  # bit r is set where some bin has room r
    bins = 0
    order_P = np.argsort(-length_P, kind="stable")
    counts = np.bincount(length_P, minlength=1)
    at = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        waiting = order_P[at : at + counts[length]]
        at += counts[length]
        while len(waiting):
            fitting = rooms >> length
            if fitting:
                left = length + (fitting & -fitting).bit_length() - 1
                open_bins = room.pop(left)
                rooms ^= 1 << left
            else:
                left = capacity
                new = -(-len(waiting) // (capacity // length))  # rounded up
                open_bins = np.arange(bins, bins + new)
                bins += new
            filled = np.repeat(open_bins, left // length)[: len(waiting)]  # the fullest bin stays it until it is full
            bin_P[waiting[: len(filled)]] = filled
            used, filling = np.unique(filled, return_counts=True)
            for now_left, group in _by_room(used, left - filling * length):
                room[now_left] = np.concatenate([room[now_left], group]) if now_left in room else group
                rooms |= 1 << now_left
            unused = open_bins[len(used) :]
            if len(unused):
                room[left] = np.concatenate([room[left], unused]) if left in room else unused
                rooms |= 1 << left
            waiting = waiting[len(filled) :]
    return bin_P


def _by_room(bins: np.ndarray, left: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Bins grouped by what they have left, full ones dropped."""
    return [(int(value), bins[left == value]) for value in np.unique(left) if value > 0]


def fill(rows: Rows, corpus: np.ndarray, row_B: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of rows `row_B`; a row of -1 is padding throughout.

    Returns tokens_BT, targets_BT, segments_BT (0: padding, else 1, 2, ... in each row), positions_BT, all i32, and
    mask_BT, bool: which targets count.
    """
    shape = (len(row_B), rows.row_length)
    names = ("tokens_BT", "targets_BT", "segments_BT", "positions_BT")
    batch = {name: np.zeros(shape, np.int32) for name in names}
    safe_B = np.maximum(row_B, 0)
    pieces_B = np.where(row_B >= 0, rows.first_R[safe_B + 1] - rows.first_R[safe_B], 0)
    batch_row_P = np.repeat(np.arange(len(row_B)), pieces_B)
    index_P = rows.first_R[safe_B][batch_row_P] + _count_up(pieces_B)
    length_P = rows.length_P[index_P]
    within = _count_up(length_P)
    at = np.repeat(batch_row_P * rows.row_length + rows.offset_P[index_P], length_P) + within
    source = np.repeat(rows.source_P[index_P], length_P) + within
    batch["tokens_BT"].reshape(-1)[at] = corpus[source]
    batch["targets_BT"].reshape(-1)[at] = corpus[source + 1]
    batch["segments_BT"].reshape(-1)[at] = np.repeat(_count_up(pieces_B) + 1, length_P)
    batch["positions_BT"].reshape(-1)[at] = within
    return batch | {"mask_BT": batch["segments_BT"] > 0}


def _count_up(count_N: np.ndarray) -> np.ndarray:
    """0, 1, ..., count - 1 for each count, one after another."""
    return np.arange(count_N.sum()) - np.repeat(np.cumsum(count_N) - count_N, count_N)
