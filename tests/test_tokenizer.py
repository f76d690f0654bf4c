"""The tokenizer: every text comes back, training is repeatable, a bad file or size is refused with its numbers."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from meshwright.config import Refused
from meshwright.train import tokenizer as tokenizing
from meshwright.train.tokenizer import END, from_file, pieces_of, train_bpe, trained

TEXTS = [
    "def f(x):\n    return x + 1\n\n\nprint(f(2))\n" * 20,
    "naïve café — 日本語 🎉\tтест\r\n",
    "\x00\x01\x7f \ufeff\u200b\U0010ffff",
    f"a document that names {END} is not two documents",
    "   \n\n  leading and trailing space   ",
]


@pytest.fixture(scope="module")
def tokenizer():
    return trained(train_bpe(TEXTS, 300).to_str())


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_documents_end_with_the_end_token_and_hold_no_other(tokenizer):
    for ids, text in zip(tokenizer.encode_documents(TEXTS), TEXTS, strict=True):
        assert ids.dtype == np.uint32
        assert ids[-1] == tokenizer.end_id
        assert tokenizer.end_id not in ids[:-1]
        assert tokenizer.decode(ids) == text + END
        assert ids[:-1].tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("vocab_size", [257, 258, 300, 1000])
def test_any_size_from_257_up_and_every_id_below_it(vocab_size):
    tokenizer = trained(train_bpe(TEXTS, vocab_size).to_str())
    assert 257 <= tokenizer.size <= vocab_size
    assert tokenizer.size == vocab_size or vocab_size == 1000
    assert max(ids.max() for ids in tokenizer.encode_documents(TEXTS)) < vocab_size


@pytest.mark.parametrize("vocab_size", [1, 101, 256])
def test_too_small_a_vocabulary_is_refused(vocab_size):
    with pytest.raises(Refused, match=rf"vocab_size={vocab_size} .* at least 257"):
        train_bpe(TEXTS, vocab_size)


def test_training_is_the_same_in_another_process():
    code = f"from meshwright.train.tokenizer import train_bpe; print(hash(train_bpe({TEXTS!r}, 400).to_str()))"
    code = code.replace("hash(", "__import__('zlib').crc32(").replace(".to_str())", ".to_str().encode())")
    runs = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout for _ in range(2)}
    assert len(runs) == 1


def test_pieces_of_a_long_text_have_the_tokens_of_the_whole(tokenizer, monkeypatch):
    text = "\n".join(["x = 1", "", "  y\t=  2 ", "\n\n", "'s it\u2028", "end. \n", "z"] * 40)
    whole = tokenizer.encode(text)
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 37)
    monkeypatch.setattr(tokenizing, "GROUP_CHARACTERS", 200)
    assert len(pieces_of(text)) >= 20
    assert "".join(pieces_of(text)) == text
    assert tokenizer.encode_documents([text, "a"])[0][:-1].tolist() == whole


def test_pieces_of_a_text_without_lines_is_the_text(monkeypatch):
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 10)
    assert pieces_of("a" * 100) == ["a" * 100]
    assert pieces_of("") == [""]


# ---- tokenizer.json -------------------------------------------------------------------------------------


def words(path, names, **more):
    inner = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    for setting in more.values():
        setting(inner)
    inner.save(str(path))
    return path


def test_any_tokenizer_json(tmp_path):
    tokenizer = from_file(words(tmp_path / "t.json", ["?", "a", "b", "</s>"]), 4)
    assert (tokenizer.size, tokenizer.end_id) == (4, 3)
    assert [ids.tolist() for ids in tokenizer.encode_documents(["a b", "b c"])] == [[1, 2, 3], [2, 0, 3]]


def test_without_an_end_token_documents_just_end(tmp_path):
    tokenizer = from_file(words(tmp_path / "t.json", ["?", "a"]), 101)
    assert tokenizer.end_id is None
    assert tokenizer.encode_documents(["a a"])[0].tolist() == [1, 1]


@pytest.mark.parametrize("eos", ["[stop]", {"content": "[stop]"}])
def test_the_end_token_is_what_the_configuration_beside_it_says(tmp_path, eos):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert from_file(words(tmp_path / "tokenizer.json", ["?", "</s>", "[stop]"]), 9).end_id == 2


def test_truncation_and_padding_in_the_file_never_cut_text(tmp_path):
    path = words(
        tmp_path / "t.json",
        ["?", "a", "b"],
        cut=lambda inner: inner.enable_truncation(2),
        fill=lambda inner: inner.enable_padding(length=8),
    )
    assert [len(ids) for ids in from_file(path, 9).encode_documents(["a b a b a", "b"])] == [5, 1]


def test_the_largest_id_counts_not_the_number_of_tokens(tmp_path):
    path = tmp_path / "t.json"
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 500}, unk_token="a")).save(str(path))
    with pytest.raises(Refused, match=r"501 token ids, more than model\.vocab_size=101"):
        from_file(path, 101)
    assert from_file(path, 501).size == 501


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 3}', "\x00"])
def test_an_invalid_file_is_refused(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(Refused, match=r"t\.json.* is not a valid tokenizer\.json"):
        from_file(tmp_path / "t.json", 300)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(Refused, match="no such file"):
        from_file(tmp_path / "none.json", 300)
    with pytest.raises(Refused, match="cannot be read"):
        from_file(tmp_path, 300)
    (tmp_path / "t.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Refused, match="cannot be read"):
        from_file(tmp_path / "t.json", 300)
