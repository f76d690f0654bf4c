"""Batches as a pure function of configuration and step: `batch(step)` is the same on any layout, after any resume.

grain makes the order: the rows of the training text, a fresh permutation in every epoch, drawn from the seed alone.
A process that needs only some rows of the global batch names them; together they are the global batch.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config import RunConfig, require
from meshwright.train import corpus as corpora
from meshwright.train import packing
from meshwright.train.cache import Report, cache_directory
from meshwright.train.corpus import Corpus, Part
from meshwright.train.packing import Rows
from meshwright.train.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]

AHEAD_BATCHES = 4
"""Batches that are made ahead of use, in the background."""


@dataclass(frozen=True)
class TextData:
    """Text, tokenised, split and packed, for the families that model language."""

    config: RunConfig
    tokenizer: Tokenizer
    corpus: Corpus
    train: Part
    held_out: Part
    held_out_by: str
    train_rows: Rows
    held_out_rows: Rows
    fingerprint: str
    """Equal where text and tokenizer are equal: what a resumed run compares."""

    def batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
        """The global batch of `step` (0, 1, ...), or only its `rows`: arrays as in `packing.fill`, and sample_B."""
        sample_B = _rows(rows, self.config.train.sequences)
        first = step * self.config.train.sequences
        row_B = np.array([self._order[first + int(i)] for i in sample_B], np.int64)
        return packing.fill(self.train_rows, self.corpus.tokens, row_B) | {"sample_B": sample_B}

    def batches(self, start: int = 0, rows: np.ndarray | None = None) -> Iterator[Batch]:
        """`batch(start)`, `batch(start + 1)`, ... without end, made ahead by a thread."""
        return _ahead(lambda step: self.batch(step, rows), start)

    def eval_batches(self, batch: int, rows: np.ndarray | None = None) -> Iterator[Batch]:
        """The held-out rows, at most `train.eval_sequences`, in batches of `batch`, always the same.

        The last batch is filled up with rows whose mask is false throughout: weigh by targets, not by batches.
        """
        count = min(len(self.held_out_rows), self.config.train.eval_sequences)
        for first in range(0, count, batch):
            sample_B = _rows(rows, batch)
            row_B = np.where(first + sample_B < count, first + sample_B, -1)
            yield packing.fill(self.held_out_rows, self.corpus.tokens, row_B) | {"sample_B": sample_B}

    def prompt(self, most_tokens: int) -> list[int]:
        """The beginning of the held-out text (of the training text, where none is held out)."""
        part = self.held_out if len(self.held_out.start_N) else self.train
        first = int(np.argmax(part.length_N >= min(most_tokens, part.length_N.max())))
        start, length = int(part.start_N[first]), int(part.length_N[first])
        return self.corpus.tokens[start : start + min(most_tokens, max(length - 1, 1))].tolist()

    @cached_property
    def unigram_entropy_nats(self) -> float:
        """Entropy of the training tokens' frequencies: the loss of a model that knows nothing but those."""
        size = self.tokenizer.size
        return entropy_nats(corpora.count_tokens(self.corpus, size) - self.held_out.count_tokens(self.corpus, size))

    def describe(self) -> dict[str, Any]:
        """Facts to print and to record; plain values."""
        documents, tokens, text_bytes = (
            len(self.corpus.length_N),
            len(self.corpus.tokens),
            int(self.corpus.bytes_N.sum()),
        )
        rows, length = len(self.train_rows), self.config.train.sequence_length
        return {
            "source": ", ".join(self.config.data.paths) or "the Python standard library's source",
            "documents": documents,
            "empty_documents": self.corpus.empty,
            "bytes": text_bytes,
            "tokens": tokens,
            "tokens_per_byte": tokens / text_bytes,
            "tokenizer": self.config.data.tokenizer or "byte-level BPE trained on the data",
            "tokenizer_vocabulary": self.tokenizer.size,
            "train_tokens": self.train.tokens,
            "train_rows": rows,
            "padding_share": 1 - self.train_rows.targets / (rows * length),
            "epochs": self.config.train.steps * self.config.train.sequences / rows,
            "held_out": self.held_out_by,
            "held_out_tokens": self.held_out.tokens,
            "held_out_rows": len(self.held_out_rows),
            "unigram_entropy_nats": self.unigram_entropy_nats,
            "fingerprint": self.fingerprint,
        }

    @cached_property
    def _order(self) -> Any:
        import grain

        rows = grain.MapDataset.range(len(self.train_rows))
        return rows.shuffle(seed=_word(self.config.train.seed, "order")).repeat()


