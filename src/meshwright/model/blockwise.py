"""Blockwise causal attention in plain JAX, with backward passes of its own: memory grows with T, not with T squared.

A short sequence saves its unnormalised shares. A long one saves a number a query and computes its shares again, block by
block, in loops whose length follows the causal triangle (FlashAttention-2, Dao 2023, arXiv:2307.08691, algorithms 1, 2).

No batched matmul here contracts its operands' second-last dims: XLA:CPU does those five times slower than the same
product of a transposed copy (benchmarks/README.md). The rows R of a block are its (G, T): query heads that share a
key/value head are rows of one matmul.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.compat import vary, varying
from meshwright.engine import wider

SHORT_LENGTH = 512
"""The longest T whose shares are saved."""
BLOCK = 256
"""Queries, and keys, of a block of a long sequence."""


def attend(q_BKGTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """o_BKGTH of scaled queries; every operand varies over the same mesh axes."""
    length = q_BKGTH.shape[3]
    if length <= SHORT_LENGTH:
        return _short(q_BKGTH, k_BKSH, v_BKSH, segments_BT)
    missing = -length % BLOCK  # filled up behind the end, where no real query looks
    pad = lambda x, dim: jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])  # noqa: E731
    padded = _long(pad(q_BKGTH, 3), pad(k_BKSH, 2), pad(v_BKSH, 2), pad(segments_BT, 1))
    return padded[:, :, :, :length]


def blocks(length: int, most: int) -> list[tuple[int, int]]:
    """Where blocks of at most `most` queries begin and end; at least two, for each skips the keys behind its end."""
    count = 1 if length < 64 else max(2, -(-length // most))
    return list(itertools.pairwise(i * length // count for i in range(count + 1)))


def rows(x_BKGTH: jax.Array) -> jax.Array:
    b, k, g, t, h = x_BKGTH.shape
    return x_BKGTH.reshape(b, k, g * t, h)


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of two in the dtype of `b`, summed and given in float32 or wider."""
    return jnp.einsum(equation, a.astype(b.dtype), b, preferred_element_type=wider(b.dtype, jnp.float32))


def _turned(x: jax.Array) -> jax.Array:
    """The last two dims swapped by a copy: XLA would fold a bare transpose into the matmul beside it."""
    return lax.optimization_barrier(jnp.swapaxes(x, 2, 3))


