"""The data: each token a target once, batches a function of configuration and step, bad input refused by name."""

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from meshwright.config import DataConfig, ModelConfig, Refused, RunConfig, TrainConfig
from meshwright.train import cache, corpus, packing, sources
from meshwright.train.data import entropy_nats, prepare, regression_batch

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "home", "while", "rain"]


def document(seed: int, length: int) -> str:
    generator = np.random.default_rng(seed)
    return " ".join(generator.choice(WORDS, length)) + "\n"


def config(path="", *, T=16, B=5, vocab=300, model=None, seed=0, train=None, **data) -> RunConfig:
    return RunConfig(
        model=model or ModelConfig(vocab_size=vocab),
        data=DataConfig(paths=(str(path),) if path else (), **{"held_out_share": 0.1, **data}),
        train=TrainConfig(sequence_length=T, batch_sequences=B, seed=seed, **(train or {})),
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Documents of 1 to 300 words, as JSON lines."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    rows = [{"id": i, "text": document(i, 1 + i**2 % 300)} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# ---- packing --------------------------------------------------------------------------------------------


def lengths(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 70, 200)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("T", [1, 2, 7, 16, 33, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_token_but_a_documents_first_is_a_target_once(seed, T, packed):
    length_N = lengths(seed)
    start_N = np.cumsum(length_N) - length_N
    tokens = np.arange(length_N.sum()) + 1  # each token is its own name, 0 is nobody's
    rows = packing.pack(start_N, length_N, T, packed)
    batch = packing.fill(rows, tokens, np.arange(len(rows)))
    mask_BT = batch["mask_BT"]
    expected = np.delete(tokens, start_N[length_N > 0])
    assert np.array_equal(np.sort(batch["targets_BT"][mask_BT]), expected)
    assert rows.targets == len(expected)
    assert np.array_equal(batch["targets_BT"][mask_BT], batch["tokens_BT"][mask_BT] + 1)  # the next one
    for name in ("tokens_BT", "targets_BT", "positions_BT", "segments_BT"):
        assert not batch[name][~mask_BT].any()


@pytest.mark.parametrize("packed", [True, False])
def test_segments_are_single_documents_and_positions_count_up_in_them(packed):
    length_N = lengths(3)
    start_N = np.cumsum(length_N) - length_N
    document_of = np.repeat(np.arange(len(length_N)), length_N)
    rows = packing.pack(start_N, length_N, 16, packed)
    batch = packing.fill(rows, np.arange(length_N.sum()), np.arange(len(rows)))
    for tokens_T, segments_T, positions_T in zip(
        *(batch[f"{n}_BT"] for n in ("tokens", "segments", "positions")), strict=True
    ):
        count = segments_T.max()
        assert packed or count == 1
        assert np.array_equal(np.unique(segments_T[segments_T > 0]), np.arange(1, count + 1))
        for segment in range(1, count + 1):
            inside = np.flatnonzero(segments_T == segment)
            assert np.array_equal(inside, np.arange(inside[0], inside[-1] + 1))
            assert np.array_equal(positions_T[inside], np.arange(len(inside)))
            assert len(set(document_of[tokens_T[inside]])) == 1


def plain_best_fit(items, capacity):
    room = []
    for item in sorted(items, reverse=True):
        fits = [i for i, left in enumerate(room) if left >= item]
        if fits:
            best = min(fits, key=lambda i: room[i])
            room[best] -= item
        else:
            room.append(capacity - item)
    return sorted(room)


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_is_the_plain_algorithms(seed):
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 40))
    items = generator.integers(1, capacity + 1, int(generator.integers(0, 200)))
    bin_P = packing.best_fit(items, capacity)
    loads = np.bincount(bin_P, weights=items)
    assert sorted((capacity - loads).astype(int).tolist()) == plain_best_fit(items.tolist(), capacity)


def test_rows_are_nearly_full():
    length_N = np.random.default_rng(0).integers(2, 300, 5000)
    rows = packing.pack(np.cumsum(length_N) - length_N, length_N, 256)
    assert len(rows) <= 1.001 * rows.targets / 256 + 1


def test_a_row_of_minus_one_is_padding():
    rows = packing.pack(np.array([0]), np.array([5]), 4)
    batch = packing.fill(rows, np.arange(5), np.array([-1, 0, -1]))
    assert batch["mask_BT"].sum(1).tolist() == [0, 4, 0]


# ---- batches --------------------------------------------------------------------------------------------


def test_batch_is_a_function_of_configuration_and_step(text, store):
    first, second = (prepare(config(text), cache=store) for _ in range(2))
    for step in (7, 0, 1000, 3):
        assert equal(first.batch(step), second.batch(step))
    assert not equal(first.batch(0), first.batch(1))
    assert not equal(first.batch(0), prepare(config(text, seed=1), cache=store).batch(0))


def test_names_shapes_and_types(text, store):
    batch = prepare(config(text, T=16, B=5), cache=store).batch(0)
    expected = {f"{name}_BT": ((5, 16), np.int32) for name in ("tokens", "targets", "segments", "positions")}
    expected |= {"mask_BT": ((5, 16), np.bool_), "sample_B": ((5,), np.int32)}
    assert {name: (array.shape, array.dtype.type) for name, array in batch.items()} == expected
    assert batch["sample_B"].tolist() == [0, 1, 2, 3, 4]


def rows_of(data, batches):
    """Which training row each row of `batches` is."""
    every = packing.fill(data.train_rows, data.corpus.tokens, np.arange(len(data.train_rows)))
    name = lambda one, i: (one["tokens_BT"][i].tobytes(), one["targets_BT"][i].tobytes())  # noqa: E731
    index = {name(every, i): i for i in range(len(data.train_rows))}
    assert len(index) == len(data.train_rows)
    return [index[name(batch, i)] for batch in batches for i in range(len(batch["sample_B"]))]


def test_every_epoch_is_another_permutation_of_all_rows(text, store):
    data = prepare(config(text, B=9), cache=store)
    count = len(data.train_rows)
    assert count % 9  # batches reach over the end of an epoch
    order = rows_of(data, [data.batch(step) for step in range(3 * count // 9 + 1)])
    epochs = [order[i * count : (i + 1) * count] for i in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != list(range(count))


def test_neighbouring_seeds_share_no_epoch(text, store):
    """grain shuffles epoch e with seed + e, so that with plain seeds epoch 1 of seed 0 would be epoch 0 of seed 1."""
    one, other = (prepare(config(text, B=1, seed=seed), cache=store) for seed in (0, 1))
    count = len(one.train_rows)
    assert rows_of(one, map(one.batch, range(count, 2 * count))) != rows_of(other, map(other.batch, range(count)))


@pytest.mark.parametrize("start", [0, 1, 13, 40])
def test_resume_needs_only_the_step(text, store, start):
    data = prepare(config(text), cache=store)
    for step, batch in enumerate(islice(data.batches(start), 12), start=start):
        assert equal(batch, data.batch(step))


@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3, 4, 5]], [[0, 1, 2], [3, 4, 5]], [[5, 0], [2], [4, 1, 3]], [[0, 1], [0, 1], [2, 3, 4, 5]]]
)
def test_processes_rows_unite_to_the_global_batch(text, store, split):
    data = prepare(config(text, B=6), cache=store)
    streams = [data.batches(3, np.array(rows)) for rows in split]
    for step in range(3, 8):
        whole = data.batch(step)
        for rows, part in zip(split, map(next, streams), strict=True):
            assert equal(part, {name: array[rows] for name, array in whole.items()})


def test_the_layout_and_steps_change_nothing(text, store):
    one = prepare(config(text, train={"steps": 5}), cache=store)
    other = prepare(replace(config(text), layout=replace(config(text).layout, fsdp=4, tensor=2)), cache=store)
    assert equal(one.batch(9), other.batch(9))


def test_a_batch_larger_than_the_text_repeats_rows_and_says_so(text, store):
    lines = []
    data = prepare(config(text, T=256, B=500), lines.append, store)
    assert any("batch of 500 repeats some" in line for line in lines)
    assert data.batch(0)["mask_BT"].any(1).all()


# ---- held out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 21, 64])
def test_evaluation_sees_each_row_once_in_any_batch(text, store, batch):
    data = prepare(config(text, held_out_share=0.3, train={"eval_sequences": 21}), cache=store)
    assert len(data.held_out_rows) > 21
    batches = list(data.eval_batches(batch))
    assert all(len(one["tokens_BT"]) == batch and one["sample_B"].tolist() == list(range(batch)) for one in batches)
    assert len(batches) == -(-21 // batch)
    united = {name: np.concatenate([one[name] for one in batches]) for name in batches[0]}
    expected = packing.fill(data.held_out_rows, data.corpus.tokens, np.arange(21))
    assert all(np.array_equal(united[name][:21], expected[name]) for name in expected)
    assert not united["mask_BT"][21:].any()
    parts = list(data.eval_batches(batch, np.arange(batch)[::2]))
    assert all(equal(part, {k: v[::2] for k, v in one.items()}) for part, one in zip(parts, batches, strict=True))


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_held_out_and_training_text_have_nothing_in_common(text, store, share):
    data = prepare(config(text, held_out_share=share), cache=store)
    assert data.held_out.tokens and data.train.tokens
    assert data.held_out.tokens + data.train.tokens == len(data.corpus.tokens)
    used = np.zeros(len(data.corpus.tokens), int)
    for part in (data.held_out, data.train):
        for start, length in zip(part.start_N, part.length_N, strict=True):
            used[start : start + length] += 1
    assert (used == 1).all()


def held_texts(data):
    return {
        data.tokenizer.decode(data.corpus.tokens[a : a + n])
        for a, n in zip(data.held_out.start_N, data.held_out.length_N, strict=True)
    }


def test_the_split_depends_on_each_document_alone(text, tmp_path, store):
    rows = text.read_text().splitlines()
    (tmp_path / "half.jsonl").write_text("\n".join(rows[::-2]))
    whole, half = (prepare(config(path, held_out_share=0.3), cache=store) for path in (text, tmp_path / "half.jsonl"))
    kept = {json.loads(row)["text"] + "<|endoftext|>" for row in rows[::-2]}
    assert held_texts(half) == held_texts(whole) & kept
    assert len(held_texts(half)) > 2


def test_equal_documents_are_on_one_side(tmp_path, store):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": document(i % 30, 40)}) + "\n" for i in range(90)))
    data = prepare(config(tmp_path, held_out_share=0.3), cache=store)
    sides = [
        {data.corpus.hash_N[np.searchsorted(data.corpus.start_N, a)] for a in p.start_N}
        for p in (data.train, data.held_out)
    ]
    assert sides[1] and not sides[0] & sides[1]


@pytest.mark.parametrize("documents", [1, 2, 3])
def test_the_tail_of_a_long_document_is_held_out_at_a_lines_end(tmp_path, store, documents):
    for i in range(documents):
        (tmp_path / f"{i}.txt").write_text("".join(document(100 * i + j, 8) for j in range(60)))
    data = prepare(config(tmp_path, held_out_share=0.02), cache=store)
    assert "longest document" in data.held_out_by
    (held,) = held_texts(data)
    assert held.startswith("\n") and held.endswith("<|endoftext|>")
    least = max(17, round(0.02 * len(data.corpus.tokens)))
    assert least <= data.held_out.tokens <= 2 * least
    assert list(data.eval_batches(4))


def test_two_documents_or_more_always_leave_something_to_evaluate(tmp_path, store):
    for count in range(2, 12):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(json.dumps({"text": document(i, 20)}) + "\n" for i in range(count)))
        data = prepare(config(path, T=8, held_out_share=0.01), cache=store)
        assert len(data.held_out_rows) and len(data.train_rows)


def test_nothing_is_held_out_where_nothing_is_asked_for(text, store):
    data = prepare(config(text, held_out_share=0.0), cache=store)
    assert list(data.eval_batches(4)) == []
    assert data.train.tokens == len(data.corpus.tokens)
    assert data.prompt(5)


def test_just_one_sequence_trains(tmp_path, store):
    (tmp_path / "a.txt").write_text("abcdefgh" * 4)
    with pytest.raises(Refused) as refusal:
        prepare(config(tmp_path, T=1000), cache=store)
    tokens = int(str(refusal.value).split(" tokens")[0].split()[-1])
    assert "needs 1001" in str(refusal.value)
    with pytest.raises(Refused, match=f"{tokens} tokens, .* needs {tokens + 1}"):
        prepare(config(tmp_path, T=tokens), cache=store)
    data = prepare(config(tmp_path, T=tokens - 1, B=1), cache=store)
    assert data.batch(0)["mask_BT"].all()
    assert list(data.eval_batches(4)) == []


def test_prompt_is_the_beginning_of_held_out_text(text, store):
    data = prepare(config(text, held_out_share=0.3), cache=store)
    prompt = data.prompt(6)
    assert len(prompt) == 6
    assert any(held.startswith(data.tokenizer.decode(prompt)) for held in held_texts(data))


def test_unigram_entropy(text, store):
    assert entropy_nats(np.array([4, 0, 4, 4, 4])) == pytest.approx(np.log(4))
    data = prepare(config(text), cache=store)
    spans = zip(data.train.start_N, data.train.length_N, strict=True)
    tokens = np.concatenate([data.corpus.tokens[a : a + n] for a, n in spans])
    p = np.unique(tokens, return_counts=True)[1] / len(tokens)
    assert data.unigram_entropy_nats == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)


