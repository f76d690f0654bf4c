"""The tutorials' regression networks: a feed-forward net, and a residual stack of them (A. Samarin 2024)."""

from typing import Any

import jax

from meshwright.engine import Engine
from meshwright.model.layers import Tree


def block(engine: Engine, w: Tree, x_BD: jax.Array, tokens: None, layer: Any) -> jax.Array:
    """relu(x W1) W2, added to x in the family `residual`."""
    m = w["mlp"]
    up_BF = engine.name(engine.einsum("BD,DF->BF", x_BD, m["up_LDF"]), "up", "BF")
    hidden_BF = engine.name(jax.nn.relu(up_BF), "hidden", "BF")
    y_BD = engine.name(engine.einsum("BF,FD->BD", hidden_BF, m["down_LFD"]), "mlp_out", "BD")
    return x_BD + y_BD if engine.layout.model.family == "residual" else y_BD


def squared_error_sum(engine: Engine, prediction_BD: jax.Array, y_BD: jax.Array) -> jax.Array:
    """The summed squared error of this device's examples."""
    return ((prediction_BD - y_BD).astype(engine.wide_dtype) ** 2).sum()
