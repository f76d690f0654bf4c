"""Sets of layouts: all without a pipeline; with one, a covering set that is legal, the same every time, and misses no pair."""

from dataclasses import replace
from itertools import combinations, product

import pytest

from meshwright.config import LayoutConfig, ModelConfig, RunConfig, TrainConfig, parse_layout
from meshwright.layout import check
from meshwright.legal import Covering, legal_layouts, pipeline_layouts, without_pipe
from meshwright.presets import resolve
from meshwright.schedules.generate import NAMES
from meshwright.verify.sizes import reduced

MODEL = ModelConfig(layers=7, d_model=48, d_ff=96, heads=6, kv_heads=2, head_size=8, vocab_size=101)
ODD = RunConfig(MODEL, train=TrainConfig(batch_sequences=12, sequence_length=24))
REGRESSION = RunConfig(ModelConfig(family="residual", layers=9, d_model=16, d_ff=32), train=ODD.train)


def test_without_a_pipeline_all_are_accepted_and_all_different():
    found = legal_layouts(ODD, 8)
    assert len({str(each) for each in found}) == len(found) > 40
    assert {each.zero for each in found} == {0, 1, 2, 3}
    assert {each.pipe for each in found} == {1}
    for each in found:
        check(replace(ODD, layout=each), each.device_count)


def test_the_configured_pipeline_does_not_stand_in_layouts_without_one():
    piped = replace(
        ODD, layout=parse_layout("pipe=2 schedule=zb-v chunks=2 stage_layers=5,2 stash=stage microbatches=2")
    )
    assert legal_layouts(piped, 4) == legal_layouts(replace(ODD, layout=parse_layout("microbatches=2")), 4)
    assert without_pipe(piped.layout) == LayoutConfig(microbatches=2)


@pytest.mark.parametrize(
    "config", [ODD, REGRESSION, resolve("llama-tiny"), resolve("gpt2-124m"), resolve("llama3-70b")]
)
def test_pipelines_are_legal_different_and_have_every_setting(config):
    found = pipeline_layouts(config, 8)
    assert found == pipeline_layouts(config, 8)
    assert len({str(each) for each in found}) == len(found) < 110
    for each in found:
        check(replace(config, layout=each), each.device_count)
        assert each.device_count <= 8
    assert {each.schedule for each in found} == set(NAMES)
    assert {each.pipe for each in found} == {2, 3, 4, 8} - ({8} if config.model.layers < 8 else set())
    assert {each.zero for each in found if each.fsdp > 1} == {0, 1, 2, 3}
    assert {each.sequence_parallel for each in found if each.tensor > 1} >= {True}
    for setting in ("data", "fsdp", "tensor", "stash", "uniform_ticks", "gather"):
        assert len({getattr(each, setting) for each in found}) > 1, setting
    language = config.model.is_language_model
    assert {each.split_vocabulary for each in found} == ({True, False} if language else {False})
    sizes = {
        (each.microbatches > 1) + (each.microbatches >= each.pipe) + (each.microbatches > each.pipe) for each in found
    }
    assert sizes == {0, 1, 2, 3}


@pytest.mark.parametrize("config", [ODD, REGRESSION])
def test_every_two_values_that_may_meet_do(config):
    """Against all combinations, tried one by one: a pair is in the set if any legal layout has it."""
    covering = Covering(config, 4)
    found = set(covering.layouts())
    settings = list(covering.values)
    may, do = set(), set()
    for numbers in product(*(range(len(values)) for values in covering.values.values())):
        layout = covering.layout_of(numbers)
        if layout is not None:
            pairs = set(combinations(zip(settings, numbers, strict=True), 2))
            may |= pairs
            do |= pairs if layout in found else set()
    assert may == do


def test_one_layer_has_no_pipeline():
    assert pipeline_layouts(replace(ODD, model=replace(MODEL, layers=1)), 8) == []


@pytest.mark.parametrize("name", ["llama3-70b", "gpt2-1.5b", "llama3.1-405b", "llama-tiny"])
def test_small_sizes_allow_the_same_pipelines_and_divide_their_layers_alike(name):
    config = resolve(name)
    layouts = pipeline_layouts(config, 8)
    small = reduced(config, 8, layouts)
    assert small.model.layers <= 48 and small.train.sequences <= 128
    for layout in layouts:
        check(replace(small, layout=layout))
        parts = layout.pipe * layout.chunks
        assert (small.model.layers % parts == 0) == (config.model.layers % parts == 0), layout


def test_a_layout_that_names_its_layers_keeps_them():
    config = resolve("llama3-70b")
    layout = parse_layout("pipe=4 stage_layers=21,20,20,19")
    small = reduced(config, 8, [layout])
    assert small.model.layers == 80
    check(replace(small, layout=layout))
