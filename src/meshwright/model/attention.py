"""Causal attention within documents, blockwise: memory grows with T, not with T squared.

`blockwise.py` holds the form for any platform; on TPU and GPU the platform's own kernels do the same.
"""

import functools

import jax
import jax.numpy as jnp

from meshwright import random
from meshwright.compat import vary, varying
from meshwright.model import blockwise, cudnn


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array,
    *,
    drop: "Dropout | None" = None,
    kernel: str = "blockwise",
    packed: bool = True,
) -> jax.Array:
    """o_BTNH. Position t sees the positions s <= t of its own document (equal `segments`, 1 and up; 0 is padding).

    Query heads are grouped onto key/value heads in order: head n uses key/value head n // (N / K). `packed`: whether a
    row may hold several documents; where none does, a kernel may leave documents alone (see `cudnn.py`).
    """
    if kernel == "splash" and drop is None:
        return _splash(q_BTNH, k_BSKH, v_BSKH, segments_BT)
    if kernel == "cudnn" and drop is None:
        return cudnn.cudnn_attention(q_BTNH, k_BSKH, v_BSKH, segments_BT, packed=packed)
    if drop is not None:
        return _dropped(q_BTNH, k_BSKH, v_BSKH, segments_BT, drop)
    b, t, n, h = q_BTNH.shape
    k = k_BSKH.shape[2]
    q_BKGTH = (q_BTNH * h**-0.5).astype(q_BTNH.dtype).reshape(b, t, k, n // k, h).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in (k_BSKH, v_BSKH))
    axes = tuple(varying(q_BKGTH) | varying(k_BKSH) | varying(v_BKSH) | varying(segments_BT))
    o_BKGTH = blockwise.attend(*(vary(x, axes) for x in (q_BKGTH, k_BKSH, v_BKSH, segments_BT)))
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


DROPOUT_BLOCK = 512


def _dropped(q_BTNH, k_BSKH, v_BSKH, segments_BT, drop):
    """With dropout of the shares, a block of queries at a time, each recomputed in the backward pass."""
    outs = []
    for start, stop in blockwise.blocks(q_BTNH.shape[1], DROPOUT_BLOCK):
        one = jax.checkpoint(functools.partial(_dropped_block, start=start, drop=drop))
        outs.append(one(q_BTNH[:, start:stop], k_BSKH[:, :stop], v_BSKH[:, :stop], segments_BT[:, :stop]))
    return jnp.concatenate(outs, axis=1)


def _dropped_block(q_BTNH, k_BSKH, v_BSKH, segments_BS, *, start, drop):
    b, t, n, h = q_BTNH.shape
    s, k = k_BSKH.shape[1:3]
    q_BKRH = blockwise.rows(
        (q_BTNH * h**-0.5).astype(q_BTNH.dtype).reshape(b, t, k, n // k, h).transpose(0, 2, 3, 1, 4)
    )
    k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in (k_BSKH, v_BSKH))
    share_BKRS = jax.nn.softmax(blockwise.scores(q_BKRH, k_BKSH, segments_BS[:, start:], segments_BS, start), axis=-1)
    share_BKRS = drop.attention(share_BKRS.reshape(b, n, t, s), start).reshape(share_BKRS.shape)
    o_BKRH = blockwise.product("BKRS,BKSH->BKRH", share_BKRS, v_BKSH).astype(q_BTNH.dtype)
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


def _splash(q_BTNH, k_BSKH, v_BSKH, segments_BT):
    from meshwright.model.splash import splash_attention

    return splash_attention(q_BTNH, k_BSKH, v_BSKH, segments_BT)
