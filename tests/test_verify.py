"""The verifier: it finds every planted fault and names the place; it measures as stated; its sizes are faithful."""

import functools
import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from meshwright import mesh
from meshwright.cli.main import main
from meshwright.config import ModelConfig, Refused, RunConfig, TrainConfig, parse_layout
from meshwright.layout import check
from meshwright.legal import legal_layouts
from meshwright.presets import resolve
from meshwright.train.state import Run
from meshwright.verify import faults, parity, pipelines, run
from meshwright.verify.bisect import Bisector
from meshwright.verify.parity import Verifier, leaf_errors
from meshwright.verify.sizes import reduced, sizes_text

FAMILIES = {
    "llama": ModelConfig(layers=2, d_model=24, d_ff=48, heads=8, kv_heads=2, head_size=4, vocab_size=101),
    "gpt": ModelConfig(
        family="gpt", layers=2, d_model=24, d_ff=48, heads=6, kv_heads=6, head_size=4, vocab_size=101, positions=32
    ),
}
TRAIN = TrainConfig(batch_sequences=8, sequence_length=24)
SHORT = {  # of the faults of pipelines, whose search takes longer
    "microbatches-exchanged",
    "stale-stash-slot",
    "weights-gradient-lost",
}
LONG = {
    fault.name for fault in faults.FAULTS.values() if fault.kind == "pipeline"
} - SHORT | {  # a part of them is enough for every change; all are found by `pytest -m slow`
    "missing-scatter-sum",
    "gradient-shards-shifted",
    "gradient-sum-bfloat16",
    "last-microbatch-dropped",
    "norm-counts-copies",
    "norm-weight-summed-twice",
    "positions-of-the-first-shard",
    "dropout-shards-equal",
    "same-data-on-every-device",
    "zero3-gradient-averaged",
    "gather-out-of-order",
    "mean-of-device-means",
    "rope-by-local-position",
}


@functools.cache
def bisector(config: RunConfig) -> Bisector:
    return Bisector(Verifier(config, "float64"))


def config_for(fault: faults.Fault) -> RunConfig:
    return faults.configured(fault, RunConfig(FAMILIES[fault.families[-1]], train=TRAIN))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow, pytest.mark.ci] if n in LONG else []) for n in faults.FAULTS]
)
def test_every_planted_fault_is_found_and_named(name):
    fault = faults.named(name)
    find = bisector(config_for(fault))
    layout = parse_layout(fault.layout)
    if layout.pipe == 1:
        find.one_device(find.verifier.oracle.batch(layout))
    with faults.planted(name):
        result = find.verifier(layout)
        assert result.verdict == "differs"
        place = find(layout, result)
    assert (place.kind, place.at[: len(fault.at)]) == (fault.kind, fault.at), place.sentence
    if place.kind in ("forward", "backward", "gradient"):
        assert place.at in place.sentence


def test_a_fault_that_is_not_the_pipeline_s_is_found_without_it():
    """The same fault, on the same layout, with a pipeline on top: the search takes it away first."""
    find = bisector(config_for(faults.named("missing-tensor-sum")))
    layout = parse_layout("pipe=2 tensor=2 sequence_parallel=false microbatches=2")
    find.one_device(find.verifier.oracle.batch(layout))
    with faults.planted("missing-tensor-sum"):
        place = find(layout, find.verifier(layout))
    assert (place.kind, place.at) == ("forward", "layers/0/attention_out")
    alone = "tensor=2 sequence_parallel=false microbatches=2"
    assert place.sentence.startswith(f"without the pipeline ({alone}) it differs too: forward first differs")


def test_where_nothing_differs_what_stages_make_is_one_device_s():
    """Uneven interleaved chunks of microbatches that are spread over data, tokens over tensor: each in its place."""
    config = RunConfig(replace(FAMILIES["llama"], layers=5, dropout_residual=0.2), train=TRAIN)
    verifier = Verifier(config, "float64")
    layout = parse_layout("pipe=2 data=2 tensor=2 microbatches=4 schedule=interleaved stage_layers=3,2")
    search = pipelines._Search(verifier.dropout_case, layout, verifier.oracle.batch(layout), verifier.limit, True)
    with jax.enable_x64(True):
        schedule, made = pipelines.stage_results(search.run, search.case.params, search.batch)
        states, slopes = pipelines.streams(search.case, search.batch)
        errors = [search._errors(schedule, kind, made[kind], right) for kind, right in (("F", states), ("B", slopes))]
    assert [len(own) for own in errors] == [16, 16]
    assert max(max(own.values()) for own in errors) < 1e-12
    assert min(np.abs(states).max(), np.abs(slopes).max()) > 1e-3


def test_a_program_that_does_not_run_is_a_finding(monkeypatch):
    from meshwright.parallel import accumulate

    def broken(*_):
        raise TypeError("operands of different types\nat length")

    find = bisector(config_for(faults.named("missing-tensor-sum")))
    monkeypatch.setattr(accumulate, "reduce", broken)
    result = find.verifier(parse_layout("data=2"))
    assert result.verdict == "differs"
    assert result.reason == "the program does not run: TypeError: operands of different types"
    assert find(parse_layout("data=2"), result).kind == "program"


def test_nothing_stays_planted():
    fault = faults.named("missing-tensor-sum")
    find = bisector(config_for(fault))
    with faults.planted(fault.name):
        pass
    assert find.verifier(parse_layout(fault.layout)).verdict == "equal"


