"""The layout as data: what splits, what moves, what is refused, without any device."""

from dataclasses import replace

import pytest

from meshwright.config import ModelConfig, Refused, RunConfig, TrainConfig, parse_layout
from meshwright.layout import Layout, check, letters_of, show

MODEL = ModelConfig(d_model=48, d_ff=96, heads=8, kv_heads=4, head_size=6, vocab_size=101)
TRAIN = TrainConfig(batch_sequences=8, sequence_length=24)


def layout(text: str, model: ModelConfig = MODEL) -> Layout:
    return Layout(parse_layout(text), model)


def config(text: str, **model) -> RunConfig:
    return RunConfig(model=replace(MODEL, **model), train=TRAIN, layout=parse_layout(text))


def test_activations_follow_their_letters():
    split = layout("data=2 fsdp=2 tensor=2")
    assert split.activation("BTD") == (("data", "fsdp"), ("tensor",), ())
    assert split.activation("BTF") == (("data", "fsdp"), (), ("tensor",))
    assert split.activation("BTNH") == (("data", "fsdp"), (), ("tensor",), ())
    assert layout("tensor=2 sequence_parallel=false").activation("BTD") == ((), (), ())


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("layers/attention/q_LDNH", "f32[L,D@fsdp,N@tensor,H]"),
        ("layers/attention/out_LNHD", "f32[L,N@tensor,H,D@fsdp]"),
        ("embedding/tokens_VD", "f32[V@tensor,D@fsdp]"),
        ("layers/attention_norm/scale_LD", "f32[L,D]"),
        ("embedding/positions_PD", "f32[P,D]"),
        ("layers/mlp/up_bias_LF", "f32[L,F@tensor]"),
    ],
)
def test_weights_follow_their_letters(name, stored):
    letters = letters_of(name)
    assert show("float32", letters, layout("data=2 fsdp=2 tensor=2").stored(letters)) == stored


@pytest.mark.parametrize(
    ("zero", "stored", "updated"), [(0, (), ()), (1, (), ("fsdp",)), (2, (), ("fsdp",)), (3, ("fsdp",), ("fsdp",))]
)
def test_zero_says_who_holds_a_shard(zero, stored, updated):
    split = layout(f"data=2 fsdp=4 zero={zero}")
    assert split.stored("LDF")[1] == stored
    assert split.updated("LDF")[1] == updated


def test_the_four_cases_of_a_sharded_matmul():
    split = layout("fsdp=2 tensor=2")
    column = split.plan("BTD", "DF", "BTF")
    assert column.gather_x == (("T", ("tensor",)),)  # case 2: tokens before a column-parallel matmul
    assert column.gather_w == (("D", ("fsdp",)),)  # case 2: ZeRO's weight
    assert (column.sum_over, column.scatter_sum) == ((), ())
    row = split.plan("BTF", "FD", "BTD")
    assert row.scatter_sum == (("T", ("tensor",)),)  # case 3, onto the tokens
    plain = layout("tensor=2 sequence_parallel=false")
    assert plain.plan("BTF", "FD", "BTD").sum_over == ("tensor",)  # case 3, summed
    assert plain.plan("BTD", "DF", "BTF") == type(row)()  # case 1: nothing moves
    with pytest.raises(Refused, match="N and F of the result are both split over tensor"):  # case 4
        plain.plan("BTN", "NF", "BTNF")


def test_an_axis_of_degree_one_moves_nothing():
    one = layout("data=1")
    assert one.plan("BTF", "FD", "BTD") == one.plan("BTD", "DF", "BTF")
    assert one.gradient_axes("LDF") == ()


@pytest.mark.parametrize(
    ("text", "letters", "axes"),
    [
        ("data=2 tensor=2", "LD", ("data", "tensor")),  # a norm on tokens that tensor splits
        ("data=2 tensor=2 sequence_parallel=false", "LD", ("data",)),  # casting over tensor here would count it twice
        ("data=2 tensor=2", "LF", ("data",)),
        ("tensor=8", "LDKH", ("tensor",)),  # 4 heads that 8 ranks share
        ("tensor=4", "LDKH", ()),
        ("data=2 fsdp=2", "LDF", ("data",)),  # its shards over fsdp are summed by the gather's transpose
        ("data=2 fsdp=2 zero=1", "LDF", ("data", "fsdp")),
        ("data=2 fsdp=2 gather=step", "LDF", ("data", "fsdp")),
    ],
)
def test_gradients_are_summed_where_activations_are_split(text, letters, axes):
    assert layout(text).gradient_axes(letters) == axes


@pytest.mark.parametrize(
    ("text", "model", "words"),
    [
        ("tensor=3", {}, ["layout.tensor=3", "8 query heads", "model.heads", "1, 2, 4, 8"]),
        ("tensor=3", {"heads": 6, "kv_heads": 2}, ["tensor=3", "2 key/value heads", "1, 2, 6"]),
        ("tensor=8", {"d_ff": 100}, ["feed-forward size 100", "model.d_ff", "1, 2, 4, 5"]),
        ("fsdp=5", {}, ["fsdp=5", "model size 48", "model.d_model", "1, 2, 3, 4, 6, 8"]),
        ("data=16", {}, ["batch of 8 sequences", "data=16", "train.batch_sequences=16"]),
        ("data=2 microbatches=3", {}, ["data=2 x microbatches=3", "train.batch_sequences=12"]),
    ],
)
def test_a_refusal_names_setting_numbers_and_remedy(text, model, words):
    with pytest.raises(Refused) as refusal:
        check(config(text, **model))
    for word in words:
        assert word in str(refusal.value)


def test_tokens_that_do_not_divide_are_refused_with_both_remedies():
    with pytest.raises(Refused, match=r"sequence_length=33.*tensor=2.*34.*sequence_parallel=false"):
        check(replace(config("tensor=2"), train=replace(TRAIN, sequence_length=33)))


def test_a_wrong_device_count_shows_the_product_and_layouts_that_fit():
    with pytest.raises(Refused, match=r"fsdp=2 x tensor=2 = 4 devices, but there are 8.*'fsdp=8'"):
        check(config("fsdp=2 tensor=2"), 8)


def test_the_vocabulary_is_padded_inside_only():
    split = layout("tensor=4")
    assert split.shape("VD") == (104, 48)
    assert MODEL.sizes["V"] == 101


@pytest.mark.parametrize(
    ("text", "letters", "by_layer"),
    [
        ("data=2 fsdp=2", "LDF", True),
        ("data=2 fsdp=2", "LD", False),  # small: one sum at the end is cheaper than one a layer
        ("data=2 fsdp=2", "VD", False),
        ("data=2 fsdp=2 microbatches=2", "LDF", False),  # one reduction a step, whatever the microbatches
        ("data=2 fsdp=2 zero=2", "LDF", False),  # the optimiser wants a shard of the sum: scattered at the end
        ("data=2 fsdp=2 zero=0", "LDF", True),
    ],
)
def test_the_layers_matrices_are_reduced_beside_the_backward_pass(text, letters, by_layer):
    assert layout(text).reduced_by_layer(letters) == by_layer
