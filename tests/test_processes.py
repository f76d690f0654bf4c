"""Several processes: the same answer as one, and no waiting for one that is missing, different, dead or silent."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from meshwright import mesh, processes
from meshwright.cli.main import main
from meshwright.config import DataConfig, ModelConfig, Refused, RunConfig, TrainConfig, parse_layout, to_toml
from meshwright.layout import check
from meshwright.processes import Place
from meshwright.train import loop
from meshwright.train.checkpoint import Checkpoints, newest_complete
from meshwright.train.state import Run

CONFIG = RunConfig(
    model=ModelConfig(layers=1, d_model=16, d_ff=32, heads=4, kv_heads=2, head_size=4, vocab_size=263),
    train=TrainConfig(
        steps=4,
        batch_sequences=16,
        sequence_length=12,
        param_dtype="float64",
        compute_dtype="float64",
        reduce_dtype="float64",
        logits_dtype="float64",
        eval_sequences=21,
        sample_tokens=2,
        checkpoint_every=2,
    ),
)
LAYOUTS = ("data=2 fsdp=2 tensor=2", "fsdp=8")
WAIT_S = 150


def place(port: int, index: int, count: int = 2) -> Place:
    return Place(f"127.0.0.1:{port}", count, index)


@pytest.fixture
def port() -> int:
    return processes.free_port("127.0.0.1")


def meet(port: int, asked: list[dict], come_s: float = 10.0) -> list:
    """What becomes of processes (here: threads) that ask for `asked`: each its crew or the text of its refusal."""
    answers: list = [None] * len(asked)

    def come(index: int) -> None:
        try:
            answers[index] = processes.join(
                place(port, index, len(asked)), asked[index], {"directory": f"of {index}"}, come_s
            )
        except Refused as refusal:
            answers[index] = str(refusal)

    threads = [threading.Thread(target=come, args=(index,)) for index in reversed(range(len(asked)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return answers


def test_all_come_are_told_the_same_and_agree(port):
    crews = meet(port, [{"model.layers": "4"}] * 3)
    assert [crew.told for crew in crews] == [{"directory": "of 0"}] * 3
    with contextlib.ExitStack() as stack:
        for crew in crews:
            stack.callback(crew.leave)
        for values, verdicts in (
            (["a", "a", "a"], [""] * 3),
            (["a", "a", "b"], ["process 2 has text b, process 0 has a"] * 3),
        ):
            said = [""] * 3

            def ask(index: int, said=said, values=values) -> None:
                try:
                    crews[index].agree("text", values[index])
                except Refused as refusal:
                    said[index] = str(refusal)

            threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert said == verdicts


def test_one_that_asks_for_something_else_is_refused_on_all(port):
    zero, one = meet(port, [{"optim.lr": "0.1", "seed": "0"}, {"optim.lr": "0.2", "seed": "0"}])
    assert zero == one
    assert "process 1 was asked for optim.lr=0.2, process 0 for optim.lr=0.1" in zero


def test_one_that_does_not_come_is_named_in_time(port):
    answers: list = []

    def come(index: int) -> None:
        try:
            processes.join(place(port, index, 4), {}, {}, come_s=1)
        except Refused as refusal:
            answers.append(str(refusal))

    start = time.monotonic()
    threads = [threading.Thread(target=come, args=(index,)) for index in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert time.monotonic() - start < 5
    assert len(answers) == 2
    for answer in answers:
        assert f"processes 1, 3 of 4 did not come to 127.0.0.1:{port} within 1 s" in answer


def test_process_0_that_is_not_there_is_named_in_time(port):
    start = time.monotonic()
    with pytest.raises(Refused, match=rf"process 0 was not found at 127\.0\.0\.1:{port} within 1 s"):
        processes.join(place(port, 1), {}, {}, come_s=1)
    assert time.monotonic() - start < 3


def test_two_of_the_same_number_are_refused(port):
    answers: list = []

    def come(index: int) -> None:
        try:
            processes.join(place(port, index, 3), {}, {}, come_s=5)
        except Refused as refusal:
            answers.append(str(refusal))

    threads = [threading.Thread(target=come, args=(index,)) for index in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == ["two processes call themselves --process-id 1"] * 3


def test_a_port_that_is_taken_is_said(port):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(Refused, match=f"process 0 cannot listen at --coordinator 127.0.0.1:{port}.*name a free port"),
    ):
        processes.join(place(port, 0), {}, {}, come_s=1)


def test_strangers_at_the_port_are_passed_over(port):
    thread = threading.Thread(target=lambda: answers.extend(meet(port, [{}, {}])))
    answers: list = []
    thread.start()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b'["process"]\n'):
        for _ in range(50):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                stranger.sendall(words)
                break
            time.sleep(0.02)
    thread.join(WAIT_S)
    for crew in answers:
        assert crew.told == {"directory": "of 0"}
        crew.leave()


@pytest.mark.parametrize(
    ("coordinator", "count", "index", "words"),
    [
        ("localhost", 2, 0, "HOST:PORT"),
        ("localhost:99999", 2, 0, "HOST:PORT"),
        (":7000", 2, 0, "HOST:PORT"),
        ("localhost:7000", 0, 0, "--processes 0"),
        ("localhost:7000", 2, 2, "--process-id 2 must be from 0 to 1"),
        ("localhost:7000", 2, -1, "--process-id -1"),
    ],
)
def test_a_wrong_place_is_refused(coordinator, count, index, words):
    with pytest.raises(Refused, match=words):
        Place(coordinator, count, index)


# ---- real processes ----------------------------------------------------------------------------------------

CHILD = """if True:
    import json, sys, time
    from pathlib import Path
    from dataclasses import replace
    from rich.console import Console
    from meshwright import mesh, processes
    from meshwright.config import load, parse_layout
    given = json.loads(sys.argv[1])
    place = processes.Place(given["coordinator"], 2, given["index"])
    told = {} if place.index else {"runtime": f"127.0.0.1:{processes.free_port('127.0.0.1')}"}
    crew = processes.join(place, {}, told, 60, given["silent_s"])
    mesh.emulate(4)
    mesh.join_processes(crew.told["runtime"], 2, place.index)
    import jax
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    from meshwright.train import data, loop
    seen, batch = {}, data.TextData.batch
    def counted(self, step, rows=None):
        made = batch(self, step, rows)
        seen.setdefault(step, []).append(sorted(made["sample_B"].tolist()))
        return made
    data.TextData.batch = counted
    console = Console(quiet=place.index > 0)
    try:
        for layout in given["layouts"]:
            seen.clear()
            config = load(given["config"])
            config = replace(config, layout=parse_layout(layout))
            directory = Path(given["directory"], layout.replace(" ", "-"))
            loop.train(config, directory, console, False, crew.agree)
            Path(given["directory"], f"rows-{place.index}-{layout.replace(' ', '-')}").write_text(json.dumps(seen))
    except BaseException as error:
        crew.abandon(repr(error), 1)
    crew.leave()
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng, words = np.random.default_rng(0), ["one", "two", "three", "four", "five", "six", "seven"]
    path.write_text("\n".join(" ".join(rng.choice(words, 9)) for _ in range(300)))
    return replace(CONFIG, data=DataConfig(paths=(str(path),)))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def start_both(
    config: RunConfig, directory: Path, port: int, layouts: tuple[str, ...], silent_s: float = 60
) -> list[subprocess.Popen]:
    (directory / "given.toml").write_text(to_toml(config))
    given = {
        "coordinator": f"127.0.0.1:{port}",
        "layouts": layouts,
        "config": str(directory / "given.toml"),
        "directory": str(directory),
        "silent_s": silent_s,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(given | {"index": index})], **pipes)
        for index in (0, 1)
    ]


