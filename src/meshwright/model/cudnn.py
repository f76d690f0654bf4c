"""Causal attention on GPU: cuDNN's flash attention, by JAX's public name for it; 16-bit only.

A row that holds one document needs no mask: what stands after a position is never seen, and padding comes last. A row
of several gets one, bf16[B,1,T,T], which cuDNN adds to the scores: 2 B T^2 bytes on a device, the same for all heads,
made anew for every layer. Its layout for packed sequences (no mask; skips other documents) is private to JAX up to 0.12
(jax-ml/jax#29731), and in 0.11.0 and before read wrong keys where K < N (jax-ml/jax#39521): benchmarks/gpu.py
measures both ways.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from meshwright.compat import vary, varying

FORWARD = "dot_product_attention_fwd_wrapper"
"""JAX's primitive of the forward pass. It gives the output and each row's log of a sum: all that the backward pass needs."""


def cudnn_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array, *, packed: bool
) -> jax.Array:
    """o_BTNH. Position t sees the positions s <= t, where `packed` only those of its own document.

    Without `packed` the result at padding is of no document; no other position sees it, and the loss does not count it.
    """
    axes = tuple(frozenset().union(*map(varying, (q_BTNH, k_BSKH, v_BSKH, segments_BT))))
    q_BTNH, k_BSKH, v_BSKH, segments_BT = (vary(x, axes) for x in (q_BTNH, k_BSKH, v_BSKH, segments_BT))
    if not packed:
        return _flash(q_BTNH, k_BSKH, v_BSKH)
    length = q_BTNH.shape[1]
    if length % 2:  # with a mask cuDNN's backward pass asks for an even T
        fill = lambda x: jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
        q_BTNH, k_BSKH, v_BSKH, segments_BT = (fill(x) for x in (q_BTNH, k_BSKH, v_BSKH, segments_BT))
    seen_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    return _flash(q_BTNH, k_BSKH, v_BSKH, seen_BTS[:, None])[:, :length]


def _flash(q_BTNH, k_BSKH, v_BSKH, mask=None):
    return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, mask=mask, is_causal=True, implementation="cudnn")


def keep(*names: str) -> Callable[..., bool]:
    """The policy of `jax.checkpoint` that keeps the named arrays.

    For `attention` it keeps what the forward pass gives as the kernel gives it, so that it is not run a second time for the
    sums, which have no name.
    """
    others = jax.checkpoint_policies.save_only_these_names(*(name for name in names if name != "attention"))
    if "attention" not in names:
        return others
    return lambda primitive, *args, **params: primitive.name == FORWARD or others(primitive, *args, **params)
