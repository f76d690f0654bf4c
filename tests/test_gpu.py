"""What the step does on a GPU, as far as a CPU can tell; and (slow) what the compiler for GPUs makes of it."""

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import rows
from meshwright.audit import aot, target
from meshwright.config import DataConfig, ModelConfig, RunConfig, TrainConfig, parse_layout
from meshwright.engine import Engine, attention_kernel
from meshwright.model import cudnn
from meshwright.verify.parity import Verifier

# ---- the gradient of a look-up ---------------------------------------------------------------------------

USES = {
    "each row once": np.arange(40),
    "one row always": np.full(700, 3),
    "a run over three blocks and its neighbours": np.repeat([0, 1, 2, 39], [100, 300, 1, 40]),
    "runs that end with their blocks": np.repeat([4, 5, 39], [rows.BLOCK, 2 * rows.BLOCK, rows.BLOCK]),
    "the last row alone": np.array([39]),
    "frequent words": np.minimum(np.random.default_rng(0).zipf(1.3, 1000) - 1, 39),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("add", [rows.add_by_scatter, rows.add_by_sort])
def test_every_use_of_a_row_is_added_up(name, add):
    used_M = np.random.default_rng(1).permutation(USES[name]).astype(np.int32)
    x_MD = np.random.default_rng(2).normal(size=(used_M.size, 5))
    wanted_VD = np.zeros((40, 5))
    np.add.at(wanted_VD, used_M, x_MD)
    got_VD = jax.jit(add, static_argnums=2)(used_M, x_MD, 40)
    np.testing.assert_allclose(got_VD, wanted_VD, rtol=0, atol=1e-12)


@pytest.mark.parametrize("by_sort", [False, True])
def test_a_look_up_in_bfloat16_is_added_up_in_float32(by_sort):
    """1 + 1023 times 2^-9: in bfloat16 every addition would be lost."""
    used_BT = jnp.zeros((1, 1024), jnp.int32)
    weigh_BTD = jnp.where(jnp.arange(1024) == 0, 1.0, 2.0**-9).astype(jnp.bfloat16)[None, :, None]
    table_VD = jnp.zeros((3, 2), jnp.bfloat16)
    slope_VD = jax.grad(lambda table_VD: (rows.rows(table_VD, used_BT, by_sort) * weigh_BTD).sum())(table_VD)
    np.testing.assert_array_equal(slope_VD[0], jnp.full(2, 1 + 1023 / 512).astype(jnp.bfloat16))
    assert not slope_VD[1:].any()


def test_the_sorted_form_has_no_scatter():
    add = jax.jit(rows.add_by_sort, static_argnums=2)
    program = str(jax.make_jaxpr(lambda r, x: add(r, x, 40))(jnp.zeros(300, jnp.int32), jnp.zeros((300, 8))))
    assert "sort" in program and "scatter" not in program


# ---- the step as on GPU, with the definition of attention in the place of cuDNN's ------------------------

SMALL = RunConfig(
    ModelConfig(layers=2, d_model=48, d_ff=96, heads=6, kv_heads=2, head_size=8, vocab_size=101),
    train=TrainConfig(batch_sequences=8, sequence_length=25, remat="save:q,k,attention"),
)


def defined(q_BTNH, k_BSKH, v_BSKH, *, mask, is_causal, implementation):
    """What `jax.nn.dot_product_attention` promises, written out in the arguments' own dtype."""
    assert is_causal and implementation == "cudnn"
    k_BSNH, v_BSNH = (jnp.repeat(x, q_BTNH.shape[2] // x.shape[2], axis=2) for x in (k_BSKH, v_BSKH))
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH) * q_BTNH.shape[-1] ** -0.5
    seen = jnp.tri(q_BTNH.shape[1], dtype=bool) if mask is None else jnp.tri(q_BTNH.shape[1], dtype=bool) & mask
    share_BNTS = jax.nn.softmax(jnp.where(seen, scores_BNTS, jnp.finfo(scores_BNTS.dtype).min), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", share_BNTS, v_BSNH)


@pytest.fixture
def as_on_gpu(monkeypatch):
    """The engine for GPU in any dtype."""
    of = Engine.of
    monkeypatch.setattr(jax.nn, "dot_product_attention", defined)
    monkeypatch.setattr(Engine, "of", lambda *a: replace(of(a[0], a[1], "gpu", *a[3:]), kernel="cudnn"))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("layout", ["data=2 fsdp=2 tensor=2", "tensor=6"])
def test_the_form_for_gpu_computes_what_one_device_computes(packing, layout, as_on_gpu):
    """Rows of one document are given no mask: padding at their end must not matter."""
    config = replace(SMALL, data=DataConfig(packing=packing))
    result = Verifier(config, "float64")(parse_layout(f"{layout} sequence_parallel=false"))
    assert result.verdict == "equal", result.reason


def test_rows_of_several_documents_need_their_mask(as_on_gpu, monkeypatch):
    right = cudnn.cudnn_attention
    monkeypatch.setattr(cudnn, "cudnn_attention", lambda *args, packed: right(*args, packed=False))
    assert Verifier(SMALL, "float64")(parse_layout("data=2")).verdict == "differs"


@pytest.mark.parametrize(
    ("dtype", "head_size", "platform", "kernel"),
    [
        ("bfloat16", 64, "gpu", "cudnn"),
        ("float16", 128, "gpu", "cudnn"),
        ("float32", 64, "gpu", "blockwise"),
        ("bfloat16", 4, "gpu", "blockwise"),
        ("bfloat16", 256, "gpu", "blockwise"),
        ("bfloat16", 64, "cpu", "blockwise"),
        ("float32", 64, "tpu", "splash"),
    ],
)
def test_the_attention_is_one_that_serves(dtype, head_size, platform, kernel):
    assert attention_kernel(ModelConfig(head_size=head_size), jnp.dtype(dtype), platform) == kernel


# ---- what the compiler for GPUs makes of it (slow; needs jax[cuda13], no GPU) ------------------------------

WIDE = RunConfig(
    ModelConfig(layers=2, d_model=512, d_ff=1024, heads=8, kv_heads=4, head_size=64, vocab_size=4096),
    train=TrainConfig(batch_sequences=8, sequence_length=1536),
)
needs_cuda = pytest.mark.skipif(
    not any(map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))), reason="jax[cuda] is not installed"
)


def compiled(tmp_path, devices: str, layout: str, **sections) -> str:
    """The text of the compiled step; it has been checked under varying-axes types."""
    text = tmp_path / "step.hlo"
    config = replace(WIDE, layout=parse_layout(layout), **sections)
    facts = aot.compile_step(config, target.parse(f"h200-sxm:{devices}"), text)
    assert facts["verdict"] == "fits", facts
    return text.read_text()


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize(("devices", "layout"), [("1x1", "data=1"), ("1x8", "fsdp=8"), ("1x8", "data=2 tensor=4")])
def test_rows_of_one_document_have_no_square_array(tmp_path, devices, layout):
    text = compiled(tmp_path, devices, layout, data=DataConfig(packing=False))
    assert "__cudnn$fmhaSoftmaxBackward" in text and "1536,1536]" not in text


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("length", [1536, 1535])
def test_documents_become_a_mask_for_all_heads(tmp_path, length):
    text = compiled(tmp_path, "1x1", "data=1", train=replace(WIDE.train, sequence_length=length))
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text and "bf16[8,1,1536,1536]" in text


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize(("remat", "forward"), [("full", 4), ("save:q,k,v,attention", 2), ("none", 2)])
def test_a_kept_attention_runs_once_a_layer(tmp_path, remat, forward):
    text = compiled(tmp_path, "1x1", "data=1", data=DataConfig(packing=False), train=replace(WIDE.train, remat=remat))
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == forward


# ---- the benchmark script ----------------------------------------------------------------------------------

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture
def report(script, tmp_path):
    return script.Report(argparse.Namespace(budget_s=1e9, json=str(tmp_path / "figures.json")))


def test_a_part_that_fails_loses_no_other(script, report, tmp_path):
    report.part("first", lambda facts: facts.update(rate=1.0))
    report.part("second", lambda facts: facts.update(rate=1 / 0))
    report.part("third", lambda facts: facts.update(rate=3.0), needs_s=1e10)
    report.part(
        "steps of 8",
        lambda facts: facts.update(meshwright={"step_s": 1, "tokens_per_s": 8, "peak_bytes": 1, "compile_s": 1}),
    )
    report.finish("done")
    parts = json.loads((tmp_path / "figures.json").read_text())["parts"]
    assert parts["first"]["rate"] == 1.0 and "ZeroDivisionError" in parts["second"]["error"]
    assert "are left" in parts["third"]["skipped"] and "rate" not in parts["third"]
    assert report.status() == 0


def test_a_step_that_has_no_room_is_tried_in_less(script, report):
    asked = []

    def make(trial):
        asked.append(trial)
        if trial == 0:
            raise script.NoRoom("150 GB of 140")
        if trial == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return argparse.Namespace(facts={"compile_s": 1, "peak_bytes": 1})

    script.first_that_fits(report, "step", make)
    assert asked == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        script.first_that_fits(report, "step", lambda trial: 1 / 0)


def test_documents_are_told_by_their_lengths_and_places(script):
    segments = jnp.asarray([[1, 1, 1, 2, 3, 3], [1, 1, 4, 4, 0, 0], [1, 1, 1, 1, 1, 1]], jnp.int32)
    lengths, places = script.documents(segments, most=4)
    np.testing.assert_array_equal(lengths, [[3, 1, 2, -1], [2, 2, -1, -1], [6, -1, -1, -1]])
    np.testing.assert_array_equal(places, [[0, 3, 4, 6, -1], [0, 2, 4, -1, -1], [0, 6, -1, -1, -1]])


@pytest.mark.slow
def test_the_script_runs_on_cpu_and_both_steps_agree(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run([sys.executable, str(SCRIPT), "--tiny", "--json", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert not any("error" in part for part in parts.values()), done.stdout
    for length in (64, 128):
        assert parts[f"steps of {length}"]["loss_rel_difference_max"] < 1e-4
        losses = parts[f"steps of {length}"]["losses"]["meshwright"]
        assert losses[2] < losses[1] < losses[0]
    assert all(form["gradient_error"] < 0.02 for form in parts["attention"].values() if isinstance(form, dict))
