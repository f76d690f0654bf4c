"""The oracle against transformers' GPT-2 and Llama, and against what is known in closed form."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from meshwright.config import ModelConfig, RopeScaling, TrainConfig
from meshwright.verify import oracle

FIXTURE = np.load(Path(__file__).parent / "data" / "transformers.npz")
PLAIN = TrainConfig()
EXTENDED = TrainConfig(z_loss=0.01, label_smoothing=0.1)
LLAMA = ModelConfig(layers=2, d_model=8, d_ff=10, heads=4, kv_heads=2, head_size=8, vocab_size=23)
MODELS = {
    "gpt": ModelConfig("gpt", 2, 8, 12, 2, 2, 4, 23, tied_embeddings=True, positions=16),
    "llama_grouped": dataclasses.replace(LLAMA, rope_scaling=RopeScaling(original_length=64)),
    "llama_tied": dataclasses.replace(LLAMA, kv_heads=1, tied_embeddings=True, norm_eps=1e-6),
}
NAMES = sorted(MODELS)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


# ---- transformers' names -------------------------------------------------------------------------


def read(name: str, kind: str):
    """The parameters (kind `weight`) or gradients (`grad`) of one model of the fixture, as our tree."""
    prefix = f"{name}.{kind}."
    theirs = {k.removeprefix(prefix): FIXTURE[k].astype(np.float64) for k in FIXTURE.files if k.startswith(prefix)}
    return (from_gpt2 if name == "gpt" else from_llama)(MODELS[name], theirs)


def stack(model: ModelConfig, make):
    """Stack over L the leaves of the trees make(0), make(1), ..."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *[make(layer) for layer in range(model.layers)])


def from_llama(model: ModelConfig, w):
    D, N, K, H = (model.sizes[letter] for letter in "DNKH")

    def layer(i):
        p = f"model.layers.{i}."
        return {
            "attention_norm": {"scale_LD": w[p + "input_layernorm.weight"]},
            "attention": {
                "q_LDNH": w[p + "self_attn.q_proj.weight"].T.reshape(D, N, H),
                "k_LDKH": w[p + "self_attn.k_proj.weight"].T.reshape(D, K, H),
                "v_LDKH": w[p + "self_attn.v_proj.weight"].T.reshape(D, K, H),
                "out_LNHD": w[p + "self_attn.o_proj.weight"].T.reshape(N, H, D),
            },
            "mlp_norm": {"scale_LD": w[p + "post_attention_layernorm.weight"]},
            "mlp": {name + letters: w[f"{p}mlp.{name}_proj.weight"].T for name, letters in MLP},
        }

    tree = {
        "embedding": {"tokens_VD": w["model.embed_tokens.weight"]},
        "layers": stack(model, layer),
        "final_norm": {"scale_D": w["model.norm.weight"]},
    }
    return tree if model.tied_embeddings else tree | {"head": {"tokens_DV": w["lm_head.weight"].T}}


MLP = (("gate", "_LDF"), ("up", "_LDF"), ("down", "_LFD"))


def from_gpt2(model: ModelConfig, w):
    D, N, H = (model.sizes[letter] for letter in "DNH")

    def layer(i):
        p = f"transformer.h.{i}."
        qkv_3DNH = w[p + "attn.c_attn.weight"].reshape(D, 3, N, H).swapaxes(0, 1)
        bias_3NH = w[p + "attn.c_attn.bias"].reshape(3, N, H)
        return {
            "attention_norm": {"scale_LD": w[p + "ln_1.weight"], "bias_LD": w[p + "ln_1.bias"]},
            "attention": dict(zip(("q_LDNH", "k_LDKH", "v_LDKH"), qkv_3DNH, strict=True))
            | dict(zip(("q_bias_LNH", "k_bias_LKH", "v_bias_LKH"), bias_3NH, strict=True))
            | {
                "out_LNHD": w[p + "attn.c_proj.weight"].reshape(N, H, D),
                "out_bias_LD": w[p + "attn.c_proj.bias"],
            },
            "mlp_norm": {"scale_LD": w[p + "ln_2.weight"], "bias_LD": w[p + "ln_2.bias"]},
            "mlp": {
                "up_LDF": w[p + "mlp.c_fc.weight"],
                "up_bias_LF": w[p + "mlp.c_fc.bias"],
                "down_LFD": w[p + "mlp.c_proj.weight"],
                "down_bias_LD": w[p + "mlp.c_proj.bias"],
            },
        }

    return {
        "embedding": {"tokens_VD": w["transformer.wte.weight"], "positions_PD": w["transformer.wpe.weight"]},
        "layers": stack(model, layer),
        "final_norm": {"scale_D": w["transformer.ln_f.weight"], "bias_D": w["transformer.ln_f.bias"]},
    }


