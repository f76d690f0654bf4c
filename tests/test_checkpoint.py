"""Nothing is lost: a run that is stopped goes on, on any layout, as if it had not been; what is damaged is named."""

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from meshwright import mesh, presets
from meshwright.cli.main import main
from meshwright.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    Refused,
    RunConfig,
    TrainConfig,
    override,
    parse_layout,
    to_toml,
)
from meshwright.layout import check
from meshwright.train import checkpoint, loop, record, resume
from meshwright.train.checkpoint import Checkpoints
from meshwright.train.state import Run

WORDS = "the mesh has six axes and every axis has a degree so each device holds its own shard of an array"

CONFIG = RunConfig(
    model=ModelConfig(layers=1, d_model=24, d_ff=48, heads=6, kv_heads=2, head_size=4, vocab_size=263),
    optim=OptimConfig(lr=1e-2, warmup_steps=2, moment_dtype="float64"),
    train=TrainConfig(
        steps=8,
        batch_sequences=12,
        sequence_length=12,
        param_dtype="float64",
        compute_dtype="float64",
        reduce_dtype="float64",
        logits_dtype="float64",
        eval_sequences=13,
        sample_tokens=0,
        keep_checkpoints=3,
    ),
)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A text of some thousand words, in an order that has something to learn."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words, rng = WORDS.split(), np.random.default_rng(0)
    path.write_text("\n".join(" ".join(rng.choice(words, 9)) for _ in range(400)))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def with_layout(config: RunConfig, layout: str, **train) -> RunConfig:
    return replace(config, layout=parse_layout(layout), train=replace(config.train, **train))


def start(config: RunConfig) -> Run:
    return Run.of(config, check(config), mesh.make(check(config)))


def train(config: RunConfig, directory: Path, resumed: bool = False) -> tuple[dict, str]:
    """Train, and return the run's facts and what it said."""
    console = Console(record=True, width=200, file=io.StringIO())
    facts = loop.train(config, directory, console, resumed)
    return facts, console.export_text()


def interrupt_after(number: int, monkeypatch) -> None:
    """Let Ctrl-C come when the row of step `number` is written; the step after it is then already under way."""
    write = record.Records.step

    def step(self, *arguments):
        row = write(self, *arguments)
        if row["step"] == number:
            signal.raise_signal(signal.SIGINT)
        return row

    monkeypatch.setattr(record.Records, "step", step)


