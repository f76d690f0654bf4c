"""The parameters of each family: a tree of names that end in their letters, and the initial values.

A leaf's letters say its shape, its layout (`layout.py`) and how its gradient is reduced; nothing else does.
Initial values follow GPT-2 (Radford et al. 2019): a bell curve (`random.bell`) of deviation 0.02, and 0.02 / sqrt(2 L)
for what writes to the residual stream; norms start at one, biases at zero. The regression networks have 1 / sqrt(fan-in)
in place of 0.02.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright import random
from meshwright.config import ModelConfig
from meshwright.engine import place
from meshwright.layout import Layout, letters_of

Tree = dict[str, Any]


def names(model: ModelConfig) -> Tree:
    """The parameter tree of `model`, each leaf its own path: ``{"layers": {"mlp": {"up_LDF": "layers/mlp/up_LDF"}}}``."""
    tree = {"ffn": _regression, "residual": _regression, "gpt": _gpt, "llama": _llama}[model.family](model)
    return _with_paths(tree, "")


def _with_paths(tree: Tree, prefix: str) -> Tree:
    return {
        key: _with_paths(value, f"{prefix}{key}/") if isinstance(value, dict) else f"{prefix}{key}"
        for key, value in tree.items()
    }


def _leaves(words: str) -> Tree:
    return dict.fromkeys(words.split(), "")


def _regression(model: ModelConfig) -> Tree:
    return {"layers": {"mlp": _leaves("up_LDF down_LFD")}}


def _gpt(model: ModelConfig) -> Tree:
    tree = {
        "embedding": _leaves("tokens_VD positions_PD"),
        "layers": {
            "attention_norm": _leaves("scale_LD bias_LD"),
            "attention": _leaves("q_LDNH q_bias_LNH k_LDKH k_bias_LKH v_LDKH v_bias_LKH out_LNHD out_bias_LD"),
            "mlp_norm": _leaves("scale_LD bias_LD"),
            "mlp": _leaves("up_LDF up_bias_LF down_LFD down_bias_LD"),
        },
        "final_norm": _leaves("scale_D bias_D"),
    }
    return tree if model.tied_embeddings else tree | {"head": _leaves("tokens_DV")}


def _llama(model: ModelConfig) -> Tree:
    tree = {
        "embedding": _leaves("tokens_VD"),
        "layers": {
            "attention_norm": _leaves("scale_LD"),
            "attention": _leaves("q_LDNH k_LDKH v_LDKH out_LNHD"),
            "mlp_norm": _leaves("scale_LD"),
            "mlp": _leaves("gate_LDF up_LDF down_LFD"),
        },
        "final_norm": _leaves("scale_D"),
    }
    return tree if model.tied_embeddings else tree | {"head": _leaves("tokens_DV")}


def specs(model: ModelConfig, rule: Callable[[str], Any]) -> Tree:
    """A tree of layouts: `rule` (such as `layout.stored`) of each leaf's letters."""
    return jax.tree.map(lambda path: rule(letters_of(path)), names(model))


def initial_shards(layout: Layout, seed: int, dtype: jnp.dtype) -> Tree:
    """This device's shards of the initial parameters, in `layout.stored`; call it inside `jax.shard_map`."""
    return jax.tree.map(lambda path: _initial_shard(layout, path, seed).astype(dtype), names(layout.model))


def _initial_shard(layout: Layout, path: str, seed: int) -> jax.Array:
    letters, model = letters_of(path), layout.model
    spec = layout.stored(letters)
    shape = layout.shard_shape(letters, spec)
    index = [
        _global_index(size, axes, dim, len(shape)) for dim, (size, axes) in enumerate(zip(shape, spec, strict=True))
    ]
    if letters[0] == "L":
        index[0] = _layers(layout, index[0])
    if "scale_" in path or "bias_" in path:
        values = jnp.full(shape, 1.0 if "scale_" in path else 0.0, jnp.float32)
    else:
        column = jnp.zeros((1,) * len(shape), jnp.uint32)
        for i, letter in zip(index[1:], letters[1:], strict=True):  # the true sizes: values do not depend on padding
            column = column * jnp.uint32(model.sizes[letter]) + i
        values = random.bell(random.key_of(seed, path), index[0], column, _deviation(path, model))
    for i, letter in zip(index, letters, strict=True):
        values = jnp.where(i < model.sizes[letter], values, 0) if layout.places(letter) else values
    return values


def _layers(layout: Layout, row_L: jax.Array) -> jax.Array:
    """The layer of each row of a stage's arrays; a row without one has a number beyond the last."""
    layer_of_row = jnp.array([n if n >= 0 else 2**31 for n in layout.stages.layer_of_row], jnp.uint32)
    return row_L if layout.stages.in_order else layer_of_row[row_L]


def _global_index(local_size: int, axes: tuple[str, ...], dim: int, rank: int) -> jax.Array:
    index = jnp.arange(local_size, dtype=jnp.uint32) + jnp.uint32(place(axes) * local_size)
    return index.reshape((1,) * dim + (-1,) + (1,) * (rank - dim - 1))


def _deviation(path: str, model: ModelConfig) -> float:
    writes_residual = path.endswith(("out_LNHD", "down_LFD")) and model.family != "ffn"
    deviation = 0.02 if model.is_language_model else 1 / math.sqrt(model.sizes[letters_of(path)[1]])
    return deviation / math.sqrt(2 * model.layers) if writes_residual else deviation


# ---- whole arrays: of the model, and on the devices ---------------------------------------------------------


def of_model(layout: Layout, letters: str, x: Any) -> Any:
    """A whole array as the model has it, from one as it is on the devices: without padding, the layers in order.

    `x` is of JAX or NumPy, and so is the answer.
    """
    for dim, letter in enumerate(letters):
        places = layout.places(letter)
        if places:
            first = places == tuple(range(len(places)))
            x = x[(slice(None),) * dim + (slice(len(places)) if first else np.array(places),)]
    return x


def on_devices(layout: Layout, letters: str, x: Any) -> Any:
    """The other way: zeros where the model has nothing."""
    xp = jnp if isinstance(x, jax.Array) else np
    for dim, letter in enumerate(letters):
        places = layout.places(letter)
        if not places:
            continue
        size = layout.shape(letter)[0]
        if places == tuple(range(len(places))):
            x = xp.pad(x, [(0, size - len(places) if d == dim else 0) for d in range(x.ndim)])
        else:
            index = np.full(size, -1)
            index[list(places)] = range(len(places))
            held = (index >= 0).reshape((-1,) + (1,) * (x.ndim - dim - 1))
            x = xp.where(held, x[(slice(None),) * dim + (np.maximum(index, 0),)], xp.zeros((), x.dtype))
    return x