@contextlib.contextmanager
def ended(children: list[subprocess.Popen]):
    """Whatever a test does, its processes are gone afterwards."""
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.communicate()


@pytest.fixture(scope="module")
def both(config, tmp_path_factory) -> Path:
    """The runs of two processes of four devices, on each layout."""
    directory = tmp_path_factory.mktemp("both")
    children = start_both(config, directory, processes.free_port("127.0.0.1"), LAYOUTS)
    with ended(children):
        outputs = [child.communicate(timeout=2 * WAIT_S) for child in children]
        assert [child.returncode for child in children] == [0, 0], outputs
    assert outputs[1] == ("", ""), "only process 0 prints"
    assert "held-out loss after training" in outputs[0][0]
    assert "Gloo" not in outputs[0][0]
    return directory


def losses(run_directory: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("eval_loss")) for row in rows]


def test_two_processes_compute_what_one_does(both, config, tmp_path):
    one = replace(config, layout=parse_layout(LAYOUTS[0]))
    facts = loop.train(one, tmp_path / "one", Console(file=io.StringIO()))
    for layout in LAYOUTS:
        run_directory = both / layout.replace(" ", "-")
        np.testing.assert_allclose(losses(run_directory), losses(tmp_path / "one"), rtol=1e-9)
        recorded = json.loads((run_directory / "run.json").read_text())
        assert recorded["processes"] == 2
        assert recorded["devices"] == 8
        assert recorded["samples"] == facts["samples"]
        np.testing.assert_allclose(recorded["eval_loss_before"], facts["eval_loss_before"], rtol=1e-9)


