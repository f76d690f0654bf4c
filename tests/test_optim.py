"""Optimisers: the same update on any layout, also where the algorithm needs whole matrices; skips, clipping, schedules."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright import mesh
from meshwright.config import ModelConfig, OptimConfig, RunConfig, TrainConfig, parse_layout
from meshwright.layout import check
from meshwright.train import optim
from meshwright.train.state import Run
from meshwright.train.step import objective_of, put_batch, train_step

MODEL = ModelConfig(layers=2, d_model=16, d_ff=32, heads=4, kv_heads=2, head_size=4, vocab_size=37)
CONFIG = RunConfig(
    model=MODEL,
    train=TrainConfig(batch_sequences=4, sequence_length=8, param_dtype="float64", compute_dtype="float64"),
)


def batch(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODEL.vocab_size, (4, 9)).astype(np.int32)
    return {
        "tokens_BT": tokens[:, :-1],
        "targets_BT": tokens[:, 1:],
        "mask_BT": rng.random((4, 8)) < 0.8,
        "segments_BT": np.ones((4, 8), np.int32),
        "positions_BT": np.broadcast_to(np.arange(8, dtype=np.int32), (4, 8)),
        "sample_B": np.arange(4, dtype=np.int32),
    }


def start(text: str, optimizer: OptimConfig) -> tuple[Run, dict]:
    config = replace(CONFIG, optim=optimizer, layout=parse_layout(text))
    run = Run.of(config, check(config), mesh.make(check(config)))
    run = replace(run, engine=replace(run.engine, unroll_layers=False))
    return run, run.initial_state()


def trained(text: str, optimizer: OptimConfig, steps: int = 3) -> tuple[dict, dict]:
    run, state = start(text, optimizer)
    step = train_step(run)
    for i in range(steps):
        state, metrics = step(state, put_batch(run, batch(i), objective_of(run).batch_letters))
    return trimmed(jax.device_get(state["params"])), jax.device_get(metrics)


def trimmed(params: dict) -> dict:
    v = MODEL.vocab_size
    params["embedding"]["tokens_VD"] = params["embedding"]["tokens_VD"][:v]
    params["head"]["tokens_DV"] = params["head"]["tokens_DV"][:, :v]
    return params


@pytest.mark.parametrize("text", ["fsdp=2 tensor=2", "data=2 fsdp=2 zero=1", "tensor=4 sequence_parallel=false"])
@pytest.mark.parametrize("name", ["sgd", "lion", "adafactor", "muon"])
def test_an_optimiser_makes_the_same_update_on_any_layout(name, text):
    optimizer = OptimConfig(name=name, lr=1e-2, momentum=0.9 if name == "sgd" else 0.0)
    one, _ = trained("data=1", optimizer)
    other, _ = trained(text, optimizer)
    # Lion's sign turns a rounding into a whole step where a gradient is zero; nowhere here.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-10), one, other)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor", "muon"])
@pytest.mark.parametrize(("param", "compute", "reduce"), [("float32", "bfloat16", "bfloat16"), ("bfloat16",) * 3])
def test_an_optimiser_steps_in_any_mixture_of_dtypes(name, param, compute, reduce, monkeypatch):
    dtypes = {"param_dtype": param, "compute_dtype": compute, "reduce_dtype": reduce}
    monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, train=replace(CONFIG.train, **dtypes)))
    params, metrics = trained("fsdp=2 tensor=2", OptimConfig(name=name, lr=1e-2), steps=2)
    assert all(leaf.dtype == param for leaf in jax.tree.leaves(params))
    assert metrics["skipped"] == 0
    assert metrics["loss"] == pytest.approx(np.log(MODEL.vocab_size), rel=0.05)


def test_muon_is_optax_newton_schulz_on_whole_matrices():
    matrix = jax.random.normal(jax.random.key(0), (6, 10), jnp.float32)
    u, _, v = jnp.linalg.svd(matrix, full_matrices=False)
    ours = optim.newton_schulz(matrix)
    assert 0.6 < jnp.linalg.svd(ours, compute_uv=False).min() < jnp.linalg.svd(ours, compute_uv=False).max() < 1.3
    assert jnp.sum(ours * (u @ v)) / 6 > 0.8  # near the nearest orthogonal matrix
    np.testing.assert_allclose(optim.newton_schulz(matrix.T), ours.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", ["data=2 fsdp=2", "fsdp=2 tensor=2 zero=2"])
def test_a_norm_that_is_not_finite_skips_everywhere_and_changes_nothing(text):
    run, state = start(text, OptimConfig())
    scale = state["params"]["final_norm"]["scale_D"]
    poisoned = jax.device_put(np.where(np.arange(16) == 3, np.nan, 1.0), scale.sharding)
    state["params"]["final_norm"]["scale_D"] = poisoned
    before = jax.device_get(state)
    after, metrics = train_step(run)(state, put_batch(run, batch(), objective_of(run).batch_letters))
    assert float(metrics["skipped"]) == 1.0
    after = jax.device_get(after)
    for name in ("params", "opt"):
        jax.tree.map(np.testing.assert_array_equal, before[name], after[name])
    assert after["step"] == before["step"] + 1


def test_clipping_is_by_the_global_norm_and_is_logged():
    free = OptimConfig(name="sgd", lr=1.0, clip_norm=0, weight_decay=0)
    start_params = trimmed(jax.device_get(start("data=1", free)[1]["params"]))
    for text in ("data=1", "fsdp=2 tensor=2", "data=2 fsdp=2 zero=1"):
        moved, metrics = trained(text, replace(free, clip_norm=0.01), steps=1)
        delta = jax.tree.map(np.subtract, start_params, moved)
        assert float(optax.tree.norm(delta)) == pytest.approx(0.01, rel=1e-9)
        assert float(metrics["clip_factor"]) == pytest.approx(0.01 / float(metrics["grad_norm"]), rel=1e-9)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
def test_schedules_warm_up_and_end_where_they_should(name):
    config = OptimConfig(lr=2.0, schedule=name, warmup_steps=4, final_lr_share=0.25, decay_share=0.5)
    rate = optim.learning_rate(config, 20)
    assert [float(rate(i)) for i in range(4)] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert float(rate(19)) == pytest.approx(2.0 if name == "constant" else 0.5)
    if name == "wsd":
        assert float(rate(11)) == pytest.approx(2.0) and float(rate(13)) < 2.0


def test_decay_spares_norms_biases_and_positions():
    params = {"embedding": {"positions_PD": 0.0, "tokens_VD": 0.0}, "layers": {"mlp_norm": {"scale_LD": 0.0}}}
    decayed = optim.is_decayed(OptimConfig(), params)
    assert decayed == {
        "embedding": {"positions_PD": False, "tokens_VD": True},
        "layers": {"mlp_norm": {"scale_LD": False}},
    }


def test_state_in_host_memory_gives_the_same_step():
    here, _ = trained("fsdp=2", OptimConfig(), steps=2)
    there, _ = trained("fsdp=2", OptimConfig(offload=True), steps=2)
    jax.tree.map(np.testing.assert_array_equal, here, there)
