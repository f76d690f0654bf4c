"""The batch and the weights that `verify` runs: they hide nothing.

An even batch and fresh weights let most faults pass: with equal counts a mean of means is the mean, with near-uniform
attention a wrong key hardly matters, with biases of zero a bias added twice is still zero. So the batch has uneven
masks, a sequence and (with several microbatches) a microbatch that count nothing, documents of uneven lengths,
padding, and the last word of the vocabulary; and the weights are random everywhere, norms and biases too, of a size
that makes all gradients comparable.
"""

import math
from typing import Any

import numpy as np

from meshwright.config import LayoutConfig, ModelConfig, RunConfig
from meshwright.dims import BATCH_AXES
from meshwright.layout import letters_of

Tree = dict[str, Any]

# ---- the batch -------------------------------------------------------------------------------------------


def hard_batch(config: RunConfig, layout: LayoutConfig | None = None, seed: int = 0) -> Tree:
    """A global batch (see the module's docstring). All but the mask is the same for every `layout`.

    Rows that count nothing: the first microbatch of `layout` where it has several, else the first sequence.
    """
    random = np.random.default_rng([seed, 1])
    model, rows = config.model, config.train.sequences
    if not model.is_language_model:
        return {name: random.standard_normal((rows, model.d_model)) for name in ("x_BD", "y_BD")}
    length, last = config.train.sequence_length, model.vocab_size - 1
    words_BT = random.integers(0, model.vocab_size, (rows, length + 1))
    words_BT[-1, : length + 1 : 2] = last
    most = 4 if config.data.packing else 1
    segments_BT = np.stack([_documents(random, length, most, padded=row % 3 == 1) for row in range(rows)])
    starts_BT = np.diff(segments_BT, axis=1, prepend=-1) != 0
    place_T = np.arange(length)
    positions_BT = place_T - np.maximum.accumulate(np.where(starts_BT, place_T, 0), axis=1)
    share_B1 = np.linspace(0.15, 1.0, rows)[random.permutation(rows)][:, None]
    mask_BT = random.random((rows, length)) < share_B1
    mask_BT[:, -1] = True  # no sequence counts nothing by chance
    mask_BT[-1] = True
    mask_BT &= segments_BT > 0
    mask_BT[:, 0] |= ~mask_BT.any(axis=1)
    mask_BT[_silent_rows(rows, layout or LayoutConfig())] = False
    integers = {
        "tokens_BT": words_BT[:, :-1],
        "targets_BT": words_BT[:, 1:],
        "segments_BT": segments_BT,
        "positions_BT": positions_BT,
        "sample_B": np.arange(rows),
    }
    return {name: array.astype(np.int32) for name, array in integers.items()} | {"mask_BT": mask_BT}


def _documents(random: np.random.Generator, length: int, most: int, *, padded: bool) -> np.ndarray:
    """Segment of each position: one to `most` uneven documents, numbered from 1; at the end 0 where `padded`."""
    count = int(random.integers(1, most + 1))
    cuts = np.sort(random.choice(np.arange(1, length), min(count - 1, length - 1), replace=False)) if length > 1 else []
    segments_T = np.searchsorted(np.asarray(cuts, int), np.arange(length), side="right") + 1
    if padded and length > 4:
        segments_T[length - length // 5 :] = 0
    return segments_T


def _silent_rows(rows: int, layout: LayoutConfig) -> list[int]:
    """The rows of the first microbatch, or the first row."""
    if rows == 1:
        return []
    if layout.microbatches == 1:
        return [0]
    return microbatch_rows(rows, layout, 0)


def microbatch_rows(rows: int, layout: LayoutConfig, number: int) -> list[int]:
    """The rows of a microbatch: every device takes its own from its shard of the batch."""
    shards = math.prod(layout.degrees[axis] for axis in BATCH_AXES)
    own, share = rows // shards, rows // shards // layout.microbatches
    return [shard * own + number * share + row for shard in range(shards) for row in range(share)]


# ---- the weights -----------------------------------------------------------------------------------------


def hard_params(model: ModelConfig, names: Tree, seed: int = 0) -> Tree:
    """Random weights f64 of the true sizes for a tree of paths, such that activations are of order one everywhere."""
    return {
        key: hard_params(model, value, seed) if isinstance(value, dict) else _hard_leaf(model, value, seed)
        for key, value in names.items()
    }


def _hard_leaf(model: ModelConfig, path: str, seed: int) -> np.ndarray:
    letters = letters_of(path)
    shape = tuple(model.sizes[letter] for letter in letters)
    normal = np.random.default_rng([seed, 2, *path.encode()]).standard_normal(shape)
    if "scale_" in path:
        return 1 + 0.3 * normal
    if "bias_" in path or path.endswith("_PD"):
        return 0.3 * normal
    if path.endswith("tokens_VD"):
        return normal * (model.d_model**-0.5 * 2 if model.tied_embeddings else 1)
    inputs = {"LNHD": "NH", "LFD": "F", "DV": "D"}.get(letters, "D")
    return normal * math.prod(model.sizes[letter] for letter in inputs) ** -0.5