def test_each_process_loads_only_the_rows_of_its_devices(both):
    for layout in LAYOUTS:
        seen = [json.loads((both / f"rows-{index}-{layout.replace(' ', '-')}").read_text()) for index in (0, 1)]
        for step in ("1", "3"):
            (mine,), (other,) = (one[step] for one in seen)
            assert len(mine) == len(other) == 8
            assert sorted(mine + other) == list(range(16)), layout


def test_one_process_reads_the_checkpoint_of_two(both, config):
    states = []
    for layout, here in zip(LAYOUTS, ("fsdp=4", "tensor=2"), strict=True):
        one = replace(config, layout=parse_layout(here))
        run = Run.of(one, check(one), mesh.make(check(one)))
        checkpoints = Checkpoints(both / layout.replace(" ", "-") / "checkpoints", run)
        state = checkpoints.restore()
        assert int(state["step"]) == 4
        states.append([np.asarray(leaf) for leaf in jax.tree.leaves(state["params"]["layers"])])
    for other in states[1:]:
        for a, b in zip(states[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("victim", "blow", "words"),
    [
        (1, signal.SIGKILL, "process 1 has died; process 0 of 2 stops"),
        (0, signal.SIGKILL, "process 0 has died; process 1 of 2 stops"),
        pytest.param(1, signal.SIGSTOP, "process 1 has not been heard for 3 s", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGINT, "process 0 stopped: KeyboardInterrupt", marks=pytest.mark.slow),
    ],
)
def test_one_that_dies_is_named_and_nobody_waits(victim, blow, words, config, tmp_path, port):
    long = replace(config, train=replace(config.train, steps=100_000, eval_sequences=0, sample_tokens=0))
    children = start_both(long, tmp_path, port, ("fsdp=8",), silent_s=60 if blow == signal.SIGKILL else 3)
    metrics = tmp_path / "fsdp=8" / "metrics.jsonl"
    with ended(children):
        end = time.monotonic() + WAIT_S
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
            assert time.monotonic() < end
            assert all(child.poll() is None for child in children), [child.communicate() for child in children]
            time.sleep(0.05)
        os.kill(children[victim].pid, blow)
        start = time.monotonic()
        _, err = children[1 - victim].communicate(timeout=30)
        assert words in err
        assert children[1 - victim].returncode == 1
        assert time.monotonic() - start < 20
    step, damaged = newest_complete(tmp_path / "fsdp=8" / "checkpoints")
    assert step >= 2
    assert not damaged


# ---- the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "2"], "--coordinator and --process-id missing"),
        (
            ["--coordinator", "h:1", "--processes", "3", "--process-id", "0"],
            "8 devices, which 3 processes cannot share",
        ),
        (
            ["--layout", "tensor=8", "--coordinator", "h:1", "--processes", "2", "--process-id", "0"],
            "tensor stays inside one group",
        ),
        (["--coordinator", "h", "--processes", "2", "--process-id", "0"], "HOST:PORT"),
    ],
)
def test_the_command_refuses_before_it_waits(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "llama-tiny", "--layout", "fsdp=8", "--devices", "8", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_names_who_does_not_come(tmp_path, port, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    several = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--wait", "0.5"]
    for index, words in (("0", "process 1 of 2 did not come"), ("1", "process 0 was not found")):
        assert main(["train", "ffn-demo", "--layout", "fsdp=2", *several, "--process-id", index]) == 2
        assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_runs_on_two_processes(tmp_path, port):
    common = ["train", "residual-demo", "--layout", "fsdp=2", "--devices", "2", "--set", "train.steps=2", "--json"]
    several = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2"]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "meshwright.cli.main", *common, *several, "--process-id", index],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for index in "10"
    ]
    with ended(children):
        (other_out, _), (out, err) = (child.communicate(timeout=WAIT_S) for child in children)
        assert [child.returncode for child in children] == [0, 0], err
    assert other_out == ""
    facts = json.loads(out)
    assert facts["finished"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["residual-demo"]
