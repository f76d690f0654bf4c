"""Pipelines keep the law: any schedule, any number of stages, chunks, layers and microbatches, beside every other axis.

Odd sizes: 7 layers on 4 stages, vocabulary 101, 6 heads with 2 key/value heads, 24 tokens. float64 to 1e-9 against the
oracle. The complete set of stages, schedules and microbatches is run by ``pytest -m slow`` and recorded in
docs/law_table.md.
"""

import functools
import io
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from meshwright import mesh
from meshwright.config import LayoutConfig, ModelConfig, OptimConfig, Refused, RunConfig, TrainConfig, parse_layout
from meshwright.layout import check
from meshwright.legal import every_schedule
from meshwright.presets import resolve
from meshwright.report import layout_table
from meshwright.schedules.files import write_csv
from meshwright.schedules.generate import make
from meshwright.schedules.place import from_orders
from meshwright.schedules.table import Op
from meshwright.stages import stages_of
from meshwright.train import step
from meshwright.train.state import Run
from meshwright.verify import parity
from meshwright.verify.cases import hard_batch
from meshwright.verify.parity import Verifier

TRAIN = TrainConfig(batch_sequences=12, sequence_length=24, z_loss=1e-3, label_smoothing=0.1)
LLAMA = ModelConfig(layers=7, d_model=24, d_ff=48, heads=6, kv_heads=2, head_size=4, vocab_size=101)
GPT = replace(LLAMA, family="gpt", layers=5, kv_heads=6, positions=32, tied_embeddings=True)
RESIDUAL = ModelConfig(family="residual", layers=7, d_model=16, d_ff=16)
CONFIGS = {
    "llama": RunConfig(LLAMA, train=TRAIN),
    "llama, 5 layers": RunConfig(replace(LLAMA, layers=5), train=TRAIN),
    "gpt": RunConfig(GPT, train=replace(TRAIN, z_loss=0.0, label_smoothing=0.0)),
    "residual": RunConfig(RESIDUAL, train=TRAIN),
}

ROWS = {
    "llama": (
        "pipe=4 microbatches=12",
        "pipe=3 fsdp=2 zero=1 microbatches=2 schedule=eager-1f1b stash=stage stage_layers=1,2,4",
        "pipe=4 tensor=2 microbatches=4 schedule=zb-h1 split_vocabulary=true",
        "pipe=3 tensor=2 sequence_parallel=false microbatches=3 schedule=zb-v stage_layers=1,1,2,1,1,1",
    ),
    "llama, 5 layers": (
        "pipe=2 fsdp=2 tensor=2 gather=step microbatches=6 schedule=dualpipe-v split_vocabulary=true stash=stage"
        " uniform_ticks=true",
        "pipe=2 data=2 tensor=2 schedule=gpipe",
    ),
    "gpt": (
        "pipe=4 fsdp=2 zero=2 microbatches=6 schedule=zb-h2",
        "pipe=2 data=2 tensor=2 microbatches=3 schedule=interleaved split_vocabulary=true",
    ),
    "residual": (
        "pipe=4 data=2 microbatches=6 schedule=zb-h1 uniform_ticks=true",
        "pipe=2 fsdp=2 zero=0 tensor=2 microbatches=3 schedule=zb-auto",
        "pipe=7 microbatches=4 schedule=zb-h2",
    ),
}
LATER = [pytest.mark.slow, pytest.mark.ci]
LOW_PRECISION = (
    ("gpt", "bfloat16", "pipe=2 fsdp=2 data=2 microbatches=3 schedule=zb-v"),
    pytest.param("gpt", "float32", "pipe=4 fsdp=2 microbatches=2", marks=LATER),
    pytest.param("llama, 5 layers", "bfloat16", "pipe=4 fsdp=2 microbatches=6 schedule=zb-h2", marks=LATER),
)


@functools.cache
def verifier(name: str, dtype: str = "float64") -> Verifier:
    return Verifier(CONFIGS[name], dtype)


