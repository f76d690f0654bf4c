"""Attention and cross-entropy against their definitions, in the sizes that go wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import LayoutConfig, ModelConfig, TrainConfig
from meshwright.engine import Engine
from meshwright.layout import Layout
from meshwright.model import blockwise
from meshwright.model.attention import attend
from meshwright.model.loss import CrossEntropy


def arrays(t: int, n: int, k: int, h: int = 8, b: int = 2, seed: int = 0):
    rng = np.random.default_rng(seed)
    q, key, v = (jnp.asarray(rng.normal(size=(b, t, heads, h))) for heads in (n, k, k))
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (b, t)), axis=1).astype(np.int32))
    return q, key, v, segments


def defined(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """Softmax over what is seen, written out."""
    g = q_BTNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (jnp.repeat(x, g, axis=2) for x in (k_BSKH, v_BSKH))
    scores = jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) / np.sqrt(q_BTNH.shape[-1])
    t = q_BTNH.shape[1]
    seen = (np.arange(t)[:, None] >= np.arange(t)) & (segments_BT[:, :, None] == segments_BT[:, None])
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen[:, None], scores, -1e300), -1), v_BSNH)


@pytest.mark.parametrize(("t", "n", "k"), [(1, 2, 2), (24, 6, 2), (65, 4, 1), (130, 4, 4)])
@pytest.mark.parametrize("short", [512, 0])
def test_attention_is_its_definition_forward_and_backward(t, n, k, short, monkeypatch):
    monkeypatch.setattr(blockwise, "SHORT_LENGTH", short)  # 0: every length takes the way of a long one
    monkeypatch.setattr(blockwise, "BLOCK", 32)
    q, key, v, segments = arrays(t, n, k)
    weigh = jnp.cos(jnp.arange(q.size, dtype=jnp.float64)).reshape(q.shape)
    slopes = lambda f: jax.value_and_grad(lambda q, k, v: (f(q, k, v, segments) * weigh).sum(), (0, 1, 2))  # noqa: E731
    (a, da), (b, db) = (jax.jit(slopes(f))(q, key, v) for f in (attend, defined))
    np.testing.assert_allclose(a, b, rtol=1e-12)
    for x, y in zip(da, db, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-13)


def test_no_position_sees_the_future_or_another_document():
    q, key, v, _ = arrays(16, 2, 2, b=1)
    segments = jnp.asarray([[1] * 6 + [2] * 10])
    reach = jax.jacobian(lambda v: attend(q, key, v, segments)[0, :, 0, 0])(v)[:, 0, :, 0, 0]
    document = np.array(segments[0])
    allowed = (np.arange(16)[:, None] >= np.arange(16)) & (document[:, None] == document)
    np.testing.assert_array_equal(np.asarray(reach) != 0, allowed)


def test_memory_does_not_grow_with_the_square_of_the_length():
    def temporary_bytes(t: int) -> int:
        q = jax.ShapeDtypeStruct((1, t, 2, 16), jnp.float32)
        s = jax.ShapeDtypeStruct((1, t), jnp.int32)
        slope = jax.jit(jax.grad(lambda q, k, v, s: attend(q, k, v, s).sum(), (0, 1, 2)))
        return slope.lower(q, q, q, s).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(2048), temporary_bytes(8192)
    assert long < 4.6 * short, f"{short} bytes at 2048 tokens, {long} at 8192"


# ---- cross-entropy ----


def loss_of(v: int, chunk: int, **settings) -> CrossEntropy:
    layout = Layout(LayoutConfig(), ModelConfig(vocab_size=v))
    engine = Engine.of(layout, TrainConfig(compute_dtype="float64"), "cpu")
    return CrossEntropy(engine, chunk, settings.get("z_loss", 0.0), settings.get("label_smoothing", 0.0))


def plain(x_BTD, head_DV, targets_BT, mask_BT, z_loss=0.0, label_smoothing=0.0):
    z = x_BTD @ head_DV
    log_z = jax.nn.logsumexp(z, -1)
    nll = log_z - jnp.take_along_axis(z, targets_BT[..., None], -1)[..., 0]
    smooth = log_z - z.mean(-1)
    each = (1 - label_smoothing) * nll + label_smoothing * smooth + z_loss * log_z**2
    return jnp.where(mask_BT, each, 0).sum()


@pytest.mark.parametrize("settings", [{}, {"z_loss": 1e-2, "label_smoothing": 0.1}])
@pytest.mark.parametrize("chunk", [1, 7, 48, 1000])
def test_cross_entropy_in_chunks_is_cross_entropy(chunk, settings):
    rng = np.random.default_rng(1)
    x, head = jnp.asarray(rng.normal(size=(3, 16, 8))), jnp.asarray(rng.normal(size=(8, 101)))
    targets, mask = jnp.asarray(rng.integers(0, 101, (3, 16)), jnp.int32), jnp.asarray(rng.random((3, 16)) < 0.6)
    ours = lambda x, w: loss_of(101, chunk, **settings)(x, (w, lambda w: w), targets, mask)  # noqa: E731
    theirs = lambda x, w: plain(x, w, targets, mask, **settings)  # noqa: E731
    (a, da), (b, db) = (jax.value_and_grad(f, (0, 1))(x, head) for f in (ours, theirs))
    np.testing.assert_allclose(a, b, rtol=1e-13)
    for left, right in zip(da, db, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-12)


def test_whole_logits_are_never_held():
    x, head = jax.ShapeDtypeStruct((8, 64, 8), jnp.float64), jax.ShapeDtypeStruct((8, 997), jnp.float64)
    targets, mask = jax.ShapeDtypeStruct((8, 64), jnp.int32), jax.ShapeDtypeStruct((8, 64), jnp.bool_)
    slope = jax.jit(jax.grad(lambda x, w, t, m: loss_of(997, 32)(x, (w, lambda w: w), t, m), (0, 1)))
    used = slope.lower(x, head, targets, mask).compile().memory_analysis().temp_size_in_bytes
    assert used < 8 * 64 * 997 * 8 / 3, f"{used} bytes of temporaries; whole logits are {8 * 64 * 997 * 8}"


def test_a_masked_batch_has_no_loss_and_no_gradient():
    x, head = jnp.ones((1, 4, 8)), jnp.ones((8, 11))
    mask = jnp.zeros((1, 4), bool)
    value, slope = jax.value_and_grad(
        lambda x: loss_of(11, 4)(x, (head, lambda w: w), jnp.zeros((1, 4), jnp.int32), mask)
    )(x)
    assert value == 0 and not np.asarray(slope).any()
