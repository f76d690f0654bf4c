"""The command line: what is refused, how it is said, and that nothing is started or written by it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.cli import common, train, verify
from meshwright.cli.main import main
from meshwright.config import Refused, load, override, to_toml
from meshwright.presets import resolve

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.toml"))

BAD = [
    # a request, and words its message must have
    ([], "COMMAND"),
    (["trian"], "'train'"),
    (["train"], "CONFIG"),
    (["train", "lama-demo"], "'llama-demo'"),
    (["train", "mixtral-8x7b"], "experts"),
    (["train", "missing.toml"], "no configuration file 'missing.toml'"),
    (["train", "broken.toml"], "not valid TOML"),
    (["train", "binary.toml"], "cannot be read"),
    (["train", "typo.toml"], "model.laers"),
    (["train", "llama-demo", "--layot", "fsdp=2"], "--layot"),
    (["train", "llama-demo", "--lay", "fsdp=2"], "--lay"),
    (["train", "llama-demo", "--layout"], "--layout"),
    (["train", "llama-demo", "--layout", "auto"], "planner"),
    (["train", "llama-demo", "--layout", "tensor=3"], "tensor=3"),
    (["train", "llama-demo", "--layout", "tensro=2"], "'tensor'"),
    (["train", "llama-demo", "--layout", "fsdp"], "axis=degree"),
    (["train", "llama-demo", "--layout", "fsdp=2 fsdp=4"], "twice"),
    (["train", "llama-demo", "--layout", "fsdp=0"], "at least 1"),
    (["train", "llama-demo", "--layout", "pipe=8"], "pipe=8 x 1 chunk need at least 8 layers, but the model has 4"),
    (["train", "llama-demo", "--layout", "pipe=2 schedule=interleaved chunks=3"], "at least 6 layers"),
    (["train", "llama-demo", "--layout", "pipe=2 schedule=zb-v chunks=3"], "zb-v has 2 chunks per stage"),
    (["train", "llama-demo", "--layout", "pipe=2 chunks=2"], "1f1b has 1 chunk per stage, not layout.chunks=2"),
    (["train", "llama-demo", "--layout", "pipe=2 microbatches=5"], "microbatches=5"),
    (["train", "llama-demo", "--layout", "pipe=2 schedule=zbv"], "Did you mean 'zb-v'?"),
    (["train", "llama-demo", "--layout", "schedule=1f2b"], "Did you mean '1f1b'?"),
    (["train", "llama-demo", "--layout", "pipe=2 stash=stages"], "Did you mean 'stage'?"),
    (["train", "llama-demo", "--layout", "pipe=2 stage_layers=3,2"], "has 5 layers, but the model has 4"),
    (
        ["train", "llama-demo", "--layout", "pipe=2 stage_layers=1,2,1"],
        "names 3 parts; write one for each of the 2 stages",
    ),
    (["train", "llama-demo", "--layout", "pipe=2 stage_layers=4"], "names 1 part;"),
    (["show", "layout", "llama-demo", "--layout", "pipe=2 stage_layers=4,0"], "leaves stage 1 without a layer"),
    (
        ["train", "llama-demo", "--layout", "pipe=2 schedule=zb-v stage_layers=3,1"],
        "leaves stage 1 a chunk without a layer",
    ),
    (
        ["train", "llama-demo", "--layout", "pipe=2 schedule=zb-v stage_layers=2,0,1,1"],
        "each of its 2 chunks needs one",
    ),
    (["train", "residual-demo", "--layout", "pipe=2 split_vocabulary=true"], "needs a vocabulary"),
    (["train", "llama-demo", "--layout", "pipe=2", "--devices", "8"], "there are 8"),
    (["train", "llama-demo", "--layout", "pipe=2 microbatches=2 schedule=none.csv"], "no schedule file 'none.csv'"),
    (["train", "llama-demo", "--layout", "pipe=2 microbatches=2 schedule=short.csv"], "stage 1, B1: is never done"),
    (
        ["train", "llama-demo", "--layout", "pipe=2 microbatches=2 schedule=early.csv"],
        "line 4: tick 0, stage 1, F0: uses F0",
    ),
    (
        ["train", "llama-demo", "--layout", "pipe=2 microbatches=4 schedule=right.csv"],
        "layout.microbatches=2, but the layout has 4",
    ),
    (
        ["train", "llama-demo", "--layout", "pipe=4 microbatches=2 schedule=right.csv"],
        "layout.pipe=2, but the layout has 4",
    ),
    (
        ["train", "llama-demo", "--layout", "pipe=2 chunks=2 microbatches=2 schedule=right.csv"],
        "layout.chunks=1, but the layout",
    ),
    (["train", "llama-demo", "--layout", "fsdp=5"], "divide"),
    (["train", "llama-demo", "--layout", "data=64"], "batch"),
    (["train", "llama-demo", "--layout", "fsdp=2", "--devices", "8"], "there are 8"),
    (["train", "llama-demo", "--layout", "fsdp=16", "--devices", "8"], "needs fsdp=16"),
    (["train", "llama-demo", "--devices", "eight"], "'eight'"),
    (["train", "llama-demo", "--devices", "0"], "'0'"),
    (["train", "llama-demo", "--devices", "-1"], "devices"),
    (["train", "llama-demo", "--set", "optim.lr"], "no '='"),
    (["train", "llama-demo", "--set", "lr=1"], "no section"),
    (["train", "llama-demo", "--set", "optim.lrr=1"], "'lr'"),
    (["train", "llama-demo", "--set", "optm.lr=1"], "'optim'"),
    (["train", "llama-demo", "--set", "optim.lr=fast"], "a number"),
    (["train", "llama-demo", "--set", "optim.lr=nan"], "optim.lr"),
    (["train", "llama-demo", "--set", "optim.lr=inf"], "finite"),
    (["train", "llama-demo", "--set", "train.remat=ful"], "none, full, save:NAMES"),
    (["train", "llama-demo", "--set", "train.sequence_length=101", "--layout", "tensor=2"], "train.sequence_length"),
    (["train", "llama-demo", "--set", "model.kv_heads=3"], "kv_heads=3"),
    (["train", "llama-demo", "--data", ""], "--data"),
    (["train", "--resume"], "--run-directory"),
    (["train", "--resume", "--run-directory", "nowhere"], "no run to resume"),
    (["train", "llama-demo", "--resume"], "no run to resume"),
    (["train", "llama-demo", "--run-directory", "old"], "already holds a run"),
    (["train", "llama-demo", "--run-directory", "broken.toml/run"], "is a file"),
    (["train", "llama-demo", "extra"], "extra"),
    (["verify"], "CONFIG"),
    (["verify", "llama-tiny", "--layouts", ""], "--layouts"),
    (["verify", "llama-tiny", "--layouts", "random:x"], "random:N"),
    (
        ["verify", "llama-tiny", "--layouts", "pipelines", "--set", "model.layers=1"],
        "no pipeline fits 8 devices and 1 layers",
    ),
    (["verify", "llama-tiny", "--layouts", "fsdp=2; tensr=2"], "tensr"),
    (["verify", "llama-tiny", "--dtype", "float63"], "'float64'"),
    (["compile", "llama-tiny"], "--target"),
    (["compile", "llama-tiny", "--target", "tpu"], "KIND:SHAPE"),
    (["compile", "llama-tiny", "--target", "tpu-v5p:2x2x4", "--layout", "fsdp=8"], "there are 16"),
    (["show"], "THING"),
    (["show", "mseh"], "'mesh'"),
    (["show", "layout", "llama-demo", "--layout", "tensor=3"], "tensor=3"),
    (["show", "mesh", "--layout", "fsdp=2", "--devices", "8"], "8"),
    (["show", "mesh", "--layout", "data=10000000000"], "at most 65536"),
    (
        ["train", "llama-tiny", "--layout", "pipe=4 microbatches=40000"],
        "must be a multiple of one device x microbatches",
    ),
    (["train", "llama-tiny", "--layout", "pipe=4 chunks=9999 schedule=interleaved"], "need at least 39996 layers"),
    (["train", "llama-tiny", "--layout", "schedule=1g1b"], "Did you mean '1f1b'?"),
    (["train", "llama-tiny", "--set", "model.layers=1000000000"], "at most 10000"),
    (["train", "llama-tiny", "--set", "model.vocab_size=1000000000000"], "at most"),
    (["train", "llama-tiny", "--set", "train.batch_sequences=1000000000"], "at most"),
    (["train", "llama-tiny", "--run-directory", ""], "name a directory"),
    (["train", "llama-tiny", "--run-directory", "a" * 300], "name another with --run-directory"),
    (["train", "llama-tiny", "--wait", "-4"], "above 0"),
    (["train", "llama-tiny", "--layout", "pipe=4 microbatches=4", "--devices", "8"], "'pipe=4 data=2 microbatches=4'"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Every bad request, answered in one fresh process: answers, what heavy was imported, files before and after."""
    directory = tmp_path_factory.mktemp("bad")
    (directory / "broken.toml").write_text("[model\nlayers = 4")
    (directory / "binary.toml").write_bytes(b"\x00\xff\xfe")
    (directory / "typo.toml").write_text("[model]\nlaers = 4")
    (directory / "old").mkdir()
    (directory / "old" / "config.toml").write_text(to_toml(resolve("llama-demo")))
    operations = ("0,0,F,0", "1,0,F,1", "1,1,F,0", "2,1,F,1", "2,1,B,0", "3,0,B,0", "3,1,B,1", "4,0,B,1")
    schedule = ["tick,stage,op,microbatch", *operations]
    (directory / "right.csv").write_text("\n".join(schedule))
    (directory / "short.csv").write_text("\n".join(line for line in schedule if line != "3,1,B,1"))
    (directory / "early.csv").write_text("\n".join(schedule).replace("1,1,F,0", "0,1,F,0"))
    before = sorted(directory.rglob("*"))
    program = """if True:
        import contextlib, io, json, sys
        from meshwright.cli.main import main
        answers = []
        for arguments in json.load(sys.stdin):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main(arguments)
            answers.append((status, out.getvalue(), err.getvalue()))
        heavy = sorted({"jax", "jaxlib", "grain", "orbax", "tokenizers", "plotly", "pyarrow"} & set(sys.modules))
        json.dump([answers, heavy], sys.stdout)
    """
    requests = json.dumps([arguments for arguments, _ in BAD])
    done = subprocess.run(
        [sys.executable, "-c", program], input=requests, text=True, capture_output=True, cwd=directory, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answered, heavy = json.loads(done.stdout)
    return answered, heavy, before, sorted(directory.rglob("*"))


@pytest.mark.parametrize("number", range(len(BAD)), ids=[" ".join(arguments) or "nothing" for arguments, _ in BAD])
def test_bad_requests_get_one_short_message(answers, number):
    status, out, err = answers[0][number]
    assert status == 2, err
    assert out == ""
    assert err.startswith("meshwright: ")
    assert len(err.splitlines()) <= 4, err
    assert len(err) < 800, err
    assert "Traceback" not in err
    assert BAD[number][1] in err


def test_bad_requests_start_and_write_nothing(answers):
    _, heavy, before, after = answers
    assert heavy == []
    assert after == before


def test_help_is_quick_and_imports_nothing_heavy():
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "--help"], capture_output=True, text=True, timeout=30
    )
    elapsed_s = time.perf_counter() - start_s
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("train", "verify", "compile", "show"))
    assert elapsed_s < 5  # 0.1 s alone on one core; the bound leaves room for a busy machine


