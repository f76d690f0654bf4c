"""The law: every layout computes what one device computes. A new layout, model or algorithm is a row here.

Odd sizes: vocabulary 101, 6 heads with 2 key/value heads, 24 tokens. float64 to 1e-9 against the oracle, some rows in
bfloat16 against their bound. Every legal layout of up to 8 devices is run by ``pytest -m slow`` and recorded in
docs/law_table.md.
"""

import functools
from dataclasses import replace

import pytest

from meshwright.config import ModelConfig, Refused, RunConfig, TrainConfig, parse_layout
from meshwright.layout import check
from meshwright.legal import legal_layouts
from meshwright.verify import parity
from meshwright.verify.parity import Verifier

TRAIN = TrainConfig(batch_sequences=8, sequence_length=24, z_loss=1e-3, label_smoothing=0.1)
LLAMA = ModelConfig(layers=3, d_model=48, d_ff=96, heads=6, kv_heads=2, head_size=8, vocab_size=101)
GPT = ModelConfig(
    family="gpt",
    layers=3,
    d_model=48,
    d_ff=96,
    heads=6,
    kv_heads=6,
    head_size=8,
    vocab_size=101,
    positions=32,
    tied_embeddings=True,
)
REGRESSION = ModelConfig(family="residual", layers=4, d_model=16, d_ff=32)
CONFIGS = {
    "llama": RunConfig(LLAMA, train=TRAIN),
    "llama tied, 8 heads of 2": RunConfig(
        replace(LLAMA, layers=2, heads=8, head_size=4, tied_embeddings=True),
        train=replace(TRAIN, z_loss=0.0, label_smoothing=0.0),
    ),
    "llama, 8 heads of 1": RunConfig(replace(LLAMA, layers=2, heads=8, kv_heads=1, head_size=4), train=TRAIN),
    "gpt": RunConfig(GPT, train=replace(TRAIN, z_loss=0.0, label_smoothing=0.0)),
    "gpt, own head": RunConfig(replace(GPT, layers=2, tied_embeddings=False), train=TRAIN),
    "ffn": RunConfig(replace(REGRESSION, family="ffn", layers=1), train=TRAIN),
    "residual": RunConfig(REGRESSION, train=TRAIN),
}

ROWS = {
    "llama": (
        "data=1",
        "data=8",
        "data=2 microbatches=2",
        "fsdp=8",
        "fsdp=2 zero=0 microbatches=4",
        "fsdp=4 zero=1",
        "fsdp=4 zero=2 microbatches=2",
        "tensor=2",
        "tensor=6",
        "tensor=6 sequence_parallel=false",
        "data=2 fsdp=2 tensor=2",
        "fsdp=4 tensor=2 zero=2",
        "data=2 fsdp=2 tensor=2 zero=1 sequence_parallel=false microbatches=2",
        "fsdp=2 tensor=2 gather=step microbatches=2",
        "fsdp=4 prefetch=true",
        "data=2 fsdp=2 prefetch=true",
        "data=2 fsdp=2 tensor=2 prefetch=true microbatches=2",
        "fsdp=2 tensor=2 zero=2 prefetch=true",
    ),
    "llama tied, 8 heads of 2": ("tensor=8", "fsdp=2 tensor=4", "tensor=4 sequence_parallel=false microbatches=2"),
    "llama, 8 heads of 1": ("tensor=4", "data=2 tensor=2 sequence_parallel=false"),
    "gpt": (
        "data=2 microbatches=2",
        "fsdp=4",
        "tensor=3",
        "tensor=6 sequence_parallel=false",
        "data=2 fsdp=2 tensor=2",
        "fsdp=4 tensor=2 zero=1",
        "fsdp=4 tensor=2 prefetch=true",
    ),
    "gpt, own head": ("fsdp=2 tensor=3 zero=2 microbatches=2",),
    "ffn": ("data=1", "data=8", "fsdp=4 tensor=2", "data=2 tensor=4 microbatches=2"),
    "residual": ("data=2 fsdp=2 tensor=2", "fsdp=8 zero=1", "tensor=8", "fsdp=4 zero=2 microbatches=2"),
}
LOW_PRECISION = {"llama": ("data=2 fsdp=2 tensor=2", "tensor=6 microbatches=2"), "gpt, own head": ("fsdp=4 tensor=2",)}


