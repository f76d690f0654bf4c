"""The training step of a Llama on one GPU in plain JAX: what `gpu.py` holds the engine against.

One file, no mesh and no `shard_map`: bfloat16 compute on float32 weights, cuDNN's flash attention by
`jax.nn.dot_product_attention`, AdamW and clipping by optax, the parameter tree of Meshwright and its numbers (norms,
rotations, SwiGLU and logits in float32). Rows hold one document each, so causality is the only mask. The layers stand
one after another, not in a loop; the loss is of whole logits, or of chunks whose logits the backward pass makes again.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plain:
    """What the step is made for. `model` has the sizes of a Llama with tied embeddings by Meshwright's names."""

    model: Any
    lr: float
    remat: bool = False
    """Whether a layer keeps only its input."""
    loss_chunk_tokens: int = 0
    """Tokens whose logits are held at one time; 0: all."""
    attention: str = "cudnn"


def rms_norm(x_BTD, scale_D, eps):
    wide_BTD = x_BTD.astype(jnp.float32)
    inverse_BT = lax.rsqrt(jnp.mean(wide_BTD**2, -1, keepdims=True) + eps)
    return (wide_BTD * inverse_BT * scale_D).astype(x_BTD.dtype)


def rotations(model, length: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin f32[T,1,H/2], Llama 3.1's scaling included (its reference code)."""
    half = model.head_size // 2
    turns = model.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if (scaling := model.rope_scaling) is not None:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = jnp.clip((scaling.original_length * turns / (2 * math.pi) - low) / (high - low), 0, 1)
        turns = turns * (kept + (1 - kept) / scaling.factor)
    angle_TNH = (jnp.arange(length, dtype=jnp.float32)[:, None] * turns)[:, None]
    return jnp.cos(angle_TNH), jnp.sin(angle_TNH)


def rotate(x_BTNH, cosine_TNH, sine_TNH):
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = (a * cosine_TNH - b * sine_TNH, b * cosine_TNH + a * sine_TNH)
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


def layer(plain: Plain, x_BTD, w: Tree, turns):
    model = plain.model
    narrow = lambda leaf: leaf.astype(jnp.bfloat16)  # noqa: E731
    a, m = jax.tree.map(narrow, w["attention"]), jax.tree.map(narrow, w["mlp"])
    h_BTD = rms_norm(x_BTD, w["attention_norm"]["scale_LD"], model.norm_eps)
    q_BTNH = rotate(jnp.einsum("btd,dnh->btnh", h_BTD, a["q_LDNH"]), *turns)
    k_BTKH = rotate(jnp.einsum("btd,dkh->btkh", h_BTD, a["k_LDKH"]), *turns)
    v_BTKH = jnp.einsum("btd,dkh->btkh", h_BTD, a["v_LDKH"])
    o_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation=plain.attention)
    x_BTD = x_BTD + jnp.einsum("btnh,nhd->btd", o_BTNH, a["out_LNHD"])
    h_BTD = rms_norm(x_BTD, w["mlp_norm"]["scale_LD"], model.norm_eps)
    gate_BTF, up_BTF = h_BTD @ m["gate_LDF"], h_BTD @ m["up_LDF"]
    hidden_BTF = (jax.nn.silu(gate_BTF.astype(jnp.float32)) * up_BTF.astype(jnp.float32)).astype(x_BTD.dtype)
    return x_BTD + hidden_BTF @ m["down_LFD"]


def loss(plain: Plain, params: Tree, tokens_BT, targets_BT):
    """Mean cross-entropy over all tokens."""
    model = plain.model
    table_VD = params["embedding"]["tokens_VD"].astype(jnp.bfloat16)
    x_BTD = table_VD[tokens_BT]
    turns = rotations(model, tokens_BT.shape[1])
    one = functools.partial(layer, plain)
    one = jax.checkpoint(one) if plain.remat else one
    for i in range(model.layers):
        x_BTD = one(x_BTD, jax.tree.map(lambda w: w[i], params["layers"]), turns)  # noqa: B023 (used at once)
    x_BTD = rms_norm(x_BTD, params["final_norm"]["scale_D"], model.norm_eps)
    return cross_entropy(plain, x_BTD.reshape(-1, model.d_model), table_VD, targets_BT.reshape(-1))


def cross_entropy(plain: Plain, x_MD, table_VD, target_M):
    def summed(x_MD, target_M):
        logits_MV = jnp.matmul(x_MD, table_VD.T, preferred_element_type=jnp.float32)
        wanted_M = jnp.take_along_axis(logits_MV, target_M[:, None], axis=-1)[:, 0]
        return (jax.nn.logsumexp(logits_MV, axis=-1) - wanted_M).sum()

    tokens = target_M.size
    if not plain.loss_chunk_tokens or plain.loss_chunk_tokens >= tokens:
        return summed(x_MD, target_M) / tokens
    chunks = (x_MD.reshape(-1, plain.loss_chunk_tokens, x_MD.shape[1]), target_M.reshape(-1, plain.loss_chunk_tokens))
    add = lambda total, chunk: (total + jax.checkpoint(summed)(*chunk), None)  # noqa: E731
    return lax.scan(add, jnp.zeros(()), chunks)[0] / tokens


def optimizer(plain: Plain) -> optax.GradientTransformation:
    """AdamW as Meshwright's defaults have it: norms are not decayed, the global norm is clipped at 1."""
    decayed = lambda tree: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, _: not any("norm" in str(key) for key in path), tree
    )
    adamw = optax.adamw(plain.lr, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_step(plain: Plain) -> Any:
    """The jitted step (params, moments), tokens, targets -> (params, moments), loss; the state is donated."""
    update = optimizer(plain).update

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens_BT, targets_BT):
        params, moments = state
        value, gradients = jax.value_and_grad(functools.partial(loss, plain))(params, tokens_BT, targets_BT)
        updates, moments = update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step
