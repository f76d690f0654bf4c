"""The loop: one held-out loss on any number of devices, metrics a step late, one compilation, strict records."""

import io
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from meshwright import mesh
from meshwright.cli.main import main
from meshwright.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig, override, parse_layout
from meshwright.layout import check, letters_of
from meshwright.model import params as parameters
from meshwright.presets import resolve
from meshwright.train import loop, programs
from meshwright.train.data import prepare
from meshwright.train.state import Run
from meshwright.train.step import eval_step
from meshwright.verify import oracle, parity

CONFIG = RunConfig(
    model=ModelConfig(layers=1, d_model=16, d_ff=32, heads=4, kv_heads=2, head_size=4, vocab_size=263),
    optim=OptimConfig(lr=1e-2),
    train=TrainConfig(steps=4, batch_sequences=8, sequence_length=12, eval_sequences=21, sample_tokens=2),
)
WIDE = [f"train.{name}_dtype=float64" for name in ("param", "compute", "reduce", "logits")]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    rng, words = np.random.default_rng(0), ["one", "two", "three", "four", "five", "six", "seven"]
    rows = [{"text": " ".join(rng.choice(words, int(rng.integers(2, 30))))} for _ in range(600)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def with_layout(config: RunConfig, layout: str) -> RunConfig:
    return replace(config, layout=parse_layout(layout))


def train(config: RunConfig, directory: Path) -> tuple[dict, str]:
    console = Console(record=True, width=200, file=io.StringIO())
    facts = loop.train(config, directory, console)
    return facts, console.export_text()


def rows(directory: Path) -> list[dict]:
    return [strict(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def strict(text: str):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# ---- evaluation --------------------------------------------------------------------------------------------


def test_21_held_out_examples_are_one_loss_on_1_2_4_and_8_devices(text):
    config = override(replace(CONFIG, data=DataConfig(paths=(text,), held_out_share=0.2, packing=False)), WIDE)
    data, losses, rng = prepare(config), {}, np.random.default_rng(0)
    size = lambda path: tuple(config.model.sizes[letter] for letter in letters_of(path))  # noqa: E731
    params = jax.tree.map(lambda path: rng.standard_normal(size(path)) / 4, parameters.names(config.model))
    for layout in ("data=1", "tensor=2", "data=2 fsdp=2", "data=2 fsdp=2 tensor=2", "fsdp=8"):
        one = with_layout(config, layout)
        run = Run.of(one, check(one), mesh.make(check(one)))
        program = jax.jit(eval_step(run), compiler_options={"xla_backend_optimization_level": 0})
        losses[layout] = programs.held_out_loss(run, data, program, parity.put_params(run, params))
    batches = list(data.eval_batches(8))
    masks = [batch["mask_BT"].sum(1) for batch in batches]
    assert sum((mask > 0).sum() for mask in masks) == 21
    assert (masks[-1][5:] == 0).all(), "the last batch is filled up"
    assert len({tuple(mask) for mask in masks}) == 3, "the batches weigh differently"
    params = jax.tree.map(jnp.asarray, params)
    sums = [oracle.loss_sum_and_count(config.model, config.train, params, batch) for batch in batches]
    expected = sum(float(total) for total, _ in sums) / sum(int(count) for _, count in sums)
    np.testing.assert_allclose(list(losses.values()), expected, rtol=1e-12)


def test_nothing_held_out_is_no_loss_but_a_run(text, tmp_path, as_users_run):
    config = replace(with_layout(CONFIG, "fsdp=2"), data=DataConfig(paths=(text,), held_out_share=0.0))
    config = override(config, ["train.steps=1", "train.eval_every=1", "train.tensorboard=true"])
    facts, said = train(config, tmp_path / "run")
    assert facts["eval_loss"] is None
    assert facts["eval_loss_before"] is None
    assert "held-out loss" not in said
    assert [sample["when"] for sample in facts["samples"]] == ["before", "after"]
    assert rows(tmp_path / "run")[-1] == {"step": 1, "eval_loss": None}
    assert list((tmp_path / "run" / "tensorboard").iterdir())


# ---- the loop ----------------------------------------------------------------------------------------------


def test_metrics_are_read_when_the_next_step_has_been_called():
    happened = []

    class Metric:
        def __init__(self, number: int):
            self.number = number

        def __float__(self) -> float:
            happened.append(f"read {self.number}")
            return float(self.number)

    late = loop.Late(lambda number, metrics, seconds: happened.append(f"row {number} {metrics['loss']} {seconds > 0}"))
    for number in (1, 2, 3):
        late.begin()
        happened.append(f"call {number}")
        late.push(number, {"loss": Metric(number)})
    late.flush()
    late.flush()
    assert happened == [
        "call 1",
        "call 2",
        "read 1",
        "row 1 1.0 True",
        "call 3",
        "read 2",
        "row 2 2.0 True",
        "read 3",
        "row 3 3.0 True",
    ]


def test_a_steps_time_has_no_part_of_what_comes_between_steps():
    seconds = []
    late = loop.Late(lambda number, metrics, s: seconds.append(s))
    for number in (1, 2):
        late.begin()
        time.sleep(0.01)
        late.push(number, {})
        late.flush()
        time.sleep(0.2)  # an evaluation
    assert all(0.01 <= s < 0.1 for s in seconds)


def test_nothing_is_compiled_after_the_first_step(text, tmp_path, monkeypatch, as_users_run):
    compiled, step_of = [], {"now": 0}

    def listen(event: str, seconds: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(step_of["now"])

    push = loop.Late.push
    monkeypatch.setattr(loop.Late, "push", lambda self, n, m: (step_of.update(now=n), push(self, n, m))[1])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        config = replace(with_layout(CONFIG, "data=2 fsdp=2"), data=DataConfig(paths=(text,)))
        config = override(config, ["train.eval_every=2", "train.checkpoint_every=2", "train.steps=6"])
        facts, _ = train(config, tmp_path / "run")
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert facts["finished"]
    assert len(compiled) >= 4, "the listener hears nothing"
    assert [step for step in compiled if step > 1] == []


@pytest.mark.parametrize("name", ["ffn-demo", "residual-demo"])
def test_regressions_go_through_the_same_loop(name, tmp_path, as_users_run):
    losses = {}
    for layout in ("data=1", "data=2 fsdp=2 tensor=2"):
        config = override(with_layout(resolve(name), layout), ["train.steps=60", "optim.lr=0.003"])
        facts, said = train(config, tmp_path / layout)
        losses[layout] = [row["loss"] for row in rows(tmp_path / layout) if "loss" in row]
        assert facts["eval_loss"] < facts["eval_loss_before"]
        assert "16 examples a step" in said
        assert "examples/s" in said
        assert "squared error before training" in said
        assert "nats" not in said
        assert "token" not in said
        assert facts["samples"] == []
    np.testing.assert_allclose(losses["data=1"], losses["data=2 fsdp=2 tensor=2"], rtol=1e-3)


def test_what_is_not_finite_is_null_in_strict_json(tmp_path, as_users_run):
    config = override(with_layout(resolve("residual-demo"), "fsdp=2"), ["train.steps=8", "optim.lr=1e4"])
    facts, said = train(config, tmp_path / "run")
    skipped = [row for row in rows(tmp_path / "run") if row.get("skipped")]
    assert skipped
    assert all(row["loss"] is None or row["grad_norm"] is None for row in skipped)
    assert f"{len(skipped)} steps were skipped" in said
    strict((tmp_path / "run" / "run.json").read_text())
    assert facts["finished"]


def test_the_first_rows_time_has_no_compilation_in_it(tmp_path, as_users_run):
    config = override(with_layout(resolve("ffn-demo"), "data=2"), ["train.steps=3"])
    train(config, tmp_path / "run")
    assert rows(tmp_path / "run")[0]["step_s"] < 1


# ---- refusals ----------------------------------------------------------------------------------------------

BAD_DATA = [
    (["--data", "missing.txt"], "missing.txt"),
    (["--data", "no/*.txt"], "matches nothing"),
    (["--data", "empty.txt"], "is empty"),
    (["--data", "picture.png"], "a format that is not read"),
    (["--set", "data.tokenizer=missing.json"], "data.tokenizer='missing.json': there is no such file"),
]
BAD_CONTENT = [
    (["--data", "binary.txt"], "binary"),
    (["--data", "short.txt"], "shorter than one sequence"),
    (["--data", "short.txt", "--set", "data.tokenizer=broken.json"], "broken.json' is not a valid tokenizer.json"),
    (["--data", "long.txt", "--set", "train.sample_prompt=" + "many words " * 200], "train.sample_prompt"),
]


@pytest.fixture
def bad_files(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    contents = {"empty.txt": b"", "picture.png": b"png", "binary.txt": b"ab\0cd" * 99, "short.txt": b"few words"}
    for name, content in (contents | {"broken.json": b"{", "long.txt": b"some words and more\n" * 999}).items():
        Path(name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(("arguments", "words"), BAD_DATA + BAD_CONTENT)
def test_bad_data_is_refused_and_nothing_is_written(arguments, words, bad_files, capsys, as_users_run):
    before = sorted(bad_files.rglob("*"))
    assert main(["train", "llama-tiny", "--layout", "fsdp=8", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err) < 800
    assert sorted(bad_files.rglob("*")) == before


def test_missing_data_is_refused_before_jax_is_imported(bad_files):
    program = """if True:
        import json, sys
        from meshwright.cli.main import main
        statuses = [main(["train", "llama-tiny", *arguments]) for arguments in json.loads(sys.argv[1])]
        assert statuses == [2] * len(statuses), statuses
        assert "jax" not in sys.modules
    """
    words = json.dumps([arguments for arguments, _ in BAD_DATA])
    done = subprocess.run([sys.executable, "-c", program, words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- many runs ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_thirty_runs_on_eight_emulated_devices_none_hangs(tmp_path):
    """Starved collectives (benchmarks/rendezvous.py) end a process after 40 s; here each run is its own process."""
    command = [sys.executable, "-m", "meshwright.cli.main", "train", "llama-tiny", "--set", "train.steps=20", "--json"]
    for number, layout in zip(range(30), 10 * ["data=2 fsdp=2 tensor=2", "fsdp=8", "tensor=8"], strict=True):
        directory = ["--layout", layout, "--run-directory", str(tmp_path / str(number))]
        done = subprocess.run([*command, *directory], capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout)["finished"]
