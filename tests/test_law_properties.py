"""Properties that the law rests on: empty batches, documents, dropout, initial weights, skipped steps, evaluation."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshwright import mesh
from meshwright.config import ModelConfig, RunConfig, TrainConfig, parse_layout
from meshwright.layout import check
from meshwright.model import forward
from meshwright.train import step
from meshwright.train.state import Run
from meshwright.verify import parity
from meshwright.verify.parity import Verifier

LLAMA = ModelConfig(layers=2, d_model=48, d_ff=96, heads=6, kv_heads=2, head_size=8, vocab_size=101)
CONFIG = RunConfig(LLAMA, train=TrainConfig(batch_sequences=8, sequence_length=24, z_loss=1e-3, label_smoothing=0.1))


@functools.cache
def verifier() -> Verifier:
    return Verifier(CONFIG, "float64")


def run_of(config: RunConfig, text: str) -> Run:
    config = replace(config, layout=parse_layout(text))
    layout = check(config)
    return Run.of(config, layout, mesh.make(layout))


@pytest.mark.parametrize(
    "layout", ["data=1", "data=2 microbatches=2", "fsdp=2 tensor=2", "pipe=2 microbatches=4 schedule=zb-h1"]
)
def test_a_batch_without_targets_gives_zeros(layout):
    """Property 2: nothing is divided by zero where every target of the global batch is masked."""
    case, batch = verifier().case, verifier().oracle.batch(parse_layout("data=1"))
    batch = batch | {"mask_BT": np.zeros_like(batch["mask_BT"])}
    loss, gradient = parity.loss_and_gradient(case, parse_layout(layout), batch)
    assert loss == 0
    assert all(np.all(g == 0) for g in jax.tree.leaves(gradient))


def logits(text: str, batch: dict) -> np.ndarray:
    run = run_of(verifier().case.config, text)
    program = run.manual(
        lambda params, batch: forward.logits(run.engine, params, batch),
        (run.specs()["params"], run.batch_specs(forward.BATCH_LETTERS)),
        PartitionSpec(run.layout.activation("B")[0], None, "tensor"),
    )
    inputs = parity.put_params(run, verifier().case.params), step.put_batch(run, batch, forward.BATCH_LETTERS)
    return np.asarray(parity.compile_fast(run, program, *inputs)(*inputs))[..., :101]


@pytest.mark.parametrize("layout", ["data=1", "data=2 tensor=2"])
def test_a_document_sees_only_its_own_past(layout):
    """Property 6: change one token of document 2; of all positions, only later ones of document 2 change."""
    batch = verifier().oracle.batch(parse_layout("data=1"))
    segments_BT, tokens_BT = batch["segments_BT"].copy(), batch["tokens_BT"].copy()
    segments_BT[3] = np.repeat([1, 2, 3], 8)
    batch = batch | {"segments_BT": segments_BT, "positions_BT": batch["positions_BT"].copy()}
    batch["positions_BT"][3] = np.tile(np.arange(8), 3)
    before = logits(layout, batch)
    tokens_BT[3, 11] = (tokens_BT[3, 11] + 1) % 101
    after = logits(layout, batch | {"tokens_BT": tokens_BT})
    changed_BT = np.any(before != after, axis=-1)
    expected_BT = np.zeros_like(changed_BT)
    expected_BT[3, 11:16] = True
    np.testing.assert_array_equal(changed_BT, expected_BT)


DROPOUT = replace(
    CONFIG,
    model=replace(LLAMA, dropout_embedding=0.2, dropout_attention=0.3, dropout_residual=0.1),
)


@functools.cache
def dropout_verifier() -> Verifier:
    return Verifier(DROPOUT, "float64")


@pytest.mark.parametrize(
    "layout",
    [
        "data=2 fsdp=2 tensor=2",
        "tensor=6 sequence_parallel=false",
        "fsdp=2 tensor=2 microbatches=2",
        "fsdp=2 tensor=2 prefetch=true",
    ],
)
def test_dropout_is_the_same_on_any_layout(layout):
    """Property 8: masks are a function of seed, step, layer, sequence and position, never of the shard."""
    right = dropout_verifier()
    layout = parse_layout(layout)
    batch = right.oracle.batch(parse_layout("data=1"))
    loss, gradient = parity.loss_and_gradient(right.dropout_case, layout, batch)
    one_loss, one_gradient = one_device_dropout()
    assert abs(loss / one_loss - 1) < 1e-12
    assert max(parity.leaf_errors(gradient, one_gradient).values()) < 1e-9


@functools.cache
def one_device_dropout(remat: str = "none") -> tuple[float, dict]:
    right = dropout_verifier()
    config = replace(right.dropout_case.config, train=replace(right.dropout_case.config.train, remat=remat))
    batch = right.oracle.batch(parse_layout("data=1"))
    return parity.loss_and_gradient(replace(right.dropout_case, config=config), parse_layout("data=1"), batch)


def test_dropout_is_the_same_when_layers_are_recomputed():
    loss, gradient = one_device_dropout()
    again, recomputed = one_device_dropout("full")
    assert again == pytest.approx(loss, rel=1e-12)
    assert max(parity.leaf_errors(recomputed, gradient).values()) < 1e-9


def test_dropout_drops():
    """Otherwise the two tests above hold for nothing."""
    right = dropout_verifier()
    without = right.oracle.expected(right.oracle.batch(parse_layout("data=1"))).loss
    assert abs(one_device_dropout()[0] / without - 1) > 1e-3


def test_initial_weights_of_layers_and_leaves_differ():
    """Property 8: no two layers, and no two leaves, start with the same numbers."""
    initial = verifier().initial
    up, gate = (initial["layers"]["mlp"][name] for name in ("up_LDF", "gate_LDF"))
    assert not np.isclose(up[0], up[1]).any(axis=0).all()
    assert np.mean(up == gate) < 0.01
    assert np.std(up) == pytest.approx(0.02, rel=0.02)
    assert np.unique(up).size > 0.99 * up.size


@pytest.mark.parametrize(
    "layout", ["data=2 fsdp=2 tensor=2", "fsdp=4 zero=1", "data=8", "pipe=2 fsdp=2 microbatches=4 schedule=zb-h2"]
)
def test_a_gradient_that_is_not_finite_is_skipped_everywhere(layout):
    """Property 9: one sequence's NaN, on one shard: all skip, the state is bit for bit the old one, it is counted."""
    case, batch = verifier().case, verifier().oracle.batch(parse_layout("data=1"))
    poison = int(batch["tokens_BT"].max())
    rare = np.where(batch["tokens_BT"] == poison, 0, batch["tokens_BT"])
    rare[5, 20] = poison
    params = jax.tree.map(np.copy, case.params)
    params["embedding"]["tokens_VD"][poison] = np.nan
    run = run_of(case.config, layout)
    letters = step.objective_of(run).batch_letters
    state = parity.compile_fast(run, jax.jit(run.initial_state))() | {"params": parity.put_params(run, params)}
    clean = step.put_batch(run, batch | {"tokens_BT": np.zeros_like(rare)}, letters)
    train_step = parity.compile_fast(run, step.train_step(run), state, clean)
    state, metrics = train_step(state, clean)
    assert float(metrics["skipped"]) == 0
    before = jax.device_get((state["params"], state["opt"]))
    state, metrics = train_step(state, step.put_batch(run, batch | {"tokens_BT": rare}, letters))
    assert float(metrics["skipped"]) == 1
    after = jax.device_get((state["params"], state["opt"]))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    assert int(state["step"]) == 2


