"""Cross-entropy over a split vocabulary, a chunk of tokens at a time: whole logits are never held.

Vocabulary parallelism is Megatron-LM's (Shoeybi et al. 2019, arXiv:1909.08053, section 3); gradients are made in the same
pass as the loss, so that no chunk's logits are computed twice (Hsu et al. 2024, Liger Kernel, arXiv:2410.10989).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.compat import vary, varying
from meshwright.engine import Engine, max_over, place, sum_over

Whole = Callable[[jax.Array], jax.Array]
Head = tuple[jax.Array, Whole]


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of one token: (1 - s) nll + s mean over the vocabulary of nll + z log(Z)^2, s and z as configured."""

    engine: Engine
    chunk_tokens: int
    """Tokens whose logits are held at one time by the devices that split the vocabulary, for each of them."""
    z_loss: float
    label_smoothing: float

    def __call__(self, x_BTD: jax.Array, head: Head, targets_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        """The sum over this device's unmasked tokens, equal on all that split the vocabulary.

        `x_BTD` has all tokens of the context shard. `head` is a working parameter and the function that makes head_DV
        of it, whole in D and split in V (padding included); its gradient is back on its shards before the layers' turn.
        """
        axes = self.engine.layout.vocabulary_axes
        d = x_BTD.shape[-1]
        tokens = targets_BT.size
        count = -(-tokens // (self.chunk_tokens * self.engine.layout.degree(axes)))
        chunk = -(-tokens // count)
        x_MTD = _chunks(x_BTD.reshape(-1, d), count, chunk)
        targets_MT, mask_MT = (_chunks(a.reshape(-1), count, chunk) for a in (targets_BT, mask_BT))
        leaf, whole = head
        return _loss_sum(self, whole, vary(x_MTD, axes), leaf, targets_MT, mask_MT)

    def chunk(self, x_TD, head_DV, target_T, mask_T):
        """The summed loss of a chunk, and its gradients by x and by the logits (for a cotangent of one)."""
        engine = self.engine
        axes, v_true, dtype = engine.layout.vocabulary_axes, engine.layout.model.vocab_size, engine.logits_dtype
        v = head_DV.shape[1]
        first = place(axes) * v
        z_TV = jnp.matmul(x_TD, head_DV, preferred_element_type=dtype)
        number_V = jnp.arange(v, dtype=jnp.int32)
        real_V = number_V < v_true - first
        padded = engine.layout.padded_vocab_size() != v_true
        z_TV = jnp.where(real_V, z_TV, jnp.finfo(dtype).min) if padded else z_TV
        top_T = max_over(z_TV.max(-1), axes)
        e_TV = jnp.exp(z_TV - top_T[:, None])
        total_T = sum_over(e_TV.sum(-1), axes)
        log_z_T = jnp.log(total_T) + top_T
        is_target_TV = number_V == (target_T - first)[:, None]
        s = self.label_smoothing
        wanted_T = (1 - s) * sum_over(jnp.where(is_target_TV, z_TV, 0).sum(-1), axes)
        if s:
            wanted_T += s / v_true * sum_over(jnp.where(real_V, z_TV, 0).sum(-1), axes)
        loss_T = log_z_T - wanted_T + self.z_loss * log_z_T**2
        weight_T = mask_T.astype(dtype)
        slope_T = (1 + 2 * self.z_loss * log_z_T) * weight_T / total_T
        dz_TV = e_TV * slope_T[:, None] - jnp.where(is_target_TV, (1 - s) * weight_T[:, None], 0)
        if s:
            dz_TV -= jnp.where(real_V, s / v_true * weight_T[:, None], 0)
        dz_TV = dz_TV.astype(x_TD.dtype)
        return (loss_T * weight_T).sum(), jnp.matmul(dz_TV, head_DV.T), dz_TV

    def head_gradient(self, x_TD, dz_TV):
        """dhead_DV of some tokens, in float32 or wider."""
        return jnp.matmul(x_TD.T, dz_TV, preferred_element_type=self.engine.wide_dtype)


def _chunks(a: jax.Array, count: int, chunk: int) -> jax.Array:
    """Cut the first dim into `count` chunks, filled up with zeros (masked tokens) at the end."""
    missing = count * chunk - a.shape[0]
    a = jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)) if missing else a
    return a.reshape(count, chunk, *a.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss_sum(loss: CrossEntropy, whole: Whole, x_MTD, leaf, targets_MT, mask_MT):
    return _forward(loss, whole, x_MTD, leaf, targets_MT, mask_MT)[0]


def _forward(loss, whole, x_MTD, leaf, targets_MT, mask_MT):
    """The loss, and its gradients by x and by the leaf.

    The gradient by the head is a sum over all tokens. It is added up in float32, a chunk at a time, or, where that takes
    less memory (bfloat16 of [tokens, V] and float32 of [D, V]), made at the end from every chunk's gradient by the logits.
    """
    head_DV, onto_leaf = jax.vjp(whole, leaf)
    count, chunk, d = x_MTD.shape
    at_end = count * chunk * head_DV.dtype.itemsize <= d * loss.engine.wide_dtype.itemsize
    own = tuple(varying(x_MTD) - set(loss.engine.layout.vocabulary_axes))

    def one(carry, chunk):
        total, dhead_DV = carry
        loss_sum, dx_TD, dz_TV = loss.chunk(chunk[0], head_DV, *chunk[1:])
        if not at_end:
            dhead_DV += loss.head_gradient(chunk[0], dz_TV)
        return (total + vary(loss_sum, own), dhead_DV), (dx_TD, dz_TV if at_end else None)

    total = vary(jnp.zeros((), loss.engine.logits_dtype), own)
    dhead_DV = jnp.zeros((0,) if at_end else head_DV.shape, loss.engine.wide_dtype)
    carry = total, vary(dhead_DV, tuple(varying(x_MTD) | varying(head_DV)))
    if count == 1:
        (total, dhead_DV), (dx_TD, dz_TV) = one(carry, (x_MTD[0], targets_MT[0], mask_MT[0]))
        dx_MTD, dz_MTV = dx_TD[None], None if dz_TV is None else dz_TV[None]
    else:
        (total, dhead_DV), (dx_MTD, dz_MTV) = lax.scan(one, carry, (x_MTD, targets_MT, mask_MT))
    if dz_MTV is not None:
        dhead_DV = loss.head_gradient(x_MTD.reshape(-1, d), dz_MTV.reshape(-1, head_DV.shape[1]))
    (dleaf,) = onto_leaf(dhead_DV.astype(head_DV.dtype))
    # the whole dhead_DV is gone before the layers' turn
    return total, lax.optimization_barrier((dx_MTD, dleaf))


def _backward(loss, whole, saved, gradient):
    scale = lambda a: a * gradient.astype(a.dtype)  # noqa: E731
    dx_MTD, dleaf = saved
    return scale(dx_MTD), scale(dleaf), None, None


_loss_sum.defvjp(_forward, _backward)
