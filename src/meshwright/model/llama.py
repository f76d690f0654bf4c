"""Llama 1 to 3.2 (Touvron et al. 2023, arXiv:2302.13971; Llama Team 2024, arXiv:2407.21783): a layer."""

from typing import Any

import jax

from meshwright.engine import Engine
from meshwright.model.attention import attend
from meshwright.model.layers import Tokens, Tree, attention_dropout, dropout, rms_norm, rotate, swiglu


def block(engine: Engine, w: Tree, x_BTD: jax.Array, tokens: Tokens, layer: Any) -> jax.Array:
    """Grouped-query attention with rotary positions, then SwiGLU; RMSNorm before each."""
    model = engine.layout.model

    h_BTD = engine.name(rms_norm(x_BTD, w["attention_norm"]["scale_LD"], model.norm_eps), "attention_norm", "BTD")
    a = w["attention"]
    q_BTNH, k_BTKH, v_BTKH = engine.einsum(
        "BTD,DNH DKH DKH->BTNH BTKH BTKH", h_BTD, a["q_LDNH"], a["k_LDKH"], a["v_LDKH"]
    )
    q_BTNH = engine.name(rotate(engine, q_BTNH, tokens), "q", "BTNH")
    k_BTKH = engine.name(rotate(engine, k_BTKH, tokens), "k", "BTKH")
    v_BTKH = engine.name(v_BTKH, "v", "BTKH")
    drop = attention_dropout(engine, q_BTNH, tokens, layer)
    o_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, tokens.segments_BT, drop=drop, kernel=engine.kernel, packed=engine.packed)
    o_BTNH = engine.name(o_BTNH, "attention", "BTNH")
    y_BTD = engine.name(engine.einsum("BTNH,NHD->BTD", o_BTNH, a["out_LNHD"]), "attention_out", "BTD")
    x_BTD = x_BTD + dropout(engine, y_BTD, model.dropout_residual, tokens, "attention_out", layer)

    h_BTD = engine.name(rms_norm(x_BTD, w["mlp_norm"]["scale_LD"], model.norm_eps), "mlp_norm", "BTD")
    m = w["mlp"]
    gate_BTF, up_BTF = engine.einsum("BTD,DF DF->BTF BTF", h_BTD, m["gate_LDF"], m["up_LDF"])
    gate_BTF, up_BTF = engine.name(gate_BTF, "gate", "BTF"), engine.name(up_BTF, "up", "BTF")
    hidden_BTF = engine.name(swiglu(gate_BTF, up_BTF), "hidden", "BTF")
    y_BTD = engine.name(engine.einsum("BTF,FD->BTD", hidden_BTF, m["down_LFD"]), "mlp_out", "BTD")
    return x_BTD + dropout(engine, y_BTD, model.dropout_residual, tokens, "mlp_out", layer)