def require_equal(result: parity.Result) -> None:
    assert result.verdict == "equal", f"{result.layout}: {result.reason}"


def require_close(ours: tuple[float, dict], right: tuple[float, dict]) -> None:
    """The same loss and gradients, to the law's bound."""
    assert ours[0] == pytest.approx(right[0], rel=1e-12)
    assert max(parity.leaf_errors(ours[1], right[1]).values()) < 1e-9


def run_of(config: RunConfig, layout: str) -> Run:
    config = replace(config, layout=parse_layout(layout))
    return Run.of(config, check(config), mesh.make(check(config)))


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, rows in ROWS.items() for layout in rows])
def test_a_pipeline_computes_what_one_device_computes(name, layout):
    require_equal(verifier(name)(parse_layout(layout)))


@pytest.mark.parametrize(("name", "dtype", "layout"), LOW_PRECISION)
def test_lower_precision_stays_within_its_bound(name, dtype, layout):
    """So do tied copies, on the first and on the last stage: bit-equal over pipe after five steps, moments too."""
    result = verifier(name, dtype)(parse_layout(layout))
    require_equal(result)
    assert result.grad_rel_err_max > {"bfloat16": 1e-4, "float32": 1e-9}[dtype], f"this was not {dtype}"


@pytest.mark.slow
@pytest.mark.parametrize("pipe", [2, 3, 4, 8])
def test_every_schedule_with_every_number_of_microbatches(pipe):
    """From one microbatch to three for each stage, chunks of one and of two, layers that do not divide."""
    config = RunConfig(replace(RESIDUAL, layers=17), train=replace(TRAIN, batch_sequences=24))
    layouts = [layout for layout in every_schedule(config, 8) if layout.pipe == pipe]
    assert len({(layout.schedule, layout.chunks) for layout in layouts}) == 9
    own = Verifier(config, "float64")
    for layout in layouts:
        require_equal(own(layout))


# ---- how it is computed does not matter ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "remat"), [("residual", "full"), ("llama, 5 layers", "save:q,k,v,attention_out")])
def test_what_a_layer_keeps_changes_nothing(name, remat):
    """Above all is kept that a backward pass needs: remat=none."""
    layout, own = parse_layout("pipe=4 tensor=2 microbatches=3 schedule=zb-h1"), verifier(name)
    case, batch = own.case, own.oracle.batch(layout)
    case = replace(case, config=replace(case.config, train=replace(case.config.train, remat=remat)))
    require_close(parity.loss_and_gradient(case, layout, batch), parity.reference.loss_and_gradient(own.case, batch))


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("tpu", "pipe=4 tensor=2 microbatches=4 split_vocabulary=true"),
        pytest.param("tpu", "pipe=2 fsdp=2 tensor=2 microbatches=3 schedule=zb-v", marks=LATER),
        pytest.param("gpu", "pipe=2 fsdp=4 microbatches=3 schedule=zb-h1", marks=LATER),
    ],
)
def test_the_form_for_accelerators_is_equal_too(form, layout):
    """Loops over a chunk's layers, other matmuls and look-ups, layers recomputed."""
    require_equal(Verifier(CONFIGS["llama, 5 layers"], "float64", form)(parse_layout(layout)))


@functools.cache
def with_dropout() -> Verifier:
    model = replace(LLAMA, layers=5, dropout_embedding=0.2, dropout_attention=0.3, dropout_residual=0.1)
    return Verifier(RunConfig(model, train=TRAIN), "float64")


@functools.cache
def one_device_dropout() -> tuple[float, dict]:
    batch = with_dropout().oracle.batch(LayoutConfig())
    return parity.loss_and_gradient(with_dropout().dropout_case, LayoutConfig(), batch)


