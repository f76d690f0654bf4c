"""Causal attention within documents, blockwise: memory grows with T, not with T squared.

Every block of queries meets only the keys up to its own end; in a long sequence its shares are computed again in the
backward pass (FlashAttention, Dao et al. 2022, arXiv:2205.14135, at the grain of whole blocks of queries). On TPU and GPU
the platform's own kernels do the same.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from meshwright import random
from meshwright.compat import vary, varying
from meshwright.engine import wider

SAVED_LENGTH = 512
"""Up to this T the shares of a block are saved for the backward pass; beyond it they are computed again."""


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array,
    *,
    drop: "Dropout | None" = None,
    kernel: str = "blockwise",
) -> jax.Array:
    """o_BTNH. Position t sees the positions s <= t of its own document (equal `segments`, 1 and up; 0 is padding).

    Query heads are grouped onto key/value heads in order: head n uses key/value head n // (N / K).
    """
    if kernel == "splash" and drop is None:
        return _splash(q_BTNH, k_BSKH, v_BSKH, segments_BT)
    if kernel == "cudnn" and drop is None:
        return _cudnn(q_BTNH, k_BSKH, v_BSKH, segments_BT)
    if drop is not None:
        return _dropped(q_BTNH, k_BSKH, v_BSKH, segments_BT, drop)
    b, t, n, h = q_BTNH.shape
    k = k_BSKH.shape[2]
    q_BKGTH = (q_BTNH * h**-0.5).astype(q_BTNH.dtype).reshape(b, t, k, n // k, h).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in (k_BSKH, v_BSKH))
    axes = tuple(varying(q_BKGTH) | varying(k_BKSH) | varying(v_BKSH) | varying(segments_BT))
    o_BKGTH = _blockwise(*(vary(x, axes) for x in (q_BKGTH, k_BKSH, v_BKSH, segments_BT)))
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def _blocks(length: int) -> list[tuple[int, int]]:
    """Where blocks of queries begin and end. More of them skip more of what is not seen, and make a longer program."""
    count = 1 if length < 64 else 2 if length <= SAVED_LENGTH else -(-length // 512)
    return list(itertools.pairwise(i * length // count for i in range(count + 1)))


@jax.custom_vjp
def _blockwise(q_BKGTH, k_BKSH, v_BKSH, segments_BT):
    return _blockwise_forward(q_BKGTH, k_BKSH, v_BKSH, segments_BT)[0]


def _blockwise_forward(q_BKGTH, k_BKSH, v_BKSH, segments_BT):
    """The rows R of a block are its (G, T). What stays per block: exp(score - max) unnormalised (or the max), and 1 / sum."""
    outs, saved = [], []
    for start, stop in _blocks(q_BKGTH.shape[3]):
        q_BKRH = _rows(q_BKGTH[:, :, :, start:stop])
        scores_BKRS = _scores(q_BKRH, k_BKSH[:, :, :stop], segments_BT, start, stop)
        top_BKR = scores_BKRS.max(-1, keepdims=True)
        e_BKRS = jnp.exp(scores_BKRS - top_BKR)
        inverse_BKR = 1 / e_BKRS.sum(-1, keepdims=True)
        o_BKRH = _product("BKRS,BKSH->BKRH", e_BKRS, v_BKSH[:, :, :stop]) * inverse_BKR
        outs.append(o_BKRH.astype(q_BKGTH.dtype).reshape(q_BKGTH[:, :, :, start:stop].shape))
        saved.append((e_BKRS if q_BKGTH.shape[3] <= SAVED_LENGTH else top_BKR, inverse_BKR))
    o_BKGTH = jnp.concatenate(outs, axis=3)
    return o_BKGTH, (q_BKGTH, k_BKSH, v_BKSH, segments_BT, o_BKGTH, saved)


def _blockwise_backward(residuals, do_BKGTH):
    """No batched matmul contracts its operands' second-last dims: XLA:CPU does those five times slower (benchmarks/README.md)."""
    q_BKGTH, k_BKSH, v_BKSH, segments_BT, o_BKGTH, saved = residuals
    length, dtype = q_BKGTH.shape[3], q_BKGTH.dtype
    dq, dk_BKHS, dv_BKHS = [], 0, 0
    for (start, stop), (e_BKRS, inverse_BKR) in zip(_blocks(length), saved, strict=True):
        block = lambda x_BKGTH, start=start, stop=stop: _rows(x_BKGTH[:, :, :, start:stop])  # noqa: E731
        q_BKRH, o_BKRH, do_BKRH = block(q_BKGTH), block(o_BKGTH), block(do_BKGTH)
        if length > SAVED_LENGTH:
            e_BKRS = jnp.exp(_scores(q_BKRH, k_BKSH[:, :, :stop], segments_BT, start, stop) - e_BKRS)
        scaled_BKRH = do_BKRH.astype(e_BKRS.dtype) * inverse_BKR
        delta_BKR = (scaled_BKRH * o_BKRH.astype(e_BKRS.dtype)).sum(-1, keepdims=True)
        scaled_BKRH = scaled_BKRH.astype(dtype)
        dp_BKRS = _product("BKRH,BKSH->BKRS", scaled_BKRH, v_BKSH[:, :, :stop])
        ds_BKRS = (e_BKRS * (dp_BKRS - delta_BKR)).astype(dtype)
        dq_BKRH = _product("BKRS,BKSH->BKRH", ds_BKRS, k_BKSH[:, :, :stop])
        dq.append(dq_BKRH.astype(dtype).reshape(q_BKGTH[:, :, :, start:stop].shape))
        rest = ((0, 0), (0, 0), (0, 0), (0, length - stop))
        dk_BKHS += jnp.pad(_product("BKHR,BKRS->BKHS", _turned(q_BKRH), ds_BKRS), rest)
        dv_BKHS += jnp.pad(_product("BKHR,BKRS->BKHS", _turned(scaled_BKRH), e_BKRS.astype(dtype)), rest)
    dk_BKSH, dv_BKSH = (_turned(x.astype(dtype)) for x in (dk_BKHS, dv_BKHS))
    return jnp.concatenate(dq, axis=3), dk_BKSH, dv_BKSH, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _rows(x_BKGTH: jax.Array) -> jax.Array:
    b, k, g, t, h = x_BKGTH.shape
    return x_BKGTH.reshape(b, k, g * t, h)