def test_description(text, store):
    facts = prepare(config(text), cache=store).describe()
    assert facts["documents"] == 60
    assert facts["bytes"] == sum(len(json.loads(line)["text"].encode()) for line in text.read_text().splitlines())
    assert facts["train_tokens"] + facts["held_out_tokens"] == facts["tokens"]
    assert json.loads(json.dumps(facts)) == facts


# ---- sources --------------------------------------------------------------------------------------------

DOCUMENTS = ["first document\n", "second — ü\n", "third\n"]


def compressed(path: Path, content: bytes) -> Path:
    make = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(make(content))
    return path


def parquet(**columns) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


def read(*paths, field="text") -> list[str]:
    return list(sources.documents(sources.find(map(str, paths)), field))


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_all_formats_give_the_same_documents(tmp_path, compression):
    lines = "".join(json.dumps({"n": 1, "body": text}, ensure_ascii=False) + "\n" for text in DOCUMENTS)
    rows = compressed(tmp_path / f"rows.jsonl{compression}", lines.encode())
    table = compressed(tmp_path / f"table.parquet{compression}", parquet(n=[1, 2, 3], body=DOCUMENTS))
    assert read(rows, field="body") == read(table, field="body") == DOCUMENTS
    for kind in (".txt", ".md", ".py"):
        files = [compressed(tmp_path / kind / f"{i}{kind}{compression}", t.encode()) for i, t in enumerate(DOCUMENTS)]
        assert read(*files[::-1]) == read(tmp_path / kind) == read(tmp_path / kind / f"*{kind}*") == DOCUMENTS


