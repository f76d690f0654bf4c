"""The oracle: every model family on one device in plain JAX, written to be believed rather than to be fast.

It shares nothing with the engine but the configuration and the names of the parameters, so a mistake in the
engine cannot repeat itself here. Whole attention matrices, whole logits, one Python loop over the layers, and
every operation in the dtype of the parameters. Dropout is left out: it is verified layout against layout.

Sources: Llama (Touvron et al. 2023, arXiv:2302.13971; Llama Team 2024, arXiv:2407.21783), GPT-2 (Radford et al.
2019) and, for what the papers leave open, the `modeling_llama` and `modeling_gpt2` of Hugging Face's transformers,
whose logits, losses and gradients the tests compare with.
"""

import math

import jax
import jax.numpy as jnp

from meshwright.config import ModelConfig, RopeScaling, TrainConfig


def loss(model: ModelConfig, train: TrainConfig, params, batch):
    """The loss of one step: the mean over counted targets, or the mean squared error (see `loss_sum_and_count`)."""
    total, count = loss_sum_and_count(model, train, params, batch)
    return total / jnp.maximum(count, 1).astype(total.dtype)


def loss_sum_and_count(model: ModelConfig, train: TrainConfig, params, batch):
    """The summed loss and what to divide it by.

    Language models: `batch` holds tokens_BT, targets_BT, positions_BT, segments_BT (integers) and mask_BT (which
    targets count); the count is the number of true entries of the mask.
    Regression: `batch` holds x_BD and y_BD; the sum is of squared errors and the count is B D.
    The sum has the dtype of the parameters, the count is an integer.
    """
    if not model.is_language_model:
        error_BD = regress(model, params, batch["x_BD"]) - batch["y_BD"]
        return jnp.sum(error_BD**2), jnp.asarray(error_BD.size)
    loss_BT = token_losses(train, logits(model, params, batch), batch["targets_BT"])
    return jnp.sum(jnp.where(batch["mask_BT"], loss_BT, 0)), jnp.sum(batch["mask_BT"])


def token_losses(train: TrainConfig, logits_BTV, targets_BT):
    """Each token's loss, [B,T]: cross-entropy with label smoothing, and the z-loss.

    Smoothing s gives (1-s) nll(target) + s mean_v nll(v) (Szegedy et al. 2016, arXiv:1512.00567, eq. 3 with a uniform
    prior); the z-loss adds z log(Z)^2 (Chowdhery et al. 2022, arXiv:2204.02311, section 5).
    """
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    nll_BTV = log_z_BT[..., None] - logits_BTV
    nll_BT = jnp.take_along_axis(nll_BTV, targets_BT[..., None], axis=-1)[..., 0]
    s = train.label_smoothing
    return (1 - s) * nll_BT + s * jnp.mean(nll_BTV, axis=-1) + train.z_loss * log_z_BT**2


def logits(model: ModelConfig, params, batch):
    """The logits [B,T,V] of `gpt` and `llama`, V without padding."""
    tokens_VD = params["embedding"]["tokens_VD"]
    x_BTD = tokens_VD[batch["tokens_BT"]]
    if model.family == "gpt":
        x_BTD = x_BTD + params["embedding"]["positions_PD"][batch["positions_BT"]]
    for layer in range(model.layers):
        w = jax.tree.map(lambda leaf_L: leaf_L[layer], params["layers"])  # noqa: B023 (used at once)
        x_BTD = x_BTD + attention(model, w["attention"], norm(model, w["attention_norm"], x_BTD), batch)
        x_BTD = x_BTD + feed_forward(model, w["mlp"], norm(model, w["mlp_norm"], x_BTD))
    head_DV = tokens_VD.T if model.tied_embeddings else params["head"]["tokens_DV"]
    return norm(model, params["final_norm"], x_BTD) @ head_DV


def norm(model: ModelConfig, w, x_BTD):
    """LayerNorm for `gpt`, RMSNorm for `llama` (Ba et al. 2016, arXiv:1607.06450; Zhang 2019, arXiv:1910.07467).

    `w` is one norm of the tree: inside a layer its names still end in L, the layer that was taken.
    """
    w = {name.split("_")[0]: w_D for name, w_D in w.items()}
    if model.family == "gpt":
        x_BTD = x_BTD - jnp.mean(x_BTD, axis=-1, keepdims=True)
    mean_square_BT1 = jnp.mean(x_BTD**2, axis=-1, keepdims=True)
    return x_BTD / jnp.sqrt(mean_square_BT1 + model.norm_eps) * w["scale"] + w.get("bias", 0)


