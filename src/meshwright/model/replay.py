"""What a layer keeps for a backward pass that is written out: its named arrays, and how it is run once more with them.

The kept arrays stand in the place of those that the layer names, so that the compiler leaves out what leads only to them.
"""

from dataclasses import replace
from typing import Any

import jax

from meshwright.engine import Engine

MATMUL_RESULTS = ("q", "k", "v", "attention", "attention_out", "gate", "up")
"""What is kept where nothing is to be recomputed: from these and the input the rest of a layer is cheap."""


def names_kept(remat: str) -> tuple[str, ...]:
    """The arrays that `train.remat` lets a layer keep besides its input."""
    if remat == "none":
        return MATMUL_RESULTS
    return tuple(remat.removeprefix("save:").replace(" ", "").split(",")) if remat.startswith("save:") else ()


def keeping(engine: Engine, names: tuple[str, ...]) -> tuple[Engine, dict[str, jax.Array]]:
    """An engine, and where a layer's arrays of these names are once the layer has run on it."""
    kept: dict[str, jax.Array] = {}

    def keep(name: str, letters: str, value: jax.Array) -> jax.Array:
        kept.update({name: value} if name in names else {})
        return value

    return replace(engine, observe=keep), kept


def replayed(engine: Engine, kept: dict[str, Any]) -> Engine:
    """An engine on which a layer takes the kept arrays for those that it names."""
    stand = lambda name, letters, value: standing_for(value, kept[name]) if name in kept else value  # noqa: E731
    return replace(engine, observe=stand)


@jax.custom_vjp
def standing_for(value: jax.Array, kept: jax.Array) -> jax.Array:
    """`kept`, with the gradient of the `value` that it is a copy of: what leads only to the value need not be computed."""
    return kept


standing_for.defvjp(lambda value, kept: (kept, None), lambda _, gradient: (gradient, None))
