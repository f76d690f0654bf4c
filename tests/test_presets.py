"""Presets: published sizes, names, and that each can be written down and read back."""

import tomllib
from dataclasses import replace

import pytest

from meshwright import config, presets
from meshwright.config import ModelConfig, Refused
from meshwright.layout import check

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama1-7b": 6_738_415_616,
    "llama1-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}
"""Parameters of the released checkpoints, counted in their files; tied heads counted once."""

DEMONSTRATIONS = {"llama-demo", "llama-tiny", "gpt-tiny", "ffn-demo", "residual-demo"}
LAYOUTS = [
    f"data={data} fsdp={fsdp} tensor={tensor} zero={zero} sequence_parallel={parallel}"
    for data, fsdp, tensor in [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2), (1, 2, 4), (2, 1, 2)]
    for zero in (0, 1, 2, 3)
    for parallel in ("true", "false")
]


def test_published_counts():
    counts = {name: presets.parameter_count(presets.resolve(name).model) for name in PUBLISHED}
    assert counts == PUBLISHED
    assert set(presets.PRESETS) == set(PUBLISHED) | DEMONSTRATIONS


def test_count_of_a_model_by_hand():
    model = ModelConfig(layers=2, d_model=6, d_ff=10, heads=3, kv_heads=1, head_size=4, vocab_size=11)
    attention = 6 * 12 + 2 * 6 * 4 + 12 * 6
    assert presets.parameter_count(model) == 2 * 11 * 6 + 2 * (attention + 3 * 6 * 10 + 2 * 6) + 6


def test_flops_of_a_token_by_hand():
    model = ModelConfig(layers=2, d_model=6, d_ff=10, heads=3, kv_heads=1, head_size=4, vocab_size=11)
    layer = 6 * 12 + 2 * 6 * 4 + 12 * 6 + 3 * 6 * 10  # weights of its matrices
    causal_attention = 2 * 12 * (5 / 2)  # two products, N H each, over half of T keys
    assert presets.flops_per_token(model, 5) == 6 * (2 * (layer + causal_attention) + 6 * 11)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_written_and_read_back(name):
    preset = presets.resolve(name)
    assert config.from_table(tomllib.loads(config.to_toml(preset))) == preset


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_proof_models_take_every_layout(name, layout):
    preset = presets.resolve(name)
    check(replace(preset, layout=config.parse_layout(layout)))


@pytest.mark.parametrize("layout", ["data=2 fsdp=2 tensor=2", "fsdp=8", "tensor=4 data=2", "data=8"])
def test_demonstration_takes_the_layouts_of_the_readme(layout):
    preset = presets.resolve("llama-demo")
    check(replace(preset, layout=config.parse_layout(layout)), 8)


def test_the_same_name_gives_an_equal_configuration():
    assert all(make() == make() for make in presets.PRESETS.values())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama-demo", ["neither a preset nor a file", "'llama-demo'", "gpt2-124m"]),
        ("Llama_Tiny", ["'llama-tiny'"]),
        ("mixtral-8x7b", ["experts", "cannot run yet"]),
        ("nowhere.toml", ["no configuration file"]),
        (".", ["cannot be read"]),
        ("", ["cannot be read"]),
    ],
)
def test_unknown_names_are_refused(name, words):
    with pytest.raises(Refused) as refusal:
        presets.resolve(name)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_names_agree_with_the_models_own_tree():
    params = pytest.importorskip("meshwright.model.params")
    for preset in ("llama-tiny", "gpt-tiny", "llama3.2-1b", "residual-demo"):
        model = presets.resolve(preset).model
        assert sorted(_leaves(params.names(model))) == sorted(presets.parameter_names(model))


def _leaves(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value
