"""Text from the model, on its own layout: greedy, at a temperature, or from the smallest likely set (top-p).

One compiled program writes all tokens (no call to the host between them). Each token costs a whole forward pass over the
window; there is no cache of keys and values, which is right for the short samples that a run shows.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright import random
from meshwright.config import require
from meshwright.dims import BATCH_AXES
from meshwright.engine import gather
from meshwright.model.forward import hidden, vocabulary_logits, whole_head
from meshwright.parallel import accumulate
from meshwright.train.state import Run

Tree = Any


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest at `temperature` 0, else by chance among the likeliest of share `top_p`."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.temperature >= 0, f"temperature={self.temperature} must be at least 0")
        require(0 < self.top_p <= 1, f"top_p={self.top_p} must be above 0 and at most 1")


def generate(run: Run, params: Tree, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    """`count` token ids that continue `prompt`, equal on every layout up to rounding."""
    require(len(prompt) > 0, "the prompt is empty; it needs at least one token")
    layout, model = run.layout, run.config.model
    step = max(layout.degree(layout.live("context", "tensor")), 1)
    length = -(-(len(prompt) + count) // step) * step
    if model.family == "gpt":
        limit = model.positions // step * step
        require(
            len(prompt) < limit,
            f"the prompt has {len(prompt)} tokens; model.positions={model.positions} leaves no room",
        )
        length = min(length, limit)
    tokens = np.zeros((layout.degree(layout.live(*BATCH_AXES)), length), np.int32)
    tokens[:, : len(prompt)] = prompt
    rows = NamedSharding(run.mesh, run.batch_specs({"tokens_BT": "BT"})["tokens_BT"])
    tokens = jax.make_array_from_callback(tokens.shape, rows, lambda index: tokens[index])
    program = _program(run, length, sampling)
    stop = min(len(prompt) + count, length)
    written = program(params, tokens, jnp.int32(len(prompt)), jnp.int32(stop))
    return np.asarray(written.addressable_data(0))[0, len(prompt) : stop].tolist()


@functools.lru_cache(maxsize=8)
def _program(run: Run, length: int, sampling: Sampling) -> Any:
    engine = replace(run.engine, unroll_layers=False)
    batch_axes = run.layout.live(*BATCH_AXES)

    def write(params: Tree, tokens_BT: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
        working = accumulate.enter(engine, params)
        head_DV = whole_head(engine, working)
        positions_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens_BT.shape)
        fixed = {
            "segments_BT": jnp.ones_like(positions_BT),
            "positions_BT": positions_BT,
            "sample_B": jnp.zeros(tokens_BT.shape[:1], jnp.int32),
        }

        def one(i: jax.Array, tokens_BT: jax.Array) -> jax.Array:
            x_BTD = hidden(engine, working, {"tokens_BT": tokens_BT, **fixed}, "none")
            last_BTD = lax.dynamic_slice_in_dim(x_BTD, i - 1, 1, axis=1)
            z_BTV = vocabulary_logits(engine, last_BTD, head_DV)
            z_BV = gather(z_BTV, run.layout.live("tensor"), 2, same=True)[:, 0]
            next_B = choose(z_BV, sampling, i)
            return lax.dynamic_update_slice_in_dim(tokens_BT, next_B[:, None], i, axis=1)

        tokens_BT = lax.fori_loop(start, stop, one, tokens_BT)
        return gather(tokens_BT, batch_axes, 0, same=True)

    specs = (run.specs()["params"], run.batch_specs({"t": "BT"})["t"], PartitionSpec(), PartitionSpec())
    return run.manual(write, specs, PartitionSpec())


def choose(z_BV: jax.Array, sampling: Sampling, position: jax.Array) -> jax.Array:
    """The next token of each row, i32[B]; chance is a function of (seed, position) alone."""
    if sampling.temperature == 0:
        return jnp.argmax(z_BV, -1).astype(jnp.int32)
    z_BV = z_BV.astype(jnp.float32) / sampling.temperature
    if sampling.top_p < 1:
        sorted_BV = -jnp.sort(-z_BV, -1)
        before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV, -1), -1) - jax.nn.softmax(sorted_BV, -1)
        least_B = jnp.min(jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf), -1)
        z_BV = jnp.where(z_BV >= least_B[:, None], z_BV, -jnp.inf)
    key = random.key_of(sampling.seed, "sample", position)
    column_V = jnp.arange(z_BV.shape[1], dtype=jnp.uint32)
    chance_V = random.uniform(random.bits(key, jnp.zeros_like(column_V), column_V)[0])
    gumbel_V = -jnp.log(-jnp.log(jnp.clip(chance_V, 1e-7, 1 - 1e-7)))  # the Gumbel-max form of a draw
    return jnp.argmax(z_BV + gumbel_V, -1).astype(jnp.int32)
