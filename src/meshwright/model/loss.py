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
        """The sum over this device's unmasked tokens, equal on all tensor ranks.

        `x_BTD` has all tokens of the context shard. `head` is a working parameter and the function that makes head_DV
        of it, whole in D and split in V (padding included); its gradient is back on its shards before the layers' turn.
        """
        axes = self.engine.layout.live("tensor")
        d = x_BTD.shape[-1]
        tokens = targets_BT.size
        count = -(-tokens // (self.chunk_tokens * self.engine.layout.degree(axes)))
        chunk = -(-tokens // count)
        x_MTD = _chunks(x_BTD.reshape(-1, d), count, chunk)
        targets_MT, mask_MT = (_chunks(a.reshape(-1), count, chunk) for a in (targets_BT, mask_BT))
        leaf, whole = head
        return _loss_sum(self, whole, vary(x_MTD, axes), leaf, targets_MT, mask_MT)

    def chunk(self, x_TD, head_DV, target_T, mask_T):
        """The summed loss of a chunk, and its gradients by x and by the head (for a cotangent of one)."""
        engine = self.engine
        axes, v_true, dtype = engine.layout.live("tensor"), engine.layout.model.vocab_size, engine.logits_dtype
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
        dx_TD = jnp.matmul(dz_TV, head_DV.T)
        dhead_DV = jnp.matmul(x_TD.T, dz_TV, preferred_element_type=engine.wide_dtype)
        return (loss_T * weight_T).sum(), dx_TD, dhead_DV


def _chunks(a: jax.Array, count: int, chunk: int) -> jax.Array:
    """Cut the first dim into `count` chunks, filled up with zeros (masked tokens) at the end."""
    missing = count * chunk - a.shape[0]
    a = jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)) if missing else a
    return a.reshape(count, chunk, *a.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss_sum(loss: CrossEntropy, whole: Whole, x_MTD, leaf, targets_MT, mask_MT):
    return _forward(loss, whole, x_MTD, leaf, targets_MT, mask_MT)[0]


def _forward(loss, whole, x_MTD, leaf, targets_MT, mask_MT):
    head_DV, onto_leaf = jax.vjp(whole, leaf)
    axes = tuple(varying(x_MTD) | varying(head_DV))
    own = tuple(varying(x_MTD) - set(loss.engine.layout.live("tensor")))

    def one(carry, chunk):
        total, dhead_DV = carry
        loss_sum, dx_TD, more_DV = loss.chunk(chunk[0], head_DV, *chunk[1:])
        return (total + vary(loss_sum, own), dhead_DV + more_DV), dx_TD

    if x_MTD.shape[0] == 1:
        total, dx_TD, dhead_DV = loss.chunk(x_MTD[0], head_DV, targets_MT[0], mask_MT[0])
        dx_MTD = dx_TD[None]
    else:
        zero = (
            vary(jnp.zeros((), loss.engine.logits_dtype), own),
            vary(jnp.zeros(head_DV.shape, loss.engine.wide_dtype), axes),
        )
        (total, dhead_DV), dx_MTD = lax.scan(one, zero, (x_MTD, targets_MT, mask_MT))
    (dleaf,) = onto_leaf(dhead_DV.astype(head_DV.dtype))
    return total, lax.optimization_barrier(
        (dx_MTD, dleaf)
    )  # so that the whole dhead_DV is gone before the layers' turn


def _backward(loss, whole, saved, gradient):
    scale = lambda a: a * gradient.astype(a.dtype)  # noqa: E731
    dx_MTD, dleaf = saved
    return scale(dx_MTD), scale(dleaf), None, None


_loss_sum.defvjp(_forward, _backward)