def test_directories_and_globs_are_sorted_and_each_file_is_read_once(tmp_path):
    for name in ("b/2.txt", "a.txt", "b/1.md", "c.png", ".hidden/x.txt", "b/.y.txt"):
        compressed(tmp_path / name, name.encode())
    (tmp_path / "empty.py").touch()
    expected = ["a.txt", "b/1.md", "b/2.txt"]
    assert read(tmp_path) == expected
    assert read(tmp_path / "**", tmp_path / "b", tmp_path / "a.txt") == expected
    assert read(tmp_path / "b" / "[12].*") == expected[1:]


def test_a_name_with_glob_characters_is_itself(tmp_path):
    assert read(compressed(tmp_path / "[a]*.txt", b"x")) == ["x"]


def test_frames_and_members_one_after_another_are_one_file(tmp_path):
    for suffix, make in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        (tmp_path / f"t.txt{suffix}").write_bytes(make(b"one ") + make(b"two"))
        assert read(tmp_path / f"t.txt{suffix}") == ["one two"]


def test_chunks_do_not_show(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 7)
    for suffix in ("", ".gz", ".zst"):
        path = compressed(
            tmp_path / f"t.jsonl{suffix}", "".join(json.dumps({"text": t}) + "\n" for t in DOCUMENTS).encode()
        )
        assert read(path) == DOCUMENTS


