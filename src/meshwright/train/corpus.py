"""A corpus: the tokens of all documents one after another, made once, cached, mapped into memory; and its split.

A document is held out where a hash of its text, as a number in [0, 1), is below the share. So the split does not
depend on the order of documents or on which others there are, and equal documents are never on both sides.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tokenizers

from meshwright.config import DataConfig, Refused, require
from meshwright.train import cache, sources
from meshwright.train import tokenizer as tokenizing
from meshwright.train.cache import Report
from meshwright.train.tokenizer import Tokenizer

GROUP_TOKENS = 1 << 24

SAMPLE_CHARACTERS_PER_TOKEN = 1000
"""A vocabulary of V is trained on at most this times V characters, taken evenly: time against fit, so no larger."""

RECIPE = 1
"""Raised when the same text would give other tokens than before, so that older cache entries are not used."""


@dataclass(frozen=True)
class Corpus:
    """`tokens`: u16 or u32, all documents; and for each, in order, its tokens, its bytes as UTF-8, its hash (u64)."""

    tokens: np.ndarray
    length_N: np.ndarray
    bytes_N: np.ndarray
    hash_N: np.ndarray
    empty: int
    """Documents without text, which were passed over."""

    @property
    def start_N(self) -> np.ndarray:
        return np.cumsum(self.length_N) - self.length_N


# ---- making it ------------------------------------------------------------------------------------------


def make(data: DataConfig, vocab_size: int, directory: Path, report: Report) -> tuple[Tokenizer, Corpus, str]:
    """The tokenizer, the corpus, and a fingerprint of both: other text or another tokenizer has another one."""
    if data.tokenizer:
        tokenizer = tokenizing.from_file(Path(data.tokenizer).expanduser(), vocab_size)
    else:
        tokenizing.require_vocabulary(vocab_size)
    files = sources.find(data.paths) if data.paths else sources.library()
    before = _state(files)
    content = sources.content_hash(files, data.text_field)
    if not data.tokenizer:
        tokenizer = _trained(files, data.text_field, content, vocab_size, directory, report)
    fingerprint = _hash(content, tokenizer.definition, tokenizer.end_id)
    corpus = _tokenised(files, data.text_field, tokenizer, fingerprint, directory, report)
    for path, was, now in zip(files, before, _state(files), strict=True):
        require(was == now, f"data file {str(path)!r} changed while it was read; start again when it is complete")
    return tokenizer, corpus, fingerprint


def _trained(
    files: tuple[Path, ...], text_field: str, content: str, vocab_size: int, directory: Path, report: Report
) -> Tokenizer:
    key = f"tokenizer-{_hash(content, vocab_size, tokenizers.__version__, RECIPE)}"
    if entry := cache.load(directory, key, report):
        return tokenizing.trained(entry.files[".json"].read_text(encoding="utf-8"))
    report(f"training a byte-level BPE tokenizer of {vocab_size} tokens")
    texts = sample(sources.documents(files, text_field), _bytes(files), SAMPLE_CHARACTERS_PER_TOKEN * vocab_size)
    definition = tokenizing.train_bpe(texts, vocab_size).to_str()
    try:
        cache.store(directory, key, {".json": lambda file: _write_text(file, definition)}, {})
    except OSError as error:
        report(_not_cached(directory, error))
    return tokenizing.trained(definition)


def _write_text(file: BinaryIO, text: str) -> None:
    file.write(text.encode())


def sample(texts: Iterable[str], total: int, most: int) -> Iterator[str]:
    """Some `most` of about `total` characters, in pieces taken evenly; never more than `most` and one piece."""
    share = min(1.0, most / max(total, 1))
    seen = taken = 0
    for text in texts:
        for piece in tokenizing.pieces_of(text):
            seen += len(piece)
            if taken < share * seen:
                taken += len(piece)
                yield piece
            if taken >= most:
                return


def _tokenised(
    files: tuple[Path, ...], text_field: str, tokenizer: Tokenizer, fingerprint: str, directory: Path, report: Report
) -> Corpus:
    key = f"corpus-{_hash(fingerprint, tokenizers.__version__, RECIPE)}"
    if entry := cache.load(directory, key, report):
        return _opened(entry)
    report(f"tokenising {_bytes(files) / 1e6:.1f} MB in {len(files)} files")
    writing = _Writing(sources.documents(files, text_field), tokenizer)
    try:
        return _opened(cache.store(directory, key, {".tokens": writing.tokens, ".npy": writing.table}, writing.facts))
    except OSError as error:
        report(_not_cached(directory, error))
    writing = _Writing(sources.documents(files, text_field), tokenizer)
    memory = io.BytesIO()
    writing.tokens(memory)
    return _corpus(np.frombuffer(memory.getbuffer(), writing.dtype), np.array(writing.rows, np.uint64), writing.facts)


class _Writing:
    """Writes documents' tokens as they come, and keeps their table: a row of length, bytes and hash each."""

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer):
        self.texts, self.tokenizer = texts, tokenizer
        self.dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
        self.rows: list[tuple[int, int, int]] = []
        self.facts: dict[str, Any] = {"empty": 0, "dtype": self.dtype.name}

    def tokens(self, file: BinaryIO) -> None:
        for group in tokenizing.groups(filter(self._has_text, self.texts)):
            self._write(group, file)
        require(bool(self.rows), f"the data holds no text: all {self.facts['empty']} documents are empty")

    def _has_text(self, text: str) -> bool:
        blank = not text.strip()
        self.facts["empty"] += blank
        return not blank

    def _write(self, group: list[str], file: BinaryIO) -> None:
        for text, ids in zip(group, self.tokenizer.encode_documents(group), strict=True):
            encoded = text.encode()
            text_hash = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")
            self.rows.append((len(ids), len(encoded), text_hash))
            file.write(ids.astype(self.dtype).tobytes())

    def table(self, file: BinaryIO) -> None:
        np.save(file, np.array(self.rows, np.uint64))


