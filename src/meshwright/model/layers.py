"""The parts that the families share: norms, rotary positions, dropout, the stack of layers. One device's maths."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright import random
from meshwright.compat import vary, varying
from meshwright.config import ModelConfig, RopeScaling
from meshwright.engine import Engine, wider
from meshwright.layout import letters_of
from meshwright.model import cudnn
from meshwright.model.attention import Dropout
from meshwright.model.prefetch import Stack, prefetches, run_ahead

Tree = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """What the layers know of the tokens they are given, besides the residual stream itself."""

    segments_BT: jax.Array
    sample_B: jax.Array
    """Each sequence's place in the global batch."""
    cosine_BTH: jax.Array | None = None
    sine_BTH: jax.Array | None = None
    dropout_key: jax.Array | None = None
    """None: no dropout (evaluation)."""


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467), in float32 or wider."""
    wide_BTD = x_BTD.astype(wider(x_BTD.dtype, jnp.float32))
    normed_BTD = wide_BTD * lax.rsqrt(jnp.mean(wide_BTD**2, -1, keepdims=True) + eps)
    return (normed_BTD * scale_D.astype(normed_BTD.dtype)).astype(x_BTD.dtype)


def layer_norm(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    """Layer norm with bias (Ba et al. 2016, arXiv:1607.06450), in float32 or wider."""
    wide_BTD = x_BTD.astype(wider(x_BTD.dtype, jnp.float32))
    centred_BTD = wide_BTD - jnp.mean(wide_BTD, -1, keepdims=True)
    normed_BTD = centred_BTD * lax.rsqrt(jnp.mean(centred_BTD**2, -1, keepdims=True) + eps)
    return (normed_BTD * scale_D.astype(normed_BTD.dtype) + bias_D.astype(normed_BTD.dtype)).astype(x_BTD.dtype)


def rope_frequencies(model: ModelConfig, dtype: jnp.dtype) -> jax.Array:
    """f[H/2] in radians per position (Su et al. 2021, arXiv:2104.09864), scaled as Llama 3.1 does where configured."""
    half = model.head_size // 2
    frequencies = model.rope_theta ** (-jnp.arange(half, dtype=dtype) / half)
    return frequencies if model.rope_scaling is None else _scaled(frequencies, model.rope_scaling)


def _scaled(frequencies: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Slow frequencies divided by `factor`, fast ones kept, a linear blend between (Llama 3.1's reference code)."""
    turns = scaling.original_length * frequencies / (2 * jnp.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_tables(model: ModelConfig, positions_BT: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the angle of each position and pair: two f[B,T,H/2]."""
    angle_BTH = positions_BT[..., None].astype(dtype) * rope_frequencies(model, dtype)
    return jnp.cos(angle_BTH), jnp.sin(angle_BTH)


def rotate(engine: Engine, x_BTNH: jax.Array, tokens: Tokens) -> jax.Array:
    """Turn the pairs (i, i + H/2) of each head by its position's angle."""
    assert tokens.cosine_BTH is not None and tokens.sine_BTH is not None
    cosine_BTNH, sine_BTNH = tokens.cosine_BTH[:, :, None], tokens.sine_BTH[:, :, None]
    if not engine.flat_matmuls and x_BTNH.dtype == jnp.bfloat16:
        return _turn_by_matmul(x_BTNH, cosine_BTNH, sine_BTNH)
    first, second = jnp.split(x_BTNH.astype(cosine_BTNH.dtype), 2, axis=-1)
    turned = (first * cosine_BTNH - second * sine_BTNH, second * cosine_BTNH + first * sine_BTNH)
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


def _turn_by_matmul(x_BTNH: jax.Array, cosine_BTNH: jax.Array, sine_BTNH: jax.Array) -> jax.Array:
    """The same, with the halves of a head exchanged by a matmul: exact, for each output is one input times one.

    TPU vectors are 128 wide: halves of a head of 128 leave half of each unused and cost copies into another layout.
    """
    h = x_BTNH.shape[-1]
    swap_HH = jnp.roll(jnp.eye(h, dtype=x_BTNH.dtype), h // 2, axis=1)
    swapped_BTNH = x_BTNH @ vary(swap_HH, tuple(varying(x_BTNH)))
    cosine_BTNH = jnp.concatenate([cosine_BTNH, cosine_BTNH], axis=-1)
    sine_BTNH = jnp.concatenate([-sine_BTNH, sine_BTNH], axis=-1)
    wide = cosine_BTNH.dtype
    return (x_BTNH.astype(wide) * cosine_BTNH + swapped_BTNH.astype(wide) * sine_BTNH).astype(x_BTNH.dtype)


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202), in float32 or wider, rounded once."""
    wide = wider(gate.dtype, jnp.float32)
    return (jax.nn.silu(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)


def _swiglu_bwd(saved, gradient):
    """One pass over all three, apart from the matmuls before and after it (see `engine.settle`)."""
    dtype = saved[0].dtype
    gate, up, gradient = (a.astype(wider(dtype, jnp.float32)) for a in lax.optimization_barrier((*saved, gradient)))
    share = jax.nn.sigmoid(gate)
    slope = share * (1 + gate * (1 - share))
    return lax.optimization_barrier(((gradient * up * slope).astype(dtype), (gradient * gate * share).astype(dtype)))


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_bwd)


def dropout(engine: Engine, x_BTD: jax.Array, rate: float, tokens: Tokens, *words: Any) -> jax.Array:
    """Dropout of the residual stream: the mask is a function of (key, words, sample, position, d) alone."""
    if not rate or tokens.dropout_key is None:
        return x_BTD
    t, d = x_BTD.shape[1:]
    position_T = jnp.arange(t, dtype=jnp.uint32) + jnp.uint32(engine.offset("BTD", "T", t))
    row_BT = tokens.sample_B.astype(jnp.uint32)[:, None] * jnp.uint32(2**20) + position_T
    key = random.fold(tokens.dropout_key, *words)
    kept_BTD = random.keep(key, rate, row_BT[..., None], jnp.arange(d, dtype=jnp.uint32))
    return jnp.where(kept_BTD, x_BTD / (1 - rate), 0).astype(x_BTD.dtype)


def attention_dropout(engine: Engine, q_BTNH: jax.Array, tokens: Tokens, layer: Any) -> Dropout | None:
    """Dropout of this layer's attention shares, or None."""
    rate = engine.layout.model.dropout_attention
    if not rate or tokens.dropout_key is None:
        return None
    length, heads = q_BTNH.shape[1:3]
    head_N = jnp.arange(heads, dtype=jnp.uint32) + jnp.uint32(engine.offset("BTNH", "N", heads))
    return Dropout(rate, random.fold(tokens.dropout_key, "attention", layer), tokens.sample_B, head_N, length)


Block = Callable[[Engine, Tree, jax.Array, Any, Any], jax.Array]
"""A layer: (engine, its parameters, x, `Tokens` or None, its number) -> x. Leaves keep their names and have lost L."""


def run_layers(
    engine: Engine, block: Block, layers: Tree, x_BTD: jax.Array, tokens: Tokens | None, remat: str
) -> jax.Array:
    """The stack of layers as one scan over L; `remat` says what a layer keeps for its backward pass."""
    count = engine.layout.model.layers
    if engine.observe is not None:
        for i in range(count):
            own = engine.enter_layer(jax.tree.map(lambda w, i=i: w[i], layers))
            x_BTD = block(replace(engine, path=f"layers/{i}/"), own, x_BTD, tokens, i)
        return x_BTD

    stacks, tree = jax.tree.flatten(layers)
    letters = tuple(letters_of(path[-1].key) for path, _ in jax.tree_util.tree_leaves_with_path(layers))
    if prefetches(engine):
        layer = lambda engine, leaves, *rest: block(engine, jax.tree.unflatten(tree, leaves), *rest)  # noqa: E731
        return run_ahead(Stack(engine, layer, letters, remat), tuple(stacks), x_BTD, tokens)

    receivers = [_receiver(engine, *leaf) for leaf in zip(letters, stacks, strict=True)]
    stacks = [w if r is None else lax.stop_gradient(w) for w, r in zip(stacks, receivers, strict=True)]

    def one(x_BTD, layer):
        number, weights, receivers = layer
        weights = [w if r is None else _with_receiver(w, r) for w, r in zip(weights, receivers, strict=True)]
        weights = engine.enter_layer(jax.tree.unflatten(tree, weights))
        return block(engine, weights, x_BTD, tokens, number), None

    one = _rematerialised(engine, one, remat)
    unroll = count if engine.unroll_layers else 1
    return lax.scan(one, x_BTD, (jnp.arange(count, dtype=jnp.uint32), stacks, receivers), unroll=unroll)[0]


def _receiver(engine: Engine, letters: str, w: jax.Array) -> jax.Array | None:
    """What receives the gradient of a stack of weights in its stead, in `engine.gradient_dtype`; None: it does itself."""
    dtype = engine.gradient_dtype(w.dtype, letters)
    return _zeros_like(w, dtype) if dtype != w.dtype else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _zeros_like(w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Zeros whose gradient is `w`'s."""
    return vary(jnp.zeros(w.shape, dtype), tuple(varying(w)))


_zeros_like.defvjp(
    lambda w, dtype: (_zeros_like(w, dtype), jnp.zeros((0,), w.dtype)),
    lambda dtype, empty, gradient: (gradient.astype(empty.dtype),),
)


@jax.custom_vjp
def _with_receiver(w: jax.Array, receiver: jax.Array) -> jax.Array:
    """`w`, whose gradient goes to `receiver`."""
    return w


_with_receiver.defvjp(
    lambda w, receiver: (w, jnp.zeros((0,), receiver.dtype)),
    lambda empty, gradient: (None, gradient.astype(empty.dtype)),
)


def _rematerialised(engine: Engine, one: Callable, remat: str) -> Callable:
    if remat == "none":
        return one
    names = remat.removeprefix("save:").replace(" ", "").split(",") if remat.startswith("save:") else ()
    keep = cudnn.keep if engine.kernel == "cudnn" else jax.checkpoint_policies.save_only_these_names
    return jax.checkpoint(one, policy=keep(*names), prevent_cse=engine.unroll_layers)