def test_empty_and_null_rows_are_passed_over_and_counted(tmp_path, store):
    lines = [{"text": t} for t in ("", document(0, 90), None, "  \n", document(1, 90))]
    (tmp_path / "t.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    data = prepare(config(tmp_path), cache=store)
    assert (data.corpus.empty, len(data.corpus.length_N)) == (3, 2)


def test_a_byte_order_mark_and_line_ends_of_windows(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "t.jsonl").write_bytes(b'{"text": "a"}\r\n{"text": "b"}\r\n')
    assert read(tmp_path / "t.txt", tmp_path / "t.jsonl") == ["a", "b", "hello"]


def test_the_standard_library_is_the_default():
    files = sources.library()
    assert files == sources.library()
    assert 1_000_000 < sum(path.stat().st_size for path in files) <= sources.LIBRARY_BYTES
    assert not {part for path in files for part in path.parts} & {"site-packages", "test", "tests", "__pycache__"}
    assert all(list(sources.documents(files, "text")))


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


LINES = b'{"text": "good"}\n' * 50
NOISE = np.random.default_rng(0).bytes(4000)
BAD = {
    "t.bin": (b"x", r"format that is not read; read are \.txt"),
    "t.txt": (b"", "is empty"),
    "nul.txt": (b"text\0text", "binary, not text: it holds NUL"),
    "utf16.md": ("text".encode("utf-16"), "UTF-16"),
    "latin.py": (b"caf\xe9", "byte 3 cannot be decoded"),
    "picture.txt": (b"\x89PNG\r\n\x1a\n", "byte 0 cannot be decoded"),
    "cut.txt.gz": (cut(gzip.compress(NOISE)), r"not a whole \.gz file"),
    "not.txt.gz": (b"plain text", r"not a whole \.gz file"),
    "damaged.txt.gz": (gzip.compress(b"a" * 999)[:-8] + bytes(8), r"not a whole \.gz file"),
    "cut.txt.zst": (cut(zstandard.compress(NOISE)), r"not a whole \.zst file"),
    "cut2.txt.zst": (zstandard.compress(b"a") + cut(zstandard.compress(NOISE)), r"not a whole \.zst file"),
    "not.txt.zst": (b"plain text", r"not a whole \.zst file"),
    "bad.jsonl": (LINES + b'{"text": ', "line 51: not valid JSON"),
    "deep.jsonl": (b'{"text": "a"}\n' + b"[" * 100000, "line 2: not valid JSON"),
    "list.jsonl": (b'["text"]', "line 1: holds a list, not an object"),
    "field.jsonl": (b'{"body": "a", "id": 1}', "line 1 has no field 'text'; its fields: body, id"),
    "number.jsonl": (LINES + b'{"text": 3}', "line 51: the field 'text' .* is a number"),
    "half.jsonl": (b'{"text": "\\ud800"}', "line 1: .* surrogate"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}', "line 2 is binary or not UTF-8"),
    "field.parquet": (parquet(body=["a"], id=[1]), "has no field 'text'; its fields: body, id"),
    "number.parquet": (parquet(text=[1]), "'text' .* is int64, not a string"),
    "cut.parquet": (cut(parquet(text=["a" * 99])), "not a readable parquet"),
    "not.parquet": (b"plain text", "not a readable parquet"),
    "not.parquet.gz": (gzip.compress(b"plain text"), "not a readable parquet"),
    "blank.txt": (b" \n \n", "holds no text"),
    "blank.jsonl": (b"\n\n", "holds no text"),
    "none.parquet": (parquet(text=pyarrow.array([], pyarrow.string())), "holds no text"),
    "empty.txt.gz": (gzip.compress(b""), "holds no text"),
    "short.txt": (b"a b", r"shorter than one sequence: \d+ tokens, .* needs 17"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name_and_nothing_is_written(name, tmp_path):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=message) as refusal:
        prepare(config(tmp_path / name), cache=tmp_path / "cache")
    assert name in str(refusal.value) or "holds no text" in message or "shorter" in message
    assert "\n" not in str(refusal.value)
    if "shorter" not in message:
        assert not list((tmp_path / "cache").glob("corpus*")) and not list((tmp_path / "cache").glob(".*"))


@pytest.mark.parametrize("name", ["none.txt", "none/*.txt", "*.jsonl", "empty", "pictures", "pictures/*"])
def test_what_matches_nothing_is_refused(name, tmp_path):
    (tmp_path / "empty").mkdir()
    compressed(tmp_path / "pictures" / "a.png", b"x")
    good = compressed(tmp_path / "good.txt", b"x")
    with pytest.raises(Refused, match=r"matches nothing|holds no file that is read"):
        sources.find([str(good), str(tmp_path / name)])


def test_what_cannot_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "none")
    for name in (tmp_path / "dangling.txt", tmp_path, tmp_path / "*.txt"):
        with pytest.raises(Refused, match=r"dangling\.txt.* cannot be read: No such file"):
            prepare(config(name), cache=tmp_path / "cache")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(Refused, match="neither a file nor a directory"):  # and does not wait for a writer
        sources.find([str(tmp_path / "pipe.txt")])
    path = compressed(tmp_path / "secret.txt", b"x")

    def refuse(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(Refused, match=r"secret\.txt.* cannot be read: Permission denied"):
        sources.content_hash([path], "text")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = compressed(tmp_path / "t.txt", document(0, 200).encode())
    plain = sources.documents

    def growing(files, field):
        yield from plain(files, field)
        with open(path, "a") as file:
            file.write("more")

    monkeypatch.setattr(sources, "documents", growing)
    with pytest.raises(Refused, match=r"t\.txt.* changed while it was read"):
        prepare(config(path), cache=tmp_path / "cache")


def test_a_tokenizer_that_does_not_fit_is_refused_before_the_text_is_read(tmp_path):
    with pytest.raises(Refused, match="no such file"):
        prepare(config(tmp_path / "none.txt", tokenizer=str(tmp_path / "t.json")))
    with pytest.raises(Refused, match="vocab_size=101"):
        prepare(config(tmp_path / "none.txt", vocab=101))


# ---- cache ----------------------------------------------------------------------------------------------


def test_the_second_time_nothing_is_made_and_all_is_equal(text, tmp_path):
    lines = []
    first = prepare(config(text), lines.append, tmp_path)
    assert [line.split()[0] for line in lines] == ["training", "tokenising"]
    second = prepare(config(text), lines.append, tmp_path)
    assert len(lines) == 2
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.corpus.tokens, second.corpus.tokens)


def test_other_text_field_or_vocabulary_is_another_entry(text, tmp_path):
    prints = {prepare(config(text, vocab=v), cache=tmp_path).fingerprint for v in (300, 301)}
    (tmp_path / "t.jsonl").write_text(text.read_text().replace("fox", "cat"))
    prints.add(prepare(config(tmp_path / "t.jsonl"), cache=tmp_path).fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: bytes([b[0] ^ 1]) + b[1:], None])
