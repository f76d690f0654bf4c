"""Text from the model, on its own layout: greedy, at a temperature, or from the smallest likely set (top-p).

One compiled program writes all tokens (no call to the host between them). Each token costs a whole forward pass over
the window; there is no cache of keys and values, which is right for the short samples that a run shows.
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
from meshwright.compat import varying
from meshwright.config import require
from meshwright.dims import BATCH_AXES
from meshwright.engine import gather, max_over
from meshwright.model.forward import Objective, vocabulary_logits, whole_head
from meshwright.parallel import accumulate
from meshwright.train.state import Run

Tree = Any


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the likeliest at `temperature` 0, else by chance among the likeliest of share `top_p`."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.temperature >= 0, f"temperature={self.temperature} must be at least 0")
        require(0 < self.top_p <= 1, f"top_p={self.top_p} must be above 0 and at most 1")


def generate(
    run: Run, params: Tree, prompt: list[int], count: int, sampling: Sampling, program: Any = None
) -> list[int]:
    """`count` token ids that continue `prompt`, equal on every layout up to rounding.

    Once the text is longer than the window (`train.sequence_length`), the model sees its last part. `program` is
    that of `writer`, compiled, where there is one.
    """
    jitted, (rows, *_) = writer(run, len(prompt), count, sampling)
    tokens_BT = np.zeros(rows.shape, np.int32)
    tokens_BT[:, : len(prompt)] = prompt
    on_devices = jax.make_array_from_callback(rows.shape, rows.sharding, lambda index: tokens_BT[index])
    start, stop = np.int32(len(prompt)), np.int32(len(prompt) + count)
    written_BT = (program or jitted)(params, on_devices, start, stop)
    return np.asarray(written_BT.addressable_data(0))[0, start:stop].tolist()


def writer(run: Run, prompt_length: int, count: int, sampling: Sampling) -> tuple[Any, tuple[Any, ...]]:
    """The program ``(params, tokens_BT, start, stop) -> tokens_BT`` and the kinds of its arguments after the first."""
    most = run.config.train.sequence_length
    require(prompt_length > 0, "the prompt is empty; it needs at least one token")
    require(
        prompt_length <= most,
        f"the prompt has {prompt_length} tokens, more than the model's window of train.sequence_length={most};"
        " give a shorter one (train.sample_prompt)",
    )
    splits = max(
        run.layout.degree(run.layout.live("context", "tensor")), 1
    )  # T is a multiple of this, so is the window
    length = -(-(prompt_length + count) // splits) * splits
    rows = run.layout.degree(run.layout.live(*BATCH_AXES))  # one for each device that holds sequences, all the same
    sharding = NamedSharding(run.mesh, run.batch_specs({"tokens_BT": "BT"})["tokens_BT"])
    kind = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return _program(run, min(length, most), sampling), (kind, number, number)


@functools.lru_cache(maxsize=8)
def _program(run: Run, window: int, sampling: Sampling) -> Any:
    engine = replace(run.engine, unroll_layers=False)
    batch_axes, objective = run.layout.live(*BATCH_AXES), Objective(engine, run.config.train, "full")

    def write(params: Tree, tokens_BT: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
        working = accumulate.enter(engine, params)
        head_DV = whole_head(engine, working)
        positions_BT = jnp.broadcast_to(jnp.arange(window, dtype=jnp.int32), (tokens_BT.shape[0], window))
        fixed = {
            "segments_BT": jnp.ones_like(positions_BT),
            "positions_BT": positions_BT,
            "sample_B": jnp.zeros(tokens_BT.shape[:1], jnp.int32),
        }

        def one(i: jax.Array, tokens_BT: jax.Array) -> jax.Array:
            first = jnp.maximum(i - window, 0)
            seen_BT = lax.dynamic_slice_in_dim(tokens_BT, first, window, axis=1)
            x_BTD = accumulate.hidden(objective, working, {"tokens_BT": seen_BT, **fixed})
            last_BTD = lax.dynamic_slice_in_dim(x_BTD, i - 1 - first, 1, axis=1)
            z_BTV = vocabulary_logits(engine, last_BTD, head_DV)
            z_BV = gather(z_BTV, run.layout.vocabulary_axes, 2, same=True)[:, 0]
            z_BV = max_over(z_BV, tuple(varying(z_BV) & {"pipe"}))  # equal on all stages already
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