def attention(model: ModelConfig, w, x_BTD, batch):
    """Causal attention within each segment, with G = N/K query heads to a key/value head. Returns [B,T,D]."""
    q_BTNH = jnp.einsum("BTD,DNH->BTNH", x_BTD, w["q_LDNH"]) + w.get("q_bias_LNH", 0)
    k_BSKH = jnp.einsum("BSD,DKH->BSKH", x_BTD, w["k_LDKH"]) + w.get("k_bias_LKH", 0)
    v_BSKH = jnp.einsum("BSD,DKH->BSKH", x_BTD, w["v_LDKH"]) + w.get("v_bias_LKH", 0)
    if model.family == "llama":
        q_BTNH = rotate(model, q_BTNH, batch["positions_BT"])
        k_BSKH = rotate(model, k_BSKH, batch["positions_BT"])
    k_BSNH = jnp.repeat(k_BSKH, model.heads // model.kv_heads, axis=2)  # query head n uses key head n // G
    v_BSNH = jnp.repeat(v_BSKH, model.heads // model.kv_heads, axis=2)
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH) / math.sqrt(model.head_size)
    scores_BNTS = jnp.where(visible(batch["segments_BT"])[:, None], scores_BNTS, -jnp.inf)
    mixed_BTNH = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores_BNTS, axis=-1), v_BSNH)
    return jnp.einsum("BTNH,NHD->BTD", mixed_BTNH, w["out_LNHD"]) + w.get("out_bias_LD", 0)


def visible(segments_BT):
    """Which keys a query may see, bool[B,T,S]: those of its own segment that are not later. Always at least itself."""
    T = segments_BT.shape[1]
    causal_TS = jnp.arange(T)[:, None] >= jnp.arange(T)[None, :]
    return causal_TS & (segments_BT[:, :, None] == segments_BT[:, None, :])


def rotate(model: ModelConfig, x_BTNH, positions_BT):
    """RoPE (Su et al. 2021, arXiv:2104.09864, eq. 34); coordinates i and i + H/2 turn together, as in transformers."""
    dtype = x_BTNH.dtype
    frequency_h = frequencies(model, dtype)
    angle_BT1h = positions_BT[:, :, None, None].astype(dtype) * frequency_h
    a_BTNh, b_BTNh = jnp.split(x_BTNH, 2, axis=-1)
    cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
    return jnp.concatenate([a_BTNh * cos - b_BTNh * sin, b_BTNh * cos + a_BTNh * sin], axis=-1)


def frequencies(model: ModelConfig, dtype):
    """The H/2 angular frequencies of RoPE, in radians per token, with Llama 3.1's scaling where it is set."""
    H = model.head_size
    frequency_h = [model.rope_theta ** (-2 * i / H) for i in range(H // 2)]
    if model.rope_scaling is not None:
        frequency_h = [_scaled(model.rope_scaling, f) for f in frequency_h]
    return jnp.asarray(frequency_h, dtype)


def _scaled(scaling: RopeScaling, frequency: float) -> float:
    """Keep short wavelengths, divide long ones by `factor`, blend between (`apply_scaling` of Llama 3.1's release)."""
    turns = scaling.original_length * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def feed_forward(model: ModelConfig, w, x_BTD):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202) for `llama`; GELU in its tanh form, as GPT-2 has it, for `gpt`."""
    up_BTF = x_BTD @ w["up_LDF"] + w.get("up_bias_LF", 0)
    if model.family == "gpt":
        hidden_BTF = jax.nn.gelu(up_BTF, approximate=True)
    else:
        hidden_BTF = jax.nn.silu(x_BTD @ w["gate_LDF"]) * up_BTF
    return hidden_BTF @ w["down_LFD"] + w.get("down_bias_LD", 0)


def regress(model: ModelConfig, params, x_BD):
    """The regression networks: x -> relu(x W1) W2 in each layer (`ffn`), or x -> x + relu(x W1) W2 (`residual`)."""
    mlp = params["layers"]["mlp"]
    for layer in range(model.layers):
        y_BD = jax.nn.relu(x_BD @ mlp["up_LDF"][layer]) @ mlp["down_LFD"][layer]
        x_BD = x_BD + y_BD if model.family == "residual" else y_BD
    return x_BD
