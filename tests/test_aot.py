"""Compiling for machines that are not there: what is refused, and what the compilers say of small models."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshwright import mesh
from meshwright.audit import aot, target
from meshwright.cli.main import main
from meshwright.config import ModelConfig, Refused, parse_layout
from meshwright.engine import gather_weight, project_heads
from meshwright.model import layers
from meshwright.presets import resolve

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpu", "KIND:SHAPE"),
        ("cpu:", "KIND:SHAPE"),
        ("tpu-v9:2x2", "tpu-v5p"),
        ("h100:8", "h100-sxm"),
        ("tpu-v5p:16", "tpu-v5p:2x2x4"),
        ("tpu-v5p:2x0x4", "whole number"),
        ("tpu-v5p:2x2x-4", "whole number"),
        ("cpu:8x2", "cpu:8"),
    ],
)
def test_unknown_targets_are_refused(text, words):
    with pytest.raises(Refused, match=words):
        target.parse(text)


@pytest.mark.parametrize(
    ("text", "count"), [("cpu:8", 8), ("tpu-v5p:2x2x4", 16), ("tpu-v5e:4x4", 16), ("h100-sxm:2x8", 16)]
)
def test_a_target_has_the_product_of_its_shape(text, count):
    assert target.parse(text).device_count == count


@pytest.mark.parametrize(("text", "package"), [("tpu-v5p:2x2x4", "libtpu"), ("h100-sxm:2x8", r"jax\[cuda13\]")])
def test_a_missing_compiler_is_refused_with_what_to_install(monkeypatch, text, package):
    monkeypatch.setattr(target, "find_spec", lambda name: None)
    with pytest.raises(Refused, match=f"pip install .?{package}"):
        aot.compile_step(resolve("llama-tiny"), target.parse(text))


def test_chips_must_be_the_layouts_product(capsys):
    assert main(["compile", "llama-tiny", "--target", "cpu:8", "--layout", "fsdp=4"]) == 2
    assert "there are 8" in capsys.readouterr().err


def test_a_compiler_that_dies_is_a_verdict_with_its_last_lines(monkeypatch, capsys):
    script = "import os, sys; print('lower\\n' * 50, 'F0000 check failed: wgmma', file=sys.stderr); os.abort()"
    monkeypatch.setattr(aot, "COMMAND", (sys.executable, "-c", script))
    assert main(["compile", "llama-tiny", "--target", "cpu:2", "--layout", "fsdp=2", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["verdict"] == "failed"
    assert "status -6" in facts["reason"] and "wgmma" in facts["reason"]
    assert len(facts["reason"].splitlines()) <= 1 + aot.LINES_SHOWN


def test_a_compiler_out_of_memory_does_not_fit(monkeypatch):
    script = "import sys; sys.exit('x\\nRESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 99G of 95G')"
    monkeypatch.setattr(aot, "COMMAND", (sys.executable, "-c", script))
    facts = aot.compile_step(resolve("llama-tiny"), target.parse("tpu-v5p:2x2x1"))
    assert facts["verdict"] == "does not fit" and "99G of 95G" in facts["reason"]


def test_cpu_step_and_its_text(tmp_path, capsys):
    text = tmp_path / "new" / "step.hlo"
    request = ["compile", "llama-tiny", "--target", "cpu:2", "--layout", "fsdp=2", "--json", "--text", str(text)]
    assert main(request) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verdict"] == "fits" and facts["devices"] == 2
    assert facts["peak_bytes"] > facts["argument_bytes"] > 0 and facts["compile_s"] > 0
    assert "all-gather" in text.read_text()


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("preset", ["llama-tiny", "gpt-tiny"])
@pytest.mark.parametrize("layout", ["fsdp=16", "fsdp=4 tensor=4", "data=2 fsdp=4 tensor=2 sequence_parallel=false"])
def test_small_models_compile_for_tpu(preset, layout):
    config = resolve(preset)
    config = config.__class__(**{**vars(config), "layout": parse_layout(layout)})
    facts = aot.compile_step(config, target.parse("tpu-v5p:2x2x4"))
    assert facts["verdict"] == "fits", facts
    assert 0 < facts["argument_bytes"] < facts["peak_bytes"] < facts["hbm_bytes"]


# ---- the forms that only accelerators run, held against the plain ones here --------------------------


def torus_line(shape):
    """Devices of a TPU torus along one axis, the last dimension fastest."""
    coords = [(x, y, z) for x in range(shape[0]) for y in range(shape[1]) for z in range(shape[2])]
    devices = np.array([SimpleNamespace(platform="tpu", coords=c) for c in coords], dtype=object)
    return SimpleNamespace(devices=devices[None], axis_names=("data", "fsdp"))


@pytest.mark.parametrize(
    ("shape", "rings"),
    [((4, 4, 8), (("fsdp", 8),)), ((2, 2, 4), (("fsdp", 4),)), ((1, 4, 8), ()), ((1, 1, 4), ()), ((1, 1, 1), ())],
)
def test_only_an_axis_over_three_dimensions_is_crossed_in_two_stages(shape, rings):
    assert mesh.rings(torus_line(shape)) == rings


@pytest.mark.parametrize("ring", [2, 4])
def test_two_stages_gather_and_scatter_what_one_does(ring):
    line = Mesh(np.array(jax.devices()[:8]), ("fsdp",), axis_types=(AxisType.Auto,))
    f64, spec = jnp.dtype("float64"), PartitionSpec("fsdp")
    with jax.enable_x64(True):
        w = np.random.default_rng(0).normal(size=(16, 3))
        scale = np.random.default_rng(1).normal(size=(8 * 16, 3))

        def answers(ring):
            def device(w, scale):
                whole, back = jax.vjp(lambda w: gather_weight(w, ("fsdp",), 0, f64, f64, ring), w)
                return whole, back(scale)[0]

            return jax.jit(jax.shard_map(device, mesh=line, in_specs=(spec, spec), out_specs=(spec, spec)))(w, scale)

        for staged, plain in zip(answers(ring), answers(0), strict=True):
            np.testing.assert_allclose(staged, plain, rtol=1e-15, atol=1e-15)
        np.testing.assert_array_equal(np.asarray(answers(ring)[0])[:16], w)


def test_turning_by_a_matmul_is_turning():
    model = ModelConfig(heads=4, kv_heads=4, head_size=128)
    cosine, sine = layers.rope_tables(model, jnp.arange(24, dtype=jnp.int32)[None], jnp.dtype("float32"))
    tokens = SimpleNamespace(cosine_BTH=cosine, sine_BTH=sine)
    x_BTNH = jnp.asarray(np.random.default_rng(0).normal(size=(1, 24, 4, 128)), jnp.bfloat16)
    plain, turned = (
        np.asarray(layers.rotate(SimpleNamespace(flat_matmuls=flat), x_BTNH, tokens).astype(jnp.float32))
        for flat in (True, False)
    )
    np.testing.assert_allclose(turned, plain, rtol=2**-7, atol=2**-9)
    assert np.mean(turned == plain) > 0.99


def test_heads_together_have_the_gradients_of_heads_apart():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x = jnp.asarray(rng.normal(size=(2, 5, 12)))
        weights = tuple(jnp.asarray(rng.normal(size=(12, n, 4))) for n in (6, 2, 2))
        outs, back = jax.vjp(project_heads, x, weights)
        apart, back_apart = jax.vjp(lambda x, ws: tuple(jnp.einsum("BTD,DNH->BTNH", x, w) for w in ws), x, weights)
        gradients = tuple(jnp.asarray(rng.normal(size=out.shape)) for out in outs)
        for a, b in zip(jax.tree.leaves(back(gradients)), jax.tree.leaves(back_apart(gradients)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)
        jax.tree.map(np.testing.assert_array_equal, outs, apart)


# ---- the estimate ----------------------------------------------------------------------------------------

GATHER_BESIDE_WORK = """HloModule step, is_scheduled=true