def make_batch(**changes):
    arrays = {k.removeprefix("batch."): FIXTURE[k] for k in FIXTURE.files if k.startswith("batch.")}
    return {k: jnp.asarray(v) for k, v in (arrays | changes).items()}


# ---- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_losses_are_those_of_transformers(name):
    model, params, batch = MODELS[name], jax.tree.map(jnp.asarray, read(name, "weight")), make_batch()
    theirs_BTV, real_BT = FIXTURE[f"{name}.logits"], np.asarray(batch["segments_BT"]) > 0
    ours_BTV = np.asarray(oracle.logits(model, params, batch))
    np.testing.assert_allclose(ours_BTV[real_BT], theirs_BTV[real_BT], rtol=0, atol=1e-11 * np.abs(theirs_BTV).max())
    assert float(oracle.loss(model, PLAIN, params, batch)) == pytest.approx(FIXTURE[f"{name}.loss"].item(), rel=1e-12)
    extended = float(oracle.loss(model, EXTENDED, params, batch))
    assert extended == pytest.approx(FIXTURE[f"{name}.extended_loss"].item(), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_leaf_is_that_of_transformers(name):
    model, params = MODELS[name], jax.tree.map(jnp.asarray, read(name, "weight"))
    ours = jax.jit(jax.grad(lambda p: oracle.loss(model, EXTENDED, p, make_batch())))(params)
    theirs = read(name, "grad")
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(theirs))
    for (path, our_leaf), their_leaf in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        error = np.abs(our_leaf - their_leaf).max() / (np.abs(their_leaf).max() + 1e-6 * largest)
        assert error < 1e-10, jax.tree_util.keystr(path)


def test_llama3_scaling_keeps_short_wavelengths_and_divides_long_ones():
    model = dataclasses.replace(LLAMA, head_size=128, rope_theta=500000.0, rope_scaling=RopeScaling())
    plain = np.asarray(oracle.frequencies(dataclasses.replace(model, rope_scaling=None), jnp.float64))
    ratio, turns = np.asarray(oracle.frequencies(model, jnp.float64)) / plain, 8192 * plain / (2 * math.pi)
    assert plain[1] == pytest.approx(500000 ** (-1 / 64))
    np.testing.assert_allclose(ratio[turns >= 4], 1)
    np.testing.assert_allclose(ratio[turns <= 1], 1 / 8)
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) and np.all((between > 1 / 8) & (between < 1)) and np.all(np.diff(between) < 0)


# ---- properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_token_reaches_only_later_tokens_of_its_own_document(name):
    model, params, batch = MODELS[name], jax.tree.map(jnp.asarray, read(name, "weight")), make_batch()
    segments_BT, before_BTV = np.asarray(batch["segments_BT"]), np.asarray(oracle.logits(model, params, batch))
    for t in range(segments_BT.shape[1]):
        tokens_BT = batch["tokens_BT"].at[:, t].set((batch["tokens_BT"][:, t] + 1) % model.vocab_size)
        after_BTV = np.asarray(oracle.logits(model, params, batch | {"tokens_BT": tokens_BT}))
        reached_BT = np.any(before_BTV != after_BTV, axis=-1)
        expected_BT = (segments_BT == segments_BT[:, t : t + 1]) & (np.arange(segments_BT.shape[1]) >= t)
        np.testing.assert_array_equal(reached_BT, expected_BT)


@pytest.mark.parametrize("name", NAMES)
def test_a_document_alone_has_the_logits_it_has_when_packed(name):
    model, params, batch = MODELS[name], jax.tree.map(jnp.asarray, read(name, "weight")), make_batch()
    packed_BTV = oracle.logits(model, params, batch)
    alone = {k: v[:1, 7:12] for k, v in batch.items()}
    np.testing.assert_allclose(oracle.logits(model, params, alone), packed_BTV[:1, 7:12], rtol=1e-12, atol=1e-12)