def rows(directory: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_run_stopped_twice_goes_on_on_other_layouts_as_if_it_had_not_been(text, tmp_path, monkeypatch, capsys):
    config = replace(CONFIG, data=DataConfig(paths=(str(text),)))
    whole, _ = train(with_layout(config, "data=2 fsdp=2 tensor=2"), tmp_path / "whole")

    stopped, layouts = tmp_path / "stopped", ("data=2 fsdp=2 tensor=2", "fsdp=4", "data=3")
    for layout, last in zip(layouts, (2, 5, None), strict=True):
        with monkeypatch.context() as patch:
            if last is None:
                facts, said = train(with_layout(config, layout), stopped, resumed=True)
                assert "going on after step 6" in said
            else:
                interrupt_after(last, patch)
                with pytest.raises(KeyboardInterrupt, match=f"after step {last + 1}, whose checkpoint is saved"):
                    train(with_layout(config, layout), stopped, resumed=last > 2)
                assert "once more to stop at once" in capsys.readouterr().err
    assert [one["layout"] for one in facts["resumed"]] == ["fsdp=4", "data=3"]
    same = ("step", "lr", "tokens", "targets", "skipped")
    close = ("loss", "grad_norm", "clip_factor")
    expected, got = rows(tmp_path / "whole"), rows(stopped)
    assert [[row.get(name) for name in same] for row in got] == [[row.get(name) for name in same] for row in expected]
    for name in close:
        np.testing.assert_allclose([row[name] for row in got[:-1]], [row[name] for row in expected[:-1]], rtol=1e-9)
    assert [row["step"] for row in got] == [*range(1, 9), 8]
    np.testing.assert_allclose(facts["eval_loss"], whole["eval_loss"], rtol=1e-9)
    assert facts["eval_loss"] < facts["eval_loss_before"] - 0.5


PIPED = replace(CONFIG, model=replace(CONFIG.model, layers=5))


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_goes_on_with_another_pipeline_as_if_it_had_not_been_stopped(text, tmp_path, monkeypatch):
    """Interleaved chunks, no pipeline, a V of uneven chunks, and back: one curve, one held-out loss."""
    config = replace(PIPED, data=DataConfig(paths=(str(text),)))
    whole, _ = train(with_layout(config, "data=2"), tmp_path / "whole")
    stopped = tmp_path / "stopped"
    interleaved = "pipe=2 data=2 microbatches=3 schedule=interleaved"
    uneven = "pipe=2 tensor=2 microbatches=6 schedule=zb-v stage_layers=3,2 split_vocabulary=true"
    layouts = ((interleaved, 1), ("data=2", 3), (uneven, 5), (interleaved, None))
    for layout, last in layouts:
        with monkeypatch.context() as patch:
            if last is None:
                facts, _ = train(with_layout(config, layout), stopped, resumed=True)
                continue
            interrupt_after(last, patch)
            with pytest.raises(KeyboardInterrupt):
                train(with_layout(config, layout), stopped, resumed=last > 1)
    expected, got = rows(tmp_path / "whole"), rows(stopped)
    for name in ("step", "lr", "tokens", "targets", "skipped"):
        assert [row.get(name) for row in got] == [row.get(name) for row in expected]
    for name in ("loss", "grad_norm", "clip_factor"):
        np.testing.assert_allclose([row[name] for row in got[:-1]], [row[name] for row in expected[:-1]], rtol=1e-9)
    np.testing.assert_allclose(facts["eval_loss"], whole["eval_loss"], rtol=1e-9)


LATER = [pytest.mark.slow, pytest.mark.ci]


@pytest.mark.parametrize(
    "name", ["adamw", *(pytest.param(n, marks=LATER) for n in ("sgd", "lion", "adafactor", "muon"))]
)
def test_every_optimisers_state_is_read_back_with_another_pipeline_bit_for_bit(name, tmp_path):
    """Interleaved stages, none, uneven ones, and back: moments and weights stay what they were."""
    optim = replace(CONFIG.optim, name=name, momentum=0.9 if name == "sgd" else 0.0)
    config = replace(PIPED, optim=optim, model=replace(PIPED.model, layers=9))
    numbers, before = np.random.default_rng(0), start(with_layout(config, "data=2"))
    state = state_of(before, numbers.standard_normal)
    expected = [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]
    interleaved, uneven = "pipe=4 fsdp=2 schedule=interleaved", "pipe=2 tensor=2 schedule=zb-v stage_layers=5,4"
    for number, layout in enumerate((interleaved, "data=2", uneven, interleaved)):
        checkpoints, run = Checkpoints(tmp_path / str(number), before), start(with_layout(config, layout))
        checkpoints.save(state, number)
        checkpoints.finish()
        state, before = Checkpoints(tmp_path / str(number), run).restore(), run
        assert jax.tree.map(lambda x: x.sharding, state) == run.shardings(at_rest=True)
        assert [np.asarray(x).tobytes() for x in jax.tree.leaves(checkpoint._of_model(run, state))] == expected


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor", "muon"])
def test_every_optimisers_state_is_read_back_on_another_layout(name, tmp_path):
    optim = replace(CONFIG.optim, name=name, momentum=0.9 if name == "sgd" else 0.0)
    first = start(with_layout(replace(CONFIG, optim=optim), "fsdp=4 tensor=2"))
    state = state_of(first, lambda shape: np.arange(math.prod(shape)).reshape(shape))
    checkpoints = Checkpoints(tmp_path, first)
    checkpoints.save(state, 3)
    checkpoints.finish()
    for layout in ("fsdp=3", "tensor=6"):
        run = start(with_layout(replace(CONFIG, optim=optim), layout))
        read = Checkpoints(tmp_path, run).restore()
        assert jax.tree.map(lambda x: x.sharding, read) == run.shardings(at_rest=True)
        expected = jax.tree.leaves(checkpoint._of_model(first, state))
        got = jax.tree.leaves(checkpoint._of_model(run, read))
        for one, other in zip(expected, got, strict=True):
            np.testing.assert_array_equal(one, other)


# ---- what must not change --------------------------------------------------------------------------------

CHANGED = [
    ("model.layers=3", "model.layers is 1 there and 3 here"),
    ("model.family=gpt", "model.family is 'llama' there and 'gpt' here"),
    ("model.rope_scaling.factor=4", "model.rope_scaling.factor"),
    ("data.packing=false", "data.packing is True there and False here"),
    ("data.held_out_share=0.1", "data.held_out_share is 0.02 there and 0.1 here"),
    ("optim.name=lion", "optim.name is 'adamw' there and 'lion' here"),
    ("optim.lr=0.5", "optim.lr is 0.01 there and 0.5 here"),
    ("train.seed=1", "train.seed is 0 there and 1 here"),
    ("train.batch_sequences=24", "batch in sequences (train.batch_sequences or train.batch_tokens) is 12 there and 24"),
    ("train.batch_tokens=288", "is 12 there and 24 here"),
    ("train.sequence_length=24", "train.sequence_length is 12 there and 24 here"),
    ("train.param_dtype=float32", "train.param_dtype"),
    ("train.z_loss=0.1", "train.z_loss"),
]
FREE = (
    "layout.fsdp=4",
    "layout.microbatches=2",
    "train.steps=80",
    "train.batch_tokens=144",
    "train.remat=full",
    "train.eval_every=1",
    "train.checkpoint_every=1",
    "train.keep_checkpoints=1",
    "train.sample_tokens=3",
    "train.tensorboard=true",
    "train.loss_chunk_tokens=7",
    "optim.offload=true",
    "data.paths=elsewhere",
)


@pytest.mark.parametrize(("setting", "words"), CHANGED, ids=[setting for setting, _ in CHANGED])
def test_another_run_is_refused_with_both_values(setting, words):
    config = replace(CONFIG, model=replace(CONFIG.model, kv_heads=6))  # so that gpt is a model
    with pytest.raises(Refused) as refused:
        resume.require_same_run(Path("runs/one"), config, override(config, [setting]))
    assert words in str(refused.value)
    assert "runs/one" in str(refused.value)


def test_layout_steps_and_what_is_shown_may_change():
    resume.require_same_run(Path("runs/one"), CONFIG, override(CONFIG, FREE))


def test_other_text_is_refused_before_anything_is_changed(text, tmp_path, monkeypatch):
    config = replace(with_layout(CONFIG, "fsdp=2", steps=1), data=DataConfig(paths=(str(text),)))
    train(config, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "one more line\n")
    again = replace(with_layout(config, "fsdp=4", steps=2), data=DataConfig(paths=(str(other),)))
    with pytest.raises(Refused, match=r"data of the run.*fingerprint \w+ there and \w+ here.*tokens there and"):
        train(again, tmp_path / "run", resumed=True)
    moved = tmp_path / "moved.txt"
    moved.write_text(text.read_text())
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    facts, said = train(
        replace(config, data=DataConfig(paths=(str(moved),))), tmp_path / "run", resumed=True
    )  # the same text elsewhere
    assert "all 1 steps are done; raise train.steps" in said
    assert facts["finished"]


# ---- damage ----------------------------------------------------------------------------------------------


def state_of(run: Run, number: Callable[[tuple[int, ...]], np.ndarray]) -> Any:
    """A state with the numbers that `number` gives for a shape."""
    put = lambda kind, sharding: jax.device_put(number(kind.shape).astype(kind.dtype), sharding)  # noqa: E731
    return jax.tree.map(put, jax.eval_shape(run.initial_state), run.shardings())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Run]:
    """A directory with the checkpoints of steps 1, 2 and 3, in which every number of the state is the step."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    run = start(with_layout(CONFIG, "fsdp=2"))
    checkpoints = Checkpoints(directory, run)
    for step in (1, 2, 3):
        checkpoints.save(state_of(run, lambda shape, step=step: np.full(shape, step)), step)
    checkpoints.finish()
    return directory, run


@pytest.fixture
def three(saved, tmp_path) -> tuple[Path, Run]:
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints")), saved[1]


def restored(directory: Path, run: Run) -> tuple[int, list[str]]:
    said = []
    state = Checkpoints(directory, run, said.append).restore()
    values = {float(x.ravel()[0]) for x in jax.tree.leaves(state)}
    assert values == {int(state["step"])}
    return int(state["step"]), said


def largest(directory: Path) -> Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"), [(cut, "bytes"), (flip, "checksum"), (Path.unlink, "is missing")], ids=["cut", "flip", "lost"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_read(damage, words, three):
    directory, run = three
    assert restored(directory, run) == (3, [])
    damage(largest(directory / "3"))
    step, said = restored(directory, run)
    assert step == 2
    assert len(said) == 1
    assert said[0].startswith("checkpoint 3 is damaged")
    assert words in said[0]
    assert (directory / "damaged-3").is_dir()
    checkpoints = Checkpoints(directory, run)  # and step 3 can be done and saved again
    checkpoints.save(state_of(run, lambda shape: np.full(shape, 3)), 3)
    checkpoints.finish()
    assert restored(directory, run) == (3, [])


def test_orbax_own_files_damaged_too(three):
    directory, run = three
    (directory / "3" / "_CHECKPOINT_METADATA").write_text("{")
    assert restored(directory, run)[0] in (2, 3)


def test_only_damaged_checkpoints_are_refused_not_begun_anew(three):
    directory, run = three
    for step in (1, 2, 3):
        cut(largest(directory / str(step)))
    with pytest.raises(Refused, match="all checkpoints of this run are damaged: 1, 2, 3"):
        Checkpoints(directory, run).restore()


def test_an_unfinished_checkpoint_is_no_checkpoint(three):
    directory, run = three
    os.rename(directory / "3", directory / f"3{checkpoint.UNFINISHED}")
    assert restored(directory, run) == (2, [])
    assert not (directory / f"3{checkpoint.UNFINISHED}").exists()
    (directory / "3").mkdir()  # a directory that nothing was written into
    assert restored(directory, run)[0] == 2


def test_no_checkpoint_yet_is_none(tmp_path):
    assert Checkpoints(tmp_path / "checkpoints", start(with_layout(CONFIG, "fsdp=2"))).restore() is None
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.layers=3", r"opt/0/mu/layers/attention/\w+ as float64\[1,.*needs float64\[3,"),
        ("model.tied_embeddings=true", "has, and this model has not, the array .*head/tokens_DV"),
        ("optim.name=lion", "the array opt/"),
        ("optim.moment_dtype=float32", "float64.* needs float32"),
        ("model.vocab_size=264", "264"),
    ],
)
def test_a_state_of_another_kind_is_refused_by_the_leaf(setting, words, three):
    directory, _ = three
    other = start(with_layout(override(CONFIG, [setting]), "fsdp=2"))
    with pytest.raises(Refused, match=words):
        Checkpoints(directory, other).restore()


def test_a_checkpoint_that_cannot_be_written_is_said(three, monkeypatch):
    directory, run = three

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_manifest", full)
    checkpoints = Checkpoints(directory, run)
    with pytest.raises(Refused, match=r"checkpoint 4 could not be written: .*No space left on device"):
        checkpoints.save(state_of(run, np.zeros), 4)
        checkpoints.finish()
    assert restored(directory, run)[0] == 3


# ---- kills -----------------------------------------------------------------------------------------------

CHILD = """if True:
    import os, signal, sys, threading, time
    from pathlib import Path
    from meshwright import mesh
    mesh.emulate(4)
    from rich.console import Console
    from meshwright.config import load
    from meshwright.train import checkpoint, loop
    config, directory, step, delay_s = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    save = checkpoint.Checkpoints.save
    def killed(self, state, number):
        if number == step:
            self.wait()
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        save(self, state, number)
    checkpoint.Checkpoints.save = killed
    loop.train(load(config), directory, Console(quiet=True), (directory / "config.toml").exists())