def _opened(entry: cache.Entry) -> Corpus:
    tokens = np.memmap(entry.files[".tokens"], np.dtype(entry.facts["dtype"]), "r")
    return _corpus(tokens, np.load(entry.files[".npy"], allow_pickle=False), entry.facts)


def _corpus(tokens: np.ndarray, table_N3: np.ndarray, facts: Mapping[str, Any]) -> Corpus:
    length_N, bytes_N = table_N3[:, 0].astype(np.int64), table_N3[:, 1].astype(np.int64)
    return Corpus(tokens, length_N, bytes_N, table_N3[:, 2], facts["empty"])


def _state(files: Iterable[Path]) -> list[tuple[int, int]]:
    try:
        return [(status.st_size, status.st_mtime_ns) for status in map(Path.stat, files)]
    except OSError as error:
        raise Refused(f"data file {error.filename!r} cannot be read: {error.strerror}") from None


def _bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _hash(*parts: Any) -> str:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def _not_cached(directory: Path, error: OSError) -> str:
    return f"nothing is cached: {directory} cannot be written ({error.strerror})"


def count_tokens(corpus: Corpus, size: int) -> np.ndarray:
    """How often each token id below `size` stands in the corpus, i64[size]."""
    groups = (corpus.tokens[first : first + GROUP_TOKENS] for first in range(0, len(corpus.tokens), GROUP_TOKENS))
    return sum((np.bincount(group, minlength=size) for group in groups), np.zeros(size, np.int64))


# ---- the split ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Documents of one side of the split: where they start in the corpus, and their tokens."""

    start_N: np.ndarray
    length_N: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.length_N.sum())

    def count_tokens(self, corpus: Corpus, size: int) -> np.ndarray:
        """How often each token id below `size` stands in these documents, i64[size]."""
        count_V = np.zeros(size, np.int64)
        for first in range(0, len(self.start_N), 1024):
            spans = zip(self.start_N[first : first + 1024], self.length_N[first : first + 1024], strict=True)
            count_V += np.bincount(np.concatenate([corpus.tokens[a : a + n] for a, n in spans]), minlength=size)
        return count_V


def split(corpus: Corpus, share: float, row_length: int, tokenizer: Tokenizer) -> tuple[Part, Part, str]:
    """Training part, held-out part, and how it was done.

    By the documents' hashes; the held-out ones in the order of their hash, so that the first few are as good a sample
    as any. Where that holds out nothing, or more than half of the tokens (few, long documents), the tail of the longest
    document is held out instead, cut at a line's end where one is near. Training keeps more than `row_length` tokens.
    """
    start_N, length_N = corpus.start_N, corpus.length_N
    everything, nothing = Part(start_N, length_N), Part(start_N[:0], length_N[:0])
    if share == 0:
        return everything, nothing, "nothing (data.held_out_share=0)"
    held_N = corpus.hash_N / 2.0**64 < share
    held_tokens, total_tokens = int(length_N[held_N].sum()), int(length_N.sum())
    most_tokens = min(total_tokens // 2, total_tokens - (row_length + 1))
    if (length_N[held_N] > 1).any() and held_tokens <= most_tokens:
        by_hash = np.flatnonzero(held_N)[np.argsort(corpus.hash_N[held_N], kind="stable")]
        held = Part(start_N[by_hash], length_N[by_hash])
        return Part(start_N[~held_N], length_N[~held_N]), held, f"{len(by_hash)} documents, by a hash of their text"
    longest = int(np.argmax(length_N))
    end = int(start_N[longest] + length_N[longest])
    most_tokens = min(most_tokens, int(length_N[longest]) // 2)
    tail_tokens = min(max(round(share * total_tokens), row_length + 1), most_tokens)
    if tail_tokens < 2:
        return everything, nothing, "nothing (the text is too short)"
    tail = corpus.tokens[end - min(2 * tail_tokens, most_tokens) : end]
    lines = np.flatnonzero(tokenizer.newline_V[tail[: len(tail) - tail_tokens + 1]])
    tail_tokens = len(tail) - int(lines[-1]) if len(lines) else tail_tokens
    length_N = length_N.copy()
    length_N[longest] -= tail_tokens
    held = Part(np.array([end - tail_tokens]), np.array([tail_tokens]))
    return Part(start_N, length_N), held, f"the last {tail_tokens} tokens of the longest document"
