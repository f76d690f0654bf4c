"""Text to token ids and back: a byte-level BPE trained on the data, or any tokenizer.json.

Byte-level BPE: Sennrich et al. 2016 (arXiv:1508.07909) on bytes, with GPT-2's split into words (Radford et al. 2019).
Every text has tokens (all 256 bytes are in the vocabulary) and is decoded to itself.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from meshwright.config import Refused, require

END = "<|endoftext|>"
END_NAMES = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]", "[SEP]")
"""Names of the end-of-document token in released tokenizers: GPT-2, Llama 3, Llama 1 and 2, Gemma, ..., BERT."""

LEAST_VOCABULARY = 257
"""256 bytes and the end-of-document token."""

PIECE_CHARACTERS = 1 << 18
"""Longer texts are tokenised piece by piece, on all cores: the library needs some 100 bytes of memory a character."""
GROUP_CHARACTERS = 1 << 22
"""What is given to the library, and held in its memory, at a time."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer whose ids are all below `size`; `end_id` ends a document (None: it has no such token)."""

    inner: tokenizers.Tokenizer
    size: int
    end_id: int | None
    cuts_at_lines: bool = False
    """Whether a text may be tokenised in pieces, cut where a lone newline stands between two other characters."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with nothing added; a special token's name in it is ordinary text."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text followed by `end_id`, u32."""
        pieces = [pieces_of(text) if self.cuts_at_lines else [text] for text in texts]
        ids = self._encode_pieces([piece for one in pieces for piece in one])
        end = [] if self.end_id is None else [np.array([self.end_id], np.uint32)]
        return [np.concatenate([*(next(ids) for _ in one), *end]) for one in pieces]

    def _encode_pieces(self, pieces: Sequence[str]) -> Iterator[np.ndarray]:
        for group in groups(pieces):
            encoded = self.inner.encode_batch_fast(group, add_special_tokens=False)
            yield from (np.array(encoding.ids, np.uint32) for encoding in encoded)

    @property
    def definition(self) -> str:
        """Its tokenizer.json."""
        return self.inner.to_str()

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, end-of-document tokens by name; ids from `size` up have no text."""
        return self.inner.decode([int(i) for i in ids if 0 <= i < self.size], skip_special_tokens=False)

    @cached_property
    def newline_V(self) -> np.ndarray:
        """bool[size]: which tokens hold a newline."""
        return np.array(["\n" in text for text in self.inner.decode_batch([[i] for i in range(self.size)])])


def groups(pieces: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts, each of at most `GROUP_CHARACTERS` or one piece."""
    group, characters = [], 0
    for piece in pieces:
        if group and characters + len(piece) > GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
        group.append(piece)
        characters += len(piece)
    if group:
        yield group


def pieces_of(text: str) -> list[str]:
    """Cut `text` into pieces of about `PIECE_CHARACTERS`, only at newlines that are a word in GPT-2's split."""
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARACTERS:
        cut = start + PIECE_CHARACTERS
        while (cut := text.find("\n", cut) + 1) and not _is_lone_newline(text, cut - 1):
            pass
        if not cut:
            break
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def _is_lone_newline(text: str, at: int) -> bool:
    return 0 < at < len(text) - 1 and not text[at - 1].isspace() and not text[at + 1].isspace()


def require_vocabulary(vocab_size: int) -> None:
    """Refuse a vocabulary too small for byte-level BPE."""
    require(
        vocab_size >= LEAST_VOCABULARY,
        f"model.vocab_size={vocab_size} is too small for text: byte-level BPE needs at least {LEAST_VOCABULARY}"
        " (256 bytes and the end of a document); raise it, or set data.tokenizer to a tokenizer.json that is smaller",
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens (fewer where the text has no more pairs); 0 ends a document."""
    require_vocabulary(vocab_size)
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in pieces_of(text)), trainer)
    return inner


def trained(definition: str) -> Tokenizer:
    """The tokenizer that `train_bpe` made, from its JSON."""
    return _tokenizer(tokenizers.Tokenizer.from_str(definition), END, cuts_at_lines=True)


def from_file(path: Path, vocab_size: int) -> Tokenizer:
    """Read a tokenizer.json; refuses one that is missing, not valid, or larger than the model's vocabulary."""
    name = f"data.tokenizer={str(path)!r}"
    try:
        definition = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Refused(f"{name}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{name} cannot be read: {error}") from None
    try:
        inner = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises plain Exception
        raise Refused(f"{name} is not a valid tokenizer.json: {error}") from None
    tokenizer = _tokenizer(inner, _end_name(path, inner))
    require(tokenizer.size > 0, f"{name} has an empty vocabulary")
    require(
        tokenizer.size <= vocab_size,
        f"{name} has {tokenizer.size} token ids, more than model.vocab_size={vocab_size};"
        f" set model.vocab_size to {tokenizer.size} or more",
    )
    return tokenizer


def _tokenizer(inner: tokenizers.Tokenizer, end: str | None, cuts_at_lines: bool = False) -> Tokenizer:
    """Wrap `inner`, with what its file may ask for and training must not have turned off: cutting, padding."""
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    ids = inner.get_vocab(with_added_tokens=True)
    return Tokenizer(inner, max(ids.values(), default=-1) + 1, ids.get(end) if end else None, cuts_at_lines)


def _end_name(path: Path, inner: tokenizers.Tokenizer) -> str | None:
    """The end-of-document token: as tokenizer_config.json beside the file says, else the first known name it has."""
    try:
        named = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
        named = named["content"] if isinstance(named, dict) else named
    except (OSError, ValueError, KeyError, TypeError):
        named = None
    return next(
        (name for name in (named, *END_NAMES) if isinstance(name, str) and inner.token_to_id(name) is not None), None
    )