"""


def killed_run(config: RunConfig, tmp_path: Path, step: int, delay_s: float) -> int:
    """Run (or resume) `config` in a process that kills itself `delay_s` after it begins to save `step`; its status."""
    (tmp_path / "given.toml").write_text(to_toml(config))
    words = [str(tmp_path / "given.toml"), str(tmp_path / "run"), str(step), str(delay_s)]
    return subprocess.run([sys.executable, "-c", CHILD, *words], timeout=120, stderr=subprocess.DEVNULL).returncode


@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_killed_at_any_moment_of_a_save_the_newest_complete_checkpoint_goes_on(kills, text, tmp_path):
    config = RunConfig(
        model=replace(CONFIG.model, layers=1),
        train=TrainConfig(steps=4 * kills, batch_sequences=4, sequence_length=12, eval_sequences=0, sample_tokens=0),
        data=DataConfig(paths=(str(text),)),
    )
    config = with_layout(config, "fsdp=4", checkpoint_every=1)
    rng = np.random.default_rng()
    for kill in range(kills):
        delay_s = float(rng.choice([0.0, 0.01, 0.03, 0.1, 0.2, 0.3]))
        assert killed_run(config, tmp_path, 4 * kill + 2, delay_s) == -signal.SIGKILL, delay_s
        step, damaged = checkpoint.newest_complete(tmp_path / "run" / "checkpoints")
        assert not damaged
        assert step >= 4 * kill + 1, delay_s
        numbers = [row["step"] for row in rows(tmp_path / "run")]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= step - 1  # metrics are written one step late
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        train(with_layout(config, "data=2"), tmp_path / "run", resumed=True)
        train(with_layout(config, "data=2"), tmp_path / "whole")
    expected, got = rows(tmp_path / "whole"), rows(tmp_path / "run")
    assert [row["step"] for row in got] == [row["step"] for row in expected]
    np.testing.assert_allclose([r["loss"] for r in got[:-1]], [r["loss"] for r in expected[:-1]], rtol=1e-4)


@pytest.mark.parametrize("preset", ["llama-demo", "gpt-tiny"])
def test_a_run_is_not_resumed_under_another_models_name(preset, tmp_path, capsys):
    (tmp_path / "config.toml").write_text(to_toml(presets.resolve("llama-tiny")))
    assert main(["train", preset, "--resume", "--run-directory", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"is not of {preset}" in message and "model." in message and "leave CONFIG out" in message
