"""Causal attention within documents, blockwise: memory grows with T, not with T squared.

Every query block meets only the keys up to its own end, and each block is recomputed in the backward pass (the idea of
FlashAttention, Dao et al. 2022, arXiv:2205.14135, at the grain of whole query blocks). On TPU and GPU the platform's own
kernels do the same.
"""

import functools
import math

import jax
import jax.numpy as jnp

from meshwright import random
from meshwright.engine import wider

QUERY_BLOCK = 512


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
    length = q_BTNH.shape[1]
    block = (
        QUERY_BLOCK if length % QUERY_BLOCK == 0 else length if length < QUERY_BLOCK else math.gcd(length, QUERY_BLOCK)
    )
    outputs = []
    for start in range(0, length, block):
        stop = start + block
        one = functools.partial(_attend_block, start=start, drop=drop)
        one = one if length == block else jax.checkpoint(one)
        outputs.append(
            one(
                q_BTNH[:, start:stop],
                k_BSKH[:, :stop],
                v_BSKH[:, :stop],
                segments_BT[:, start:stop],
                segments_BT[:, :stop],
            )
        )
    return jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]


def _attend_block(q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS, *, start, drop):
    b, t, n, h = q_BTNH.shape
    s, k = k_BSKH.shape[1:3]
    wide = wider(q_BTNH.dtype, jnp.float32)
    q_BKGTH = q_BTNH.reshape(b, t, k, n // k, h).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in (k_BSKH, v_BSKH))
    scores_BKGTS = jnp.einsum("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, preferred_element_type=wide) * h**-0.5
    causal_TS = jnp.arange(s)[None, :] <= start + jnp.arange(t)[:, None]
    seen_BTS = causal_TS & (segments_BT[:, :, None] == segments_BS[:, None, :])
    scores_BKGTS = jnp.where(seen_BTS[:, None, None], scores_BKGTS, jnp.finfo(wide).min)
    share_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    if drop is not None:
        share_BKGTS = drop.attention(share_BKGTS.reshape(b, n, t, s), start).reshape(share_BKGTS.shape)
    o_BKGTH = jnp.einsum("BKGTS,BKSH->BKGTH", share_BKGTS.astype(q_BTNH.dtype), v_BKSH)
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


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