@pytest.mark.parametrize(
    "layout",
    [
        "pipe=2 tensor=2 microbatches=3 schedule=zb-v",
        pytest.param("pipe=4 data=2 microbatches=2 stash=stage split_vocabulary=true", marks=LATER),
    ],
)
def test_dropout_is_the_same_on_any_stage(layout):
    """Masks are a function of the layer in the model and of the sequence, forward and where a stage runs once more."""
    batch = with_dropout().oracle.batch(LayoutConfig())
    piped = parity.loss_and_gradient(with_dropout().dropout_case, parse_layout(layout), batch)
    require_close(piped, one_device_dropout())


def test_a_schedule_from_a_file_computes_the_same(tmp_path):
    """One of our own: microbatches in falling order, backward first in, first out."""
    orders = [
        [*(Op("F", m) for m in (3, 2, 1, 0)), *(op for m in (3, 2, 1, 0) for op in (Op("B", m), Op("W", m)))]
        for _ in range(2)
    ]
    path = tmp_path / "own.csv"
    write_csv(from_orders("own", orders, 4, splits_backward=True), path)
    own = Verifier(replace(CONFIGS["residual"], model=replace(RESIDUAL, layers=3)), "float64")
    require_equal(own(replace(parse_layout("pipe=2 microbatches=4"), schedule=str(path))))


# ---- layers over stages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", range(1, 14))
def test_no_layer_is_lost_or_twice(layers):
    """P114 to P116: any number of layers over any number of stages and chunks, or a refusal."""
    model = replace(LLAMA, layers=layers)
    for pipe in range(1, 5):
        for chunks, names in ((1, ("1f1b", "zb-h1")), (2, ("interleaved", "zb-v"))):
            for name in names if pipe > 1 else ("1f1b",):
                layout = LayoutConfig(pipe=pipe, schedule=name, chunks=chunks if pipe > 1 else 1)
                if pipe * chunks > layers and pipe > 1:
                    with pytest.raises(Refused, match=rf"layout\.pipe={pipe}.*{pipe * chunks} layers.*has {layers}"):
                        stages_of(layout, model)
                    continue
                stages = stages_of(layout, model)
                assert sorted(n for own in stages.layers for chunk in own for n in chunk) == list(range(layers))
                assert all(len(chunk) for own in stages.layers for chunk in own)
                places = {  # in the order of the model, layers follow one another
                    layout_position(layout, stage, chunk): own
                    for stage, chunks_of_stage in enumerate(stages.layers)
                    for chunk, own in enumerate(chunks_of_stage)
                }
                assert [n for place in sorted(places) for n in places[place]] == list(range(layers))
                assert [stages.layer_of_row[row] for row in stages.row_of_layer] == list(range(layers))
                per_stage = [sum(len(chunk) for chunk in own) for own in stages.layers]
                assert max(per_stage) - min(per_stage) <= 1 or per_stage[-1] < max(per_stage)  # the head's share


def layout_position(layout: LayoutConfig, stage: int, chunk: int) -> int:
    if layout.pipe == 1:
        return 0
    return make(layout.schedule, layout.pipe, 1, layout.chunks).position(stage, chunk)


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        (10, "pipe=3 microbatches=3"),
        (13, "pipe=4 microbatches=2 schedule=zb-v"),
        (5, "pipe=2 microbatches=3 schedule=interleaved"),
        (9, "pipe=4 microbatches=4 schedule=dualpipe-v stage_layers=3,2,2,2"),
    ],
)
def test_uneven_layers_compute_the_same(layers, layout):
    case = Verifier(replace(CONFIGS["residual"], model=replace(RESIDUAL, layers=layers)), "float64")
    batch = case.oracle.batch(parse_layout(layout))
    piped = parity.loss_and_gradient(case.case, parse_layout(layout), batch)
    require_close(piped, parity.reference.loss_and_gradient(case.case, batch))