@pytest.mark.parametrize("kind", ["tokenizer-*[0-9a-f].json", "corpus-*.tokens", "corpus-*.npy", "*.manifest.json"])
def test_a_damaged_entry_is_made_again(text, tmp_path, kind, damage):
    whole = prepare(config(text), cache=tmp_path)
    expected = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    batch = whole.batch(0)
    for path in tmp_path.glob(kind):
        path.unlink()
        if damage:
            path.write_bytes(damage(expected[path.name]))
    lines = []
    assert equal(prepare(config(text), lines.append, tmp_path).batch(0), batch)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == expected
    assert any("is damaged" in line for line in lines) or (damage is None and kind == "*.manifest.json")


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"files": 3, "facts": {}}', '{"files": {"x": 1}, "facts": 0}', "null"]
)
def test_a_manifest_of_another_shape_is_damage(tmp_path, content):
    (tmp_path / "k.manifest.json").write_text(content)
    lines = []
    assert cache.load(tmp_path, "k", lines.append) is None
    assert len(lines) == 1


def test_a_cache_that_cannot_be_written_is_reported_and_done_without(text, store, tmp_path):
    (tmp_path / "file").touch()
    lines = []
    data = prepare(config(text), lines.append, tmp_path / "file" / "cache")
    assert sum("nothing is cached" in line for line in lines) == 2
    assert equal(data.batch(3), prepare(config(text), cache=store).batch(3))


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.store(tmp_path, "k", {".a": fail}, {})
    assert not list(tmp_path.iterdir())