def _turned(x: jax.Array) -> jax.Array:
    """The last two dims swapped by a copy: XLA would fold a bare transpose into the matmul beside it."""
    return lax.optimization_barrier(jnp.swapaxes(x, 2, 3))


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a.astype(b.dtype), b, preferred_element_type=wider(b.dtype, jnp.float32))


def _scores(q_BKRH, k_BKSH, segments_BT, start, stop):
    """The scores of a block's rows by the keys up to its end, the lowest number where a key is not seen."""
    scores_BKRS = _product("BKRH,BKSH->BKRS", q_BKRH, k_BKSH)
    seen_BTS = _seen(segments_BT[:, start:stop], segments_BT[:, :stop], start)
    rows = scores_BKRS.shape[2] // (stop - start)
    seen_BRS = jnp.tile(seen_BTS, (1, rows, 1))[:, None]
    return jnp.where(seen_BRS, scores_BKRS, jnp.finfo(scores_BKRS.dtype).min)


def _seen(segments_BT, segments_BS, start):
    t, s = segments_BT.shape[1], segments_BS.shape[1]
    causal_TS = jnp.arange(s)[None, :] <= start + jnp.arange(t)[:, None]
    return causal_TS & (segments_BT[:, :, None] == segments_BS[:, None, :])


def _dropped(q_BTNH, k_BSKH, v_BSKH, segments_BT, drop):
    """With dropout of the shares, a block of queries at a time, each recomputed in the backward pass."""
    outs = []
    for start, stop in _blocks(q_BTNH.shape[1]):
        one = jax.checkpoint(functools.partial(_dropped_block, start=start, drop=drop))
        outs.append(one(q_BTNH[:, start:stop], k_BSKH[:, :stop], v_BSKH[:, :stop], segments_BT[:, :stop]))
    return jnp.concatenate(outs, axis=1)


def _dropped_block(q_BTNH, k_BSKH, v_BSKH, segments_BS, *, start, drop):
    b, t, n, h = q_BTNH.shape
    s, k = k_BSKH.shape[1:3]
    q_BKRH = _rows((q_BTNH * h**-0.5).astype(q_BTNH.dtype).reshape(b, t, k, n // k, h).transpose(0, 2, 3, 1, 4))
    k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in (k_BSKH, v_BSKH))
    share_BKRS = jax.nn.softmax(_scores(q_BKRH, k_BKSH, segments_BS, start, start + t), axis=-1)
    share_BKRS = drop.attention(share_BKRS.reshape(b, n, t, s), start).reshape(share_BKRS.shape)
    o_BKRH = _product("BKRS,BKSH->BKRH", share_BKRS, v_BKSH).astype(q_BTNH.dtype)
    return o_BKRH.reshape(b, n, t, h).transpose(0, 2, 1, 3)


class Dropout:
    """Dropout of attention shares, a function of (key, sample, head, query position, key position)."""

    def __init__(self, rate: float, key: jax.Array, sample_B: jax.Array, head_N: jax.Array, length: int):
        self.rate, self.key, self.length = rate, key, length
        self.row_BN = sample_B.astype(jnp.uint32)[:, None] * jnp.uint32(2**12) + head_N.astype(jnp.uint32)

    def attention(self, share_BNTS: jax.Array, start: int) -> jax.Array:
        t, s = share_BNTS.shape[2:]
        query_T, key_S = (jnp.arange(n, dtype=jnp.uint32) for n in (t, s))
        column_TS = (query_T[:, None] + jnp.uint32(start)) * jnp.uint32(self.length) + key_S
        kept = random.keep(self.key, self.rate, self.row_BN[:, :, None, None], column_TS)
        return jnp.where(kept, share_BNTS / (1 - self.rate), 0)


def _cudnn(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """cuDNN's flash attention where a batch holds one document a row cannot be known here: documents become a mask."""
    seen_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=seen_BTS[:, None], is_causal=True, implementation="cudnn"
    )


def _splash(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    from meshwright.model.splash import splash_attention

    return splash_attention(q_BTNH, k_BSKH, v_BSKH, segments_BT)