@pytest.mark.parametrize("command", ["train", "verify", "compile", "show"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out or command == "show"


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("meshwright ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "mesh", "llama-demo", "--layout", "data=2 fsdp=2 tensor=2"],
        ["show", "mesh", "--layout", "fsdp=512"],
        ["show", "layout", "llama-demo", "--layout", "fsdp=4 tensor=2", "--devices", "8"],
        ["show", "layout", "gpt-tiny", "--layout", "fsdp=2 zero=1"],
        ["show", "config", "llama-demo", "--set", "optim.lr=1e-3"],
        ["show", "presets"],
        ["verify", "llama-tiny", "--layouts", "tensor=3; fsdp=3"],
    ],
)
def test_json_is_one_document_and_text_is_text(arguments, capsys):
    status = main(arguments)
    text = capsys.readouterr()
    assert main([*arguments, "--json"]) == status
    document = capsys.readouterr()
    json.loads(document.out)
    assert text.out.strip() and document.err == text.err == ""
    with pytest.raises(json.JSONDecodeError):
        json.loads(text.out)


def test_config_shown_is_the_config_that_runs(capsys, tmp_path):
    assert (
        main(["show", "config", "llama-demo", "--layout", "fsdp=8", "--set", "optim.lr=1e-3", "--data", "a/*.txt"]) == 0
    )
    path = tmp_path / "config.toml"
    path.write_text(capsys.readouterr().out)
    config = load(path)
    assert (config.optim.lr, config.data.paths, config.layout.fsdp) == (1e-3, ("a/*.txt",), 8)
    assert config.model == resolve("llama-demo").model


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_read_and_written_back(path, tmp_path, capsys):
    config = load(path)
    copy = tmp_path / "copy.toml"
    copy.write_text(to_toml(config))
    assert load(copy) == config
    assert main(["show", "layout", str(path)]) == 0
    assert capsys.readouterr().err == ""


def test_verify_status():
    assert verify.exit_status({"equal": 3, "differs": 0, "refused": 1}) == 0
    assert verify.exit_status({"equal": 3, "differs": 1, "refused": 0}) == 1
    assert verify.exit_status({"equal": 0, "differs": 0, "refused": 2}) == 2


def test_refused_layouts_are_results_with_a_reason(capsys):
    assert main(["verify", "llama-tiny", "--layouts", "tensor=3; fsdp=3", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["counts"] == {"equal": 0, "differs": 0, "refused": 2}
    assert [r["layout"] for r in document["results"]] == ["tensor=3", "fsdp=3"]
    assert all(r["verdict"] == "refused" and r["reason"] for r in document["results"])


def test_layouts_are_chosen_as_asked():
    config = resolve("llama-tiny")
    everything, refused = verify.choose_layouts(config, "all", 4)
    assert not refused and len(set(everything)) == len(everything) > 60
    assert {layout.device_count for layout in everything if layout.pipe == 1} == {1, 2, 4}
    pipelines, _ = verify.choose_layouts(config, "pipelines", 4)
    assert pipelines == [layout for layout in everything if layout.pipe > 1] != []
    with pytest.raises(Refused, match="no pipeline fits 8 devices and 1 layers"):
        verify.choose_layouts(override(config, ["model.layers=1"]), "pipelines", 8)
    some, _ = verify.choose_layouts(config, "random:5", 4)
    assert len(set(some)) == 5 and set(some) <= set(everything)
    assert some == verify.choose_layouts(config, "random:5", 4)[0]
    named, refused = verify.choose_layouts(config, "fsdp=2 tensor=2;; data=8", 4)
    assert [str(layout) for layout in named] == ["fsdp=2 tensor=2"]
    assert "--devices is 4" in refused[0]["reason"]


def test_a_new_run_gets_an_unused_directory(tmp_path):
    assert train.unused(tmp_path, "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert train.unused(tmp_path, "demo") == tmp_path / "demo-2"
    (tmp_path / "demo-2").mkdir()
    assert train.unused(tmp_path, "demo") == tmp_path / "demo-3"
    assert train.latest(tmp_path, "demo") == tmp_path / "demo-2"
    assert train.latest(tmp_path, "other") == tmp_path / "other"


def test_the_host_says_what_it_has(monkeypatch):
    """On a host told to use its CPU there are no accelerators, whatever is plugged in."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert common.accelerator_count() == 0


def test_interrupt_ends_cleanly(tmp_path):
    program = """if True:
        import sys, time
        from meshwright.cli import main as cli
        def slow(args):
            print("started", flush=True)
            time.sleep(60)
        cli.show.run = slow
        sys.exit(cli.main(["show", "presets"]))
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "started\n"
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err == "\nmeshwright: interrupted\n"


def test_a_reader_that_leaves_is_no_fault():
    command = f"{sys.executable} -m meshwright.cli.main show layout llama3-70b --json | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("{\n", "")