@functools.cache
def verifier(name: str, dtype: str = "float64", form: str = "") -> Verifier:
    return Verifier(CONFIGS[name], dtype, form)


def ids(rows: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(name, layout) for name, layouts in rows.items() for layout in layouts]


def require_equal(result: parity.Result) -> None:
    assert result.verdict == "equal", f"{result.layout}: {result.reason}"


@pytest.mark.parametrize(("name", "layout"), ids(ROWS))
def test_layout_computes_what_one_device_computes(name, layout):
    require_equal(verifier(name)(parse_layout(layout)))


@pytest.mark.parametrize(("name", "layout"), ids(LOW_PRECISION))
def test_bfloat16_stays_within_its_bound(name, layout):
    result = verifier(name, "bfloat16")(parse_layout(layout))
    require_equal(result)
    assert result.grad_rel_err_max > 1e-4, "this was not bfloat16"


def test_float32_stays_within_its_bound():
    require_equal(verifier("llama", "float32")(parse_layout("data=2 fsdp=2 tensor=2")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_every_legal_layout(name):
    config = CONFIGS[name]
    layouts = legal_layouts(config, 8)
    assert len(layouts) > 50
    for layout in layouts:
        require_equal(verifier(name)(layout))


# ---- how it is computed does not matter ------------------------------------------------------------------


def changed(name: str, **train) -> Verifier:
    """The verifier of a configuration with other settings of its training that must not change a result."""
    right = verifier(name)
    other = object.__new__(Verifier)
    other.__dict__.update(right.__dict__)
    config = replace(right.case.config, train=replace(right.case.config.train, **train))
    other.case = replace(right.case, config=config)
    return other


@pytest.mark.parametrize("remat", ["full", "save:q,k,v,attention_out"])
@pytest.mark.parametrize("layout", ["fsdp=2 tensor=2 zero=3", "fsdp=2 tensor=2 prefetch=true"])
def test_rematerialisation_changes_nothing(remat, layout):
    require_equal(changed("llama", remat=remat)(parse_layout(layout)))


def test_chunks_of_the_loss_change_nothing():
    require_equal(changed("llama", loss_chunk_tokens=17)(parse_layout("data=2 tensor=2")))


@pytest.mark.parametrize(
    "layout", ["fsdp=4 tensor=2", "tensor=6 sequence_parallel=false microbatches=2", "fsdp=4 tensor=2 prefetch=true"]
)
@pytest.mark.parametrize("form", ["tpu", "gpu"])
def test_the_form_for_accelerators_is_equal_too(form, layout):
    """Other loops, matmuls, gathers and look-ups than on CPU, and layers recomputed."""
    require_equal(verifier("llama", "float64", form)(parse_layout(layout)))


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("llama", "tensor=3", ("tensor=3", "2 key/value heads", "1, 2, 6")),
        ("llama", "tensor=4", ("tensor=4", "6 query heads")),
        ("llama", "data=3", ("batch of 8 sequences", "data=3")),
        ("llama", "data=2 microbatches=3", ("microbatches=3",)),
        ("llama", "fsdp=5", ("fsdp=5", "model size 48")),
    ],
)
def test_what_cannot_be_right_is_refused_before_it_runs(name, layout, words):
    result = verifier(name)(parse_layout(layout))
    assert result.verdict == "refused"
    for word in words:
        assert word in result.reason, result.reason
    with pytest.raises(Refused):
        check(replace(CONFIGS[name], layout=parse_layout(layout)))