def test_evaluation_of_21_examples_is_the_same_on_any_device_count():
    """Property 12: batches of 8, the last one filled up with masked sequences; sums and counts add up to one mean."""
    case = verifier().case
    one = replace(case.config, train=replace(case.config.train, batch_sequences=24))
    batch = verifier().oracle.batch(parse_layout("data=1"))
    rows = {name: np.concatenate([array] * 3)[:24].copy() for name, array in batch.items()}
    rows["mask_BT"] = np.roll(rows["mask_BT"], 1, axis=0)
    rows["mask_BT"][21:] = False
    expected = parity.reference.expected(replace(case, config=one), rows).loss
    pipes = ("pipe=2 data=2 microbatches=2", "pipe=2 tensor=2 microbatches=8 schedule=zb-h2 split_vocabulary=true")
    for layout in ("data=1", "data=2", "fsdp=2 tensor=2", "data=4 fsdp=2", *pipes):
        run = run_of(case.config, layout)
        params = parity.put_params(run, case.params)
        batches = [
            step.put_batch(run, {k: a[i : i + 8] for k, a in rows.items()}, forward.BATCH_LETTERS) for i in (0, 8, 16)
        ]
        evaluate = parity.compile_fast(run, step.eval_step(run), params, batches[0])
        sums = [evaluate(params, batch) for batch in batches]
        loss, count = (sum(float(s[j]) for s in sums) for j in (0, 1))
        assert count == rows["mask_BT"].sum()
        assert loss / count == pytest.approx(expected, rel=1e-12), layout


def test_the_batch_hides_nothing():
    """What the rows above rest on: uneven masks, silent rows, several documents, the last word of the vocabulary."""
    right = verifier()
    for text in ("data=1", "data=2 microbatches=2"):
        batch = right.oracle.batch(parse_layout(text))
        counts_B = batch["mask_BT"].sum(axis=1)
        assert (counts_B == 0).sum() == (1 if text == "data=1" else 4)
        assert len(set(counts_B)) >= 4
        assert {len(np.unique(row)) for row in batch["segments_BT"]} >= {2, 3}
        assert (batch["segments_BT"] == 0).any()
        assert batch["tokens_BT"].max() == 100 and batch["targets_BT"][batch["mask_BT"]].max() == 100
        starts_BT = np.diff(batch["segments_BT"], axis=1, prepend=-1) != 0
        assert np.all((batch["positions_BT"] == 0) == starts_BT)
    gradient = right.oracle.expected(batch).gradient
    sizes = [float(np.max(np.abs(g))) for g in jax.tree.leaves(gradient)]
    assert min(sizes) > 0.01 * max(sizes)