def _seen(row_count: int, segments_BT: jax.Array, segments_BS: jax.Array, ahead: jax.Array | int) -> jax.Array:
    """seen_BKRS: key s is at most query t + `ahead`, and of the same document."""
    t, s = segments_BT.shape[1], segments_BS.shape[1]
    causal_TS = jnp.arange(s, dtype=jnp.int32) <= jnp.arange(t, dtype=jnp.int32)[:, None] + ahead
    seen_BTS = causal_TS & (segments_BT[:, :, None] == segments_BS[:, None, :])
    return jnp.tile(seen_BTS, (1, row_count // t, 1))[:, None]


def scores(q_BKRH, k_BKSH, segments_BT, segments_BS, ahead):
    """The scores of rows by keys, the lowest number where a key is not seen."""
    scores_BKRS = product("BKRH,BKSH->BKRS", q_BKRH, k_BKSH)
    seen_BKRS = _seen(q_BKRH.shape[2], segments_BT, segments_BS, ahead)
    return jnp.where(seen_BKRS, scores_BKRS, jnp.finfo(scores_BKRS.dtype).min)


# ---- short: shares are saved ---------------------------------------------------------------------------


@jax.custom_vjp
def _short(q_BKGTH, k_BKSH, v_BKSH, segments_BT):
    return _short_forward(q_BKGTH, k_BKSH, v_BKSH, segments_BT)[0]


def _short_forward(q_BKGTH, k_BKSH, v_BKSH, segments_BT):
    outs, saved = [], []
    for start, stop in blocks(q_BKGTH.shape[3], SHORT_LENGTH):
        q_BKRH = rows(q_BKGTH[:, :, :, start:stop])
        scores_BKRS = scores(q_BKRH, k_BKSH[:, :, :stop], segments_BT[:, start:stop], segments_BT[:, :stop], start)
        e_BKRS = jnp.exp(scores_BKRS - scores_BKRS.max(-1, keepdims=True))
        inverse_BKR = 1 / e_BKRS.sum(-1, keepdims=True)
        o_BKRH = product("BKRS,BKSH->BKRH", e_BKRS, v_BKSH[:, :, :stop]) * inverse_BKR
        outs.append(o_BKRH.astype(q_BKGTH.dtype).reshape(q_BKGTH[:, :, :, start:stop].shape))
        saved.append((e_BKRS, inverse_BKR))
    o_BKGTH = jnp.concatenate(outs, axis=3)
    return o_BKGTH, (q_BKGTH, k_BKSH, v_BKSH, o_BKGTH, saved)


def _short_backward(residuals, do_BKGTH):
    q_BKGTH, k_BKSH, v_BKSH, o_BKGTH, saved = residuals
    length, dtype = q_BKGTH.shape[3], q_BKGTH.dtype
    dq: list[jax.Array] = []
    dk_BKHS: Any = 0
    dv_BKHS: Any = 0
    for (start, stop), (e_BKRS, inverse_BKR) in zip(blocks(length, SHORT_LENGTH), saved, strict=True):
        q_BKRH, o_BKRH, do_BKRH = (rows(x[:, :, :, start:stop]) for x in (q_BKGTH, o_BKGTH, do_BKGTH))
        scaled_BKRH = do_BKRH.astype(e_BKRS.dtype) * inverse_BKR  # do scaled, so that e need not be
        delta_BKR = (scaled_BKRH * o_BKRH.astype(e_BKRS.dtype)).sum(-1, keepdims=True)
        scaled_BKRH = scaled_BKRH.astype(dtype)
        ds_BKRS = e_BKRS * (product("BKRH,BKSH->BKRS", scaled_BKRH, v_BKSH[:, :, :stop]) - delta_BKR)
        ds_BKRS = ds_BKRS.astype(dtype)
        dq_BKRH = product("BKRS,BKSH->BKRH", ds_BKRS, k_BKSH[:, :, :stop]).astype(dtype)
        dq.append(dq_BKRH.reshape(q_BKGTH[:, :, :, start:stop].shape))
        rest = ((0, 0), (0, 0), (0, 0), (0, length - stop))
        dk_BKHS += jnp.pad(product("BKHR,BKRS->BKHS", _turned(q_BKRH), ds_BKRS), rest)
        dv_BKHS += jnp.pad(product("BKHR,BKRS->BKHS", _turned(scaled_BKRH), e_BKRS.astype(dtype)), rest)
    dk_BKSH, dv_BKSH = (_turned(x.astype(dtype)) for x in (dk_BKHS, dv_BKHS))
    return jnp.concatenate(dq, axis=3), dk_BKSH, dv_BKSH, None


_short.defvjp(_short_forward, _short_backward)


# ---- long: shares are computed again -------------------------------------------------------------------


@jax.custom_vjp
def _long(q_BKGTH, k_BKSH, v_BKSH, segments_BT):
    return _long_forward(q_BKGTH, k_BKSH, v_BKSH, segments_BT)[0]


def _stacked(x_BKGTH: jax.Array) -> jax.Array:
    """Blocks of rows, stacked in front: x[block, B, K, R, H]."""
    b, k, g, t, h = x_BKGTH.shape
    return jnp.moveaxis(x_BKGTH.reshape(b, k, g, t // BLOCK, BLOCK, h), 3, 0).reshape(-1, b, k, g * BLOCK, h)


def _unstacked(x: jax.Array, like_BKGTH: jax.Array) -> jax.Array:
    b, k, g, _, h = like_BKGTH.shape
    return jnp.moveaxis(x.reshape(-1, b, k, g, BLOCK, h), 0, 3).reshape(like_BKGTH.shape)


def _block(x: jax.Array, number: jax.Array, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, number * BLOCK, BLOCK, dim)


def _add_block(total: jax.Array, number: jax.Array, part: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(total, _block(total, number, 2) + part, number * BLOCK, 2)


def _zeros(shape: tuple[int, ...], like: jax.Array, value: float = 0.0) -> jax.Array:
    return vary(jnp.full(shape, value, wider(like.dtype, jnp.float32)), tuple(varying(like)))


def _long_forward(q_BKGTH, k_BKSH, v_BKSH, segments_BT):
    def one(i, q_BKRH):
        def meet(j, carry):
            o_BKRH, top_BKR, sum_BKR = carry
            at = _block(segments_BT, i, 1), _block(segments_BT, j, 1), (i - j) * BLOCK
            seen_BKRS = _seen(q_BKRH.shape[2], *at)
            scores_BKRS = scores(q_BKRH, _block(k_BKSH, j, 2), *at)
            new_BKR = jnp.maximum(top_BKR, scores_BKRS.max(-1, keepdims=True))
            e_BKRS = jnp.where(seen_BKRS, jnp.exp(scores_BKRS - new_BKR), 0)  # a block may hold nothing that is seen
            kept_BKR = jnp.exp(top_BKR - new_BKR)
            more_BKRH = product("BKRS,BKSH->BKRH", e_BKRS, _block(v_BKSH, j, 2))
            return o_BKRH * kept_BKR + more_BKRH, new_BKR, sum_BKR * kept_BKR + e_BKRS.sum(-1, keepdims=True)

        number = (*q_BKRH.shape[:3], 1)
        lowest = float(jnp.finfo(wider(q_BKRH.dtype, jnp.float32)).min)
        start = _zeros(q_BKRH.shape, q_BKRH), _zeros(number, q_BKRH, lowest), _zeros(number, q_BKRH)
        o_BKRH, top_BKR, sum_BKR = lax.fori_loop(0, i + 1, meet, start)
        return i + 1, ((o_BKRH / sum_BKR).astype(q_BKRH.dtype), top_BKR + jnp.log(sum_BKR))

    _, (o, log_sum) = lax.scan(one, jnp.int32(0), _stacked(q_BKGTH))
    o_BKGTH = _unstacked(o, q_BKGTH)
    return o_BKGTH, (q_BKGTH, k_BKSH, v_BKSH, segments_BT, o_BKGTH, log_sum)


def _long_backward(residuals, do_BKGTH):
    q_BKGTH, k_BKSH, v_BKSH, segments_BT, o_BKGTH, log_sum = residuals
    dtype = q_BKGTH.dtype

    def one(carry, block):
        i, dk_BKSH, dv_BKSH = carry
        q_BKRH, o_BKRH, do_BKRH, log_sum_BKR = block
        wide = log_sum_BKR.dtype
        delta_BKR = (do_BKRH.astype(wide) * o_BKRH.astype(wide)).sum(-1, keepdims=True)
        q_BKHR, do_BKHR = _turned(q_BKRH), _turned(do_BKRH)

        def meet(j, carry):
            dq_BKRH, dk_BKSH, dv_BKSH = carry
            at = _block(segments_BT, i, 1), _block(segments_BT, j, 1), (i - j) * BLOCK
            kj_BKSH, vj_BKSH = _block(k_BKSH, j, 2), _block(v_BKSH, j, 2)
            share_BKRS = jnp.exp(scores(q_BKRH, kj_BKSH, *at) - log_sum_BKR)
            dv_BKHS = product("BKHR,BKRS->BKHS", do_BKHR, share_BKRS.astype(dtype))
            ds_BKRS = (share_BKRS * (product("BKRH,BKSH->BKRS", do_BKRH, vj_BKSH) - delta_BKR)).astype(dtype)
            dk_BKHS = product("BKHR,BKRS->BKHS", q_BKHR, ds_BKRS)
            dq_BKRH = dq_BKRH + product("BKRS,BKSH->BKRH", ds_BKRS, kj_BKSH)
            return dq_BKRH, _add_block(dk_BKSH, j, _turned(dk_BKHS)), _add_block(dv_BKSH, j, _turned(dv_BKHS))

        start = _zeros(q_BKRH.shape, q_BKRH), dk_BKSH, dv_BKSH
        dq_BKRH, dk_BKSH, dv_BKSH = lax.fori_loop(0, i + 1, meet, start)
        return (i + 1, dk_BKSH, dv_BKSH), dq_BKRH.astype(dtype)

    start = jnp.int32(0), _zeros(k_BKSH.shape, k_BKSH), _zeros(v_BKSH.shape, v_BKSH)
    stacked = _stacked(q_BKGTH), _stacked(o_BKGTH), _stacked(do_BKGTH), log_sum
    (_, dk_BKSH, dv_BKSH), dq = lax.scan(one, start, stacked)
    return _unstacked(dq, q_BKGTH), dk_BKSH.astype(dtype), dv_BKSH.astype(dtype), None


_long.defvjp(_long_forward, _long_backward)
