"""The tutorials' regression networks: a feed-forward net, and a residual stack of them (A. Samarin 2024)."""

import jax
from jax import lax

from meshwright.engine import Engine
from meshwright.model.layers import Tree


def predict(engine: Engine, params: Tree, x_BD: jax.Array) -> jax.Array:
    """y_BD: for each layer relu(x W1) W2, added to x in the family `residual`."""
    residual = engine.layout.model.family == "residual"

    def one(x_BD, w):
        w = engine.enter_layer(w)
        hidden_BF = jax.nn.relu(engine.einsum("BD,DF->BF", x_BD, w["up_LDF"]))
        y_BD = engine.einsum("BF,FD->BD", hidden_BF, w["down_LFD"])
        return (x_BD + y_BD if residual else y_BD), None

    return lax.scan(one, x_BD, params["layers"]["mlp"])[0]


def squared_error_sum(engine: Engine, params: Tree, x_BD: jax.Array, y_BD: jax.Array) -> jax.Array:
    """The summed squared error of this device's examples."""
    error_BD = (predict(engine, params, x_BD) - y_BD).astype(engine.wide_dtype)
    return (error_BD**2).sum()
