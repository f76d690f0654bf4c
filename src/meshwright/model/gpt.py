"""GPT-2 (Radford et al. 2019, "Language models are unsupervised multitask learners"): a layer."""

from typing import Any

import jax

from meshwright.engine import Engine
from meshwright.model.attention import attend
from meshwright.model.layers import Tokens, Tree, attention_dropout, dropout, layer_norm


def block(engine: Engine, w: Tree, x_BTD: jax.Array, tokens: Tokens, layer: Any) -> jax.Array:
    """Multi-head attention, then a GELU (tanh form) feed-forward net; LayerNorm before each, biases everywhere."""
    model = engine.layout.model

    norm = w["attention_norm"]
    h_BTD = layer_norm(x_BTD, norm["scale_LD"], norm["bias_LD"], model.norm_eps)
    h_BTD = engine.name(h_BTD, "attention_norm", "BTD")
    a = w["attention"]
    q_BTNH, k_BTKH, v_BTKH = engine.einsum(
        "BTD,DNH DKH DKH->BTNH BTKH BTKH", h_BTD, a["q_LDNH"], a["k_LDKH"], a["v_LDKH"]
    )
    q_BTNH = engine.name(q_BTNH + engine.bias(a["q_bias_LNH"], "NH"), "q", "BTNH")
    k_BTKH = engine.name(k_BTKH + engine.bias(a["k_bias_LKH"], "KH"), "k", "BTKH")
    v_BTKH = engine.name(v_BTKH + engine.bias(a["v_bias_LKH"], "KH"), "v", "BTKH")
    drop = attention_dropout(engine, q_BTNH, tokens, layer)
    o_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, tokens.segments_BT, drop=drop, kernel=engine.kernel, packed=engine.packed)
    o_BTNH = engine.name(o_BTNH, "attention", "BTNH")
    y_BTD = engine.einsum("BTNH,NHD->BTD", o_BTNH, a["out_LNHD"]) + engine.bias(a["out_bias_LD"], "D")
    y_BTD = engine.name(y_BTD, "attention_out", "BTD")
    x_BTD = x_BTD + dropout(engine, y_BTD, model.dropout_residual, tokens, "attention_out", layer)

    norm = w["mlp_norm"]
    h_BTD = engine.name(layer_norm(x_BTD, norm["scale_LD"], norm["bias_LD"], model.norm_eps), "mlp_norm", "BTD")
    m = w["mlp"]
    up_BTF = engine.einsum("BTD,DF->BTF", h_BTD, m["up_LDF"]) + engine.bias(m["up_bias_LF"], "F")
    up_BTF = engine.name(up_BTF, "up", "BTF")
    hidden_BTF = engine.name(jax.nn.gelu(up_BTF, approximate=True), "hidden", "BTF")
    y_BTD = engine.einsum("BTF,FD->BTD", hidden_BTF, m["down_LFD"]) + engine.bias(m["down_bias_LD"], "D")
    y_BTD = engine.name(y_BTD, "mlp_out", "BTD")
    return x_BTD + dropout(engine, y_BTD, model.dropout_residual, tokens, "mlp_out", layer)