@dataclass(frozen=True)
class RegressionData:
    """The tutorials' task for the families without text: y = sin(x w), fresh x in every step (A. Samarin 2024)."""

    config: RunConfig

    def batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
        """The global batch of `step`, or only its `rows`: x_BD, y_BD, f32."""
        batch = regression_batch(self.config, step)
        return batch if rows is None else {name: array[rows] for name, array in batch.items()}

    def batches(self, start: int = 0, rows: np.ndarray | None = None) -> Iterator[Batch]:
        """`batch(start)`, `batch(start + 1)`, ... without end, made ahead by a thread."""
        return _ahead(lambda step: self.batch(step, rows), start)

    def eval_batches(self, batch: int, rows: np.ndarray | None = None) -> Iterator[Batch]:
        """Examples that no step trains on: as many whole batches as `train.eval_sequences` holds, at least one."""
        for number in range(max(1, self.config.train.eval_sequences // batch)):
            made = _regression(self.config, batch, "held out", number)
            yield {name: array[_rows(rows, batch)] for name, array in made.items()}

    def describe(self) -> dict[str, Any]:
        return {"source": f"y = sin(x w), x standard normal, drawn from train.seed={self.config.train.seed}"}


Data = TextData | RegressionData


def prepare(config: RunConfig, report: Report = lambda line: None, cache: Path | None = None) -> Data:
    """Read, tokenise, split and pack the data of a run; `report` gets a line for each thing that takes time.

    Raises Refused for data that cannot be read or does not make one sequence. `cache` defaults to the user's own.
    """
    if not config.model.is_language_model:
        return RegressionData(config)
    directory = cache or cache_directory()
    length = config.train.sequence_length
    tokenizer, corpus, fingerprint = corpora.make(config.data, config.model.vocab_size, directory, report)
    require(
        len(corpus.tokens) > length,
        f"the text is shorter than one sequence: {len(corpus.tokens)} tokens, and train.sequence_length={length}"
        f" needs {length + 1}; give more text or lower train.sequence_length",
    )
    train, held_out, held_out_by = corpora.split(corpus, config.data.held_out_share, length, tokenizer)
    train_rows, held_out_rows = (
        packing.pack(part.start_N, part.length_N, length, config.data.packing) for part in (train, held_out)
    )
    require(len(train_rows) > 0, "no document has two tokens, so there is nothing to predict; give longer documents")
    if len(train_rows) < config.train.sequences:
        report(f"the text makes only {len(train_rows)} sequences; a batch of {config.train.sequences} repeats some")
    return TextData(config, tokenizer, corpus, train, held_out, held_out_by, train_rows, held_out_rows, fingerprint)


def entropy_nats(count_V: np.ndarray) -> float:
    """Entropy of the frequencies that `count_V` counts: -sum p ln p (Shannon 1948)."""
    p_V = count_V[count_V > 0] / count_V.sum()
    return float(-(p_V * np.log(p_V)).sum())


def regression_batch(config: RunConfig, step: int) -> Batch:
    """x_BD standard normal, y_BD = sin(x_BD w_DD), f32; w ~ N(0, 1/D) from the seed, x from seed and step alone."""
    return _regression(config, config.train.sequences, "train", step)


def _regression(config: RunConfig, batch: int, use: str, number: int) -> Batch:
    seed, size = config.train.seed, config.model.d_model
    w_DD = _normal(seed, "w", 0, (size, size)) / np.sqrt(size)
    x_BD = _normal(seed, use, number, (batch, size))
    return {"x_BD": x_BD.astype(np.float32), "y_BD": np.sin(x_BD @ w_DD).astype(np.float32)}


def _normal(seed: int, use: str, number: int, shape: tuple[int, ...]) -> np.ndarray:
    key = np.random.SeedSequence((seed, _word(0, use), number))
    return np.random.Generator(np.random.Philox(key)).standard_normal(shape)


def _word(seed: int, use: str) -> int:
    """A 32-bit seed for one use: neighbouring seeds and different uses have nothing in common."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {use}".encode(), digest_size=4).digest(), "little")


def _rows(rows: np.ndarray | None, batch: int) -> np.ndarray:
    """Indices within the global batch, i32: all of it, or those asked for."""
    return (np.arange(batch) if rows is None else np.asarray(rows)).astype(np.int32)


class _Steps:
    """Steps from `start` on as a grain source: any of them, in any order."""

    def __init__(self, make: Callable[[int], Batch], start: int):
        self._make, self._start = make, start

    def __len__(self) -> int:
        return sys.maxsize - self._start

    def __getitem__(self, index: int) -> Batch:
        return self._make(self._start + int(index))


def _ahead(make: Callable[[int], Batch], start: int) -> Iterator[Batch]:
    import grain

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD_BATCHES)
    return iter(grain.MapDataset.source(_Steps(make, start)).to_iter_dataset(options))