%gather (shard: bf16[1,540000]) -> bf16[4,540000] {
  %shard = bf16[1,540000]{1,0} parameter(0)
  ROOT %all-gather = bf16[4,540000]{1,0} all-gather(%shard), replica_groups=[1,4]<=[4], dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[1,540000]) -> bf16[4,540000] {
  %x = bf16[1,540000]{1,0} parameter(0)
  %start = ((), (), ()) custom-call-start(), async_execution_thread="sparsecore", called_computations={%gather}
  %update = ((bf16[1,540000]{1,0}), bf16[4,540000]{1,0}, ()) custom-call-update(%start, %x)
  %work = bf16[1,540000]{1,0} negate(%x), backend_config={"estimated_cycles":"7000"}
  ROOT %done = bf16[4,540000]{1,0} custom-call-done(%update)
}
"""


@pytest.mark.parametrize(("rate", "exposed_s"), [(540e9, 2e-6), (1080e9, 0.0), (270e9, 8e-6)])
def test_a_sparsecore_gather_is_exposed_for_what_runs_past_the_work_beside_it(rate, exposed_s, monkeypatch):
    """3 x 1.08 MB take 6 us at 540 GB/s; 7000 cycles at 1.75 GHz take 4 us."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import aot as benchmark

    found = benchmark.estimate(GATHER_BESIDE_WORK, rate)
    assert found.sent_bytes == 3 * 1_080_000
    assert found.compute_s == pytest.approx(4e-6)
    assert found.exposed_s == pytest.approx(exposed_s, abs=1e-15)
    assert found.step_s == pytest.approx(4e-6 + exposed_s)


# ---- the full-size steps -----------------------------------------------------------------------------


@pytest.mark.slow
@needs_libtpu
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.12 prints TPU programs")
@pytest.mark.parametrize("row", ["8b-fsdp", "8b-tensor", "70b-fsdp", "70b-tensor"])
def test_full_size_steps_reach_their_goals(row, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import aot as benchmark

    facts = benchmark.run(row)
    assert facts["step_s"] <= facts["step_goal_s"], benchmark.shown(facts)
    assert facts["peak_bytes"] <= facts["peak_goal_gib"] * 2**30, benchmark.shown(facts)