def test_processes_at_the_same_time(text, tmp_path):
    """Two processes without a cache, each for half of the rows: together the global batch, and one good entry."""
    code = f"""
import sys, numpy as np
from meshwright.config import *
from meshwright.train.data import prepare
config = RunConfig(model=ModelConfig(vocab_size=300), data=DataConfig(paths=({str(text)!r},), held_out_share=0.1),
    train=TrainConfig(sequence_length=16, batch_sequences=6))
rows = np.arange(6)[int(sys.argv[1]) :: 2]
np.savez(sys.argv[2], **next(prepare(config).batches(2, rows)))
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    outputs = [tmp_path / f"{i}.npz" for i in range(2)]
    started = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", code, str(i), str(output)], env=environment)
        for i, output in enumerate(outputs)
    ]
    assert [process.wait(120) for process in started] == [0, 0]
    lines = []
    whole = prepare(config(text, B=6), lines.append, tmp_path / "meshwright").batch(2)
    assert not lines
    for i, output in enumerate(outputs):
        assert equal(dict(np.load(output)), {name: array[i::2] for name, array in whole.items()})


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / "meshwright"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_directory() == tmp_path / "home" / ".cache" / "meshwright"


def test_the_tokenizers_sample_is_bounded_and_even():
    texts = [str(i) * 100 for i in range(10)] * 10
    taken = list(corpus.sample(texts, 10_000, 2_000))
    assert sum(map(len, taken)) == 2_000
    assert len(set(taken)) >= 2 and texts.index(taken[-1]) != 0
    assert list(corpus.sample(texts, 10_000, 50_000)) == texts
    assert sum(map(len, corpus.sample(texts, 10, 500))) <= 600  # where the total was far too low


# ---- regression -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["ffn", "residual"])
def test_regression(family):
    one = config(B=512, model=ModelConfig(family=family, d_model=8), train={"eval_sequences": 1100})
    data = prepare(one)
    batch = data.batch(3)
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        name: ((512, 8), np.dtype(np.float32)) for name in ("x_BD", "y_BD")
    }
    assert equal(batch, regression_batch(one, 3)) and not equal(batch, data.batch(4))
    assert equal(batch, next(data.batches(3)))
    assert not equal(batch, prepare(replace(one, train=replace(one.train, seed=1))).batch(3))
    parts = [data.batch(3, np.arange(512)[i::2]) for i in range(2)]
    assert all(equal(part, {k: v[i::2] for k, v in batch.items()}) for i, part in enumerate(parts))
    assert abs(batch["x_BD"].mean()) < 0.05 and abs(batch["x_BD"].std() - 1) < 0.05
    held = list(data.eval_batches(512))
    assert len(held) == 2 and not any(equal(one, data.batch(step)) for one in held for step in range(4))
    json.dumps(data.describe())


def test_the_regression_target_is_one_function_of_x():
    """arcsin y is linear in x, with the same w in every step, wherever x w stays within a quarter turn."""
    one = config(B=4000, model=ModelConfig(family="residual", d_model=4))
    solved = []
    for step in range(2):
        x_BD, y_BD = (regression_batch(one, step)[name].astype(np.float64) for name in ("x_BD", "y_BD"))
        small_B = np.linalg.norm(x_BD, axis=1) < 0.5
        solved.append(np.linalg.lstsq(x_BD[small_B], np.arcsin(y_BD[small_B]), rcond=None)[0])
    assert np.allclose(solved[0], solved[1], atol=1e-5)