def test_the_heaviest_stage_is_what_is_reported():
    """P086, P090: bytes of a device are those of the stage with the most layers."""
    config = replace(resolve("llama-tiny"), layout=parse_layout("pipe=4 stage_layers=5,1,1,1"))
    rows = {row["name"]: row for row in layout_table.rows(config)}
    q = rows["layers/attention/q_LDNH"]
    assert q["shard_shape"][0] == 5
    assert q["bytes_per_device"] == 4 * 5 * math.prod(q["shard_shape"][1:])
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(layout_table.draw(list(rows.values()), layout_table.stages(config)))
    text = console.export_text()
    assert "stage 0: 5 layers, 0-4" in text and "stage 3: 1 layer, 7" in text
    assert "a device holds 5 rows of L, some without a layer" in text


# ---- tied weights ----------------------------------------------------------------------------------------------


def test_a_tied_embedding_is_one_parameter():
    """P055: its gradient is that of an embedding and a head with the same numbers, added; beside data too."""
    layout = parse_layout("pipe=2 data=2 microbatches=3")
    tied = Verifier(RunConfig(replace(GPT, layers=2), train=TRAIN), "float64")
    model = replace(tied.case.config.model, tied_embeddings=False)
    tokens_VD = tied.case.params["embedding"]["tokens_VD"]
    params = tied.case.params | {"head": {"tokens_DV": tokens_VD.T}}
    untied = replace(tied.case, config=replace(tied.case.config, model=model), params=params)
    batch = tied.oracle.batch(layout)
    loss, gradient = parity.loss_and_gradient(tied.case, layout, batch)
    other_loss, parts = parity.loss_and_gradient(untied, layout, batch)
    assert loss == pytest.approx(other_loss, rel=1e-12)
    total_VD = parts["embedding"]["tokens_VD"] + parts["head"]["tokens_DV"].T
    np.testing.assert_allclose(gradient["embedding"]["tokens_VD"], total_VD, atol=1e-12 * np.abs(total_VD).max())


@pytest.mark.parametrize("split", ["false", "true"])
def test_the_optimiser_has_one_state_for_each_parameter(split):
    """P056 to P058: one mu and one nu for a tied embedding, on whatever stages it is used; the same as on one device."""
    run = run_of(CONFIGS["gpt"], f"pipe=4 fsdp=2 microbatches=6 split_vocabulary={split}")
    one = run_of(CONFIGS["gpt"], "data=1")
    paths = lambda run: [  # noqa: E731
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(jax.eval_shape(run.initial_state)["opt"])
    ]
    assert paths(run) == paths(one)
    held = [path for path in paths(run) if "tokens_VD" in path]
    assert len(held) == 2


SMALL = RunConfig(
    model=ModelConfig(layers=3, d_model=16, d_ff=32, heads=4, kv_heads=2, head_size=4, vocab_size=37),
    train=TrainConfig(batch_sequences=4, sequence_length=8, param_dtype="float64", compute_dtype="float64"),
)


def trained(config: RunConfig, layout: str, steps: int = 3) -> dict:
    """The weights after a few steps, as the model has them."""
    run = run_of(config, layout)
    letters = step.objective_of(run).batch_letters
    batches = [step.put_batch(run, hard_batch(config, seed=seed), letters) for seed in range(steps)]
    state = parity.compile_fast(run, run.initial_program())()
    program = parity.compile_fast(run, step.train_step(run), state, batches[0])
    for batch in batches:
        state, _ = program(state, batch)
    return parity.trimmed(run.layout, state["params"])


@pytest.mark.parametrize("name", ["adafactor", *(pytest.param(name, marks=LATER) for name in ("muon", "sgd", "lion"))])
def test_an_optimiser_makes_the_same_update_on_uneven_stages(name):
    """Rows without a layer take no part, also where the algorithm looks at whole arrays."""
    optim = OptimConfig(name=name, lr=1e-2, momentum=0.9 if name == "sgd" else 0.0)
    one, other = (
        trained(replace(SMALL, optim=optim), layout) for layout in ("data=1", "pipe=2 fsdp=2 stage_layers=1,2")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-10), one, other)