def test_where_nothing_differs_the_arrays_of_a_layout_are_one_device_s():
    """Put together from their shards, forward and backward, they are as one device has them."""
    from meshwright.verify import bisect

    find = bisector(config_for(faults.named("missing-tensor-sum")))
    layout = parse_layout("data=2 tensor=2")
    batch = find.verifier.oracle.batch(layout)
    with jax.enable_x64(True):
        ours = bisect.watch(find.verifier.case, layout, batch)
    assert list(ours.values) == list(find.one_device(batch).values)
    assert len(ours.values) == 2 + 2 * 11
    assert bisect.compare(find.verifier.limit, ours, find.one_device(batch)) is None


def test_a_model_that_is_wrong_on_one_device_is_told_apart(monkeypatch):
    from meshwright.model import llama

    right = llama.rms_norm
    monkeypatch.setattr(llama, "rms_norm", lambda x_BTD, scale_D, eps: right(x_BTD, scale_D, 10 * eps))
    faults.forget()
    find = Bisector(Verifier(RunConfig(replace(FAMILIES["llama"], layers=1), train=TRAIN), "float64"))
    result = find.verifier(parse_layout("data=2"))
    assert result.verdict == "differs"
    assert find(parse_layout("data=2"), result).kind == "model"
    faults.forget()


# ---- measures --------------------------------------------------------------------------------------------


def test_a_leaf_s_error_is_the_law_s():
    expected = {"a": np.array([2.0, -4.0]), "b": np.array([0.0, 1e-9])}
    actual = {"a": np.array([2.0, -4.4]), "b": np.array([0.0, 2e-9])}
    errors = leaf_errors(actual, expected)
    assert errors["a"] == pytest.approx(0.4 / (4 + 4e-6))
    assert errors["b"] == pytest.approx(1e-9 / (1e-9 + 4e-6))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_a_number_is_never_equal(value):
    assert leaf_errors({"a": np.array([value])}, {"a": np.array([1.0])}) == {"a": np.inf}


@pytest.mark.parametrize(("layout", "axes"), [("data=2 tensor=2", "tensor"), ("data=2", "data")])
def test_copies_that_differ_are_found_with_their_axes(layout, axes):
    """Property 4."""
    config = replace(RunConfig(FAMILIES["llama"], train=TRAIN), layout=parse_layout(layout))
    one = Run.of(config, check(config), mesh.make(check(config)))
    sharding = one.shardings()["params"]["final_norm"]["scale_D"]
    last = one.mesh.devices.flat[-1] if axes == "data" else one.mesh.devices.flat[1]
    pieces = [jax.device_put(np.ones(24) + 1e-15 * (d == last), d) for d in one.mesh.devices.flat]
    array = jax.make_array_from_single_device_arrays((24,), sharding, pieces)
    (fault,) = parity._copy_faults(one, {"final_norm": {"scale_D": array}})
    assert fault == f"final_norm/scale_D: the copies differ over {axes}"


# ---- sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3-70b", "llama3.2-1b", "gpt2-124m", "gpt2-1.5b", "llama-demo", "llama3.1-405b"])
def test_small_sizes_have_the_same_legal_layouts(name):
    config = resolve(name)
    small = reduced(config, 8)
    assert legal_layouts(small, 8) == legal_layouts(config, 8)
    for degree in range(1, 9):
        assert (small.model.vocab_size % degree == 0) == (config.model.vocab_size % degree == 0)
    sizes = small.model.sizes | {"B": small.train.sequences, "T": small.train.sequence_length}
    assert sizes["D"] * sizes["T"] * sizes["B"] * sizes["L"] < 1e6
    assert (small.model.heads == small.model.kv_heads) == (config.model.heads == config.model.kv_heads)


def test_small_sizes_stay_as_they_are():
    assert sizes_text(reduced(resolve("llama-tiny"))) == sizes_text(resolve("llama-tiny")).replace("L=8", "L=4")


# ---- the command -----------------------------------------------------------------------------------------

TINY = ["model.layers=1", "model.d_model=16", "model.d_ff=32", "train.batch_sequences=4", "train.sequence_length=8"]
SMALL = [word for setting in TINY for word in ("--set", setting)]


def test_the_command_says_equal_and_refused(capsys):
    status = main(["verify", "llama-tiny", *SMALL, "--layouts", "fsdp=2 tensor=2; tensor=3", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == 0
    assert document["counts"] == {"equal": 1, "differs": 0, "refused": 1}
    equal = next(r for r in document["results"] if r["verdict"] == "equal")
    assert equal["layout"] == "fsdp=2 tensor=2"
    assert {"loss_rel_err", "grad_rel_err_max", "grad_worst_leaf", "param_rel_err_max", "reason"} <= set(equal)
    assert max(equal["loss_rel_err"], equal["grad_rel_err_max"], equal["param_rel_err_max"]) < 1e-9


def test_the_command_shows_a_planted_fault(capsys):
    status = main(["verify", "llama-tiny", *SMALL, "--plant", "norm-weight-not-reduced", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == 1
    (result,) = document["results"]
    assert result["verdict"] == "differs"
    assert "norm/scale_" in result["where"]


def test_an_unknown_fault_is_refused_with_the_list(capsys):
    assert main(["verify", "llama-tiny", "--plant", "nothing"]) == 2
    assert "missing-tensor-sum" in capsys.readouterr().err
    with pytest.raises(Refused, match="gpt"):
        faults.configured(faults.named("positions-of-the-first-shard"), resolve("llama-tiny"))


def test_dropout_is_verified_where_it_is_configured():
    config = RunConfig(replace(FAMILIES["llama"], layers=1, dropout_residual=0.2), train=TRAIN)
    (result,) = run.verify(config, [parse_layout("data=2 tensor=2")])
    assert result.verdict == "equal", result.reason