def test_only_masked_in_targets_are_summed_and_counted():
    model, params, batch = (
        MODELS["llama_grouped"],
        jax.tree.map(jnp.asarray, read("llama_grouped", "weight")),
        make_batch(),
    )
    total, count = oracle.loss_sum_and_count(model, EXTENDED, params, batch)
    assert count == 6 + 4 + 3 + 5
    parts = [make_batch(mask_BT=np.asarray(batch["mask_BT"]) & (np.arange(2)[:, None] == row)) for row in range(2)]
    sums, counts = zip(*[oracle.loss_sum_and_count(model, EXTENDED, params, part) for part in parts], strict=True)
    assert sum(counts) == count and float(sum(sums)) == pytest.approx(float(total), rel=1e-13)
    none = make_batch(mask_BT=np.zeros((2, 12), bool))
    assert oracle.loss(model, EXTENDED, params, none) == 0
    grad = jax.grad(lambda p: oracle.loss(model, EXTENDED, p, none))(params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grad))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_equal_logits_lose_log_v(smoothing):
    train = TrainConfig(label_smoothing=smoothing, z_loss=0.5)
    loss_BT = oracle.token_losses(train, jnp.full((2, 3, 101), 7.0), jnp.zeros((2, 3), jnp.int32))
    log_z = 7 + math.log(101)
    np.testing.assert_allclose(loss_BT, math.log(101) + 0.5 * log_z**2, rtol=1e-13)


@pytest.mark.parametrize("family", ["ffn", "residual"])
def test_regression_in_numbers_worked_by_hand(family):
    model = ModelConfig(family, layers=2, d_model=2, d_ff=1)
    up_LDF = jnp.array([[[1.0], [1.0]], [[-1.0], [2.0]]])
    down_LFD = jnp.array([[[1.0, 2.0]], [[3.0, 0.0]]])
    params = {"layers": {"mlp": {"up_LDF": up_LDF, "down_LFD": down_LFD}}}
    batch = {"x_BD": jnp.array([[1.0, 1.0], [-3.0, 1.0]]), "y_BD": jnp.array([[0.0, 0.0], [1.0, -1.0]])}
    # ffn: row 1: hidden 2 -> (2, 4); hidden -2 + 8 = 6 -> (18, 0). Row 2: hidden max(-2, 0) = 0 -> 0 -> 0.
    # residual: row 1: (1, 1) + (2, 4) = (3, 5); hidden -3 + 10 = 7 -> (24, 5).
    #           Row 2: (-3, 1); hidden 3 + 2 = 5 -> (12, 1).
    y_BD = {"ffn": [[18.0, 0.0], [0.0, 0.0]], "residual": [[24.0, 5.0], [12.0, 1.0]]}[family]
    np.testing.assert_array_equal(oracle.regress(model, params, batch["x_BD"]), y_BD)
    total, count = oracle.loss_sum_and_count(model, PLAIN, params, batch)
    assert (total, count) == (np.sum((np.array(y_BD) - batch["y_BD"]) ** 2), 4)
    assert oracle.loss(model, PLAIN, params, batch) == total / 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_everything_is_computed_in_the_dtype_of_the_parameters(name, dtype):
    params = jax.tree.map(lambda a: jnp.asarray(a, dtype), read(name, "weight"))
    step = jax.value_and_grad(lambda p: oracle.loss(MODELS[name], EXTENDED, p, make_batch()))
    seen = {aval.dtype.name for aval in avals(jax.make_jaxpr(step)(params).jaxpr)}
    assert {d for d in seen if d.startswith(("float", "bfloat"))} == {dtype}


def avals(jaxpr):
    """Every value of a jaxpr and of the jaxprs inside it, but for Python's own numbers."""
    for equation in jaxpr.eqns:
        for var in (*equation.invars, *equation.outvars):
            if not getattr(var.aval, "weak_type", False):
                yield var.aval
        for inner in jaxprs_in_params(equation.params):
            yield from avals(inner)
