"""Random numbers as a function of (key, global position): equal on every layout, whatever shard asks.

Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") applied to each element's own
global index, so that a shard makes exactly its piece of the whole array and nothing more.
"""

import math
import zlib

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from meshwright.compat import vary, varying


def key_of(seed: int, *words: str | int | jax.Array) -> jax.Array:
    """A key, u32[2], from a seed and words such as a parameter's path, the step, the layer."""
    return fold(jax.random.key_data(jax.random.key(seed, impl="threefry2x32")), *words)


def fold(key: jax.Array, *words: str | int | jax.Array) -> jax.Array:
    """The key that `words` lead to from `key`."""
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    for word in words:
        key = jax.random.fold_in(key, zlib.crc32(word.encode()) if isinstance(word, str) else word)
    return jax.random.key_data(key)


def bits(key: jax.Array, row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two u32 words for each (row, column); both are u32 and broadcast together."""
    row, column = jnp.broadcast_arrays(row.astype(jnp.uint32), column.astype(jnp.uint32))
    words = (*(jnp.broadcast_to(word, row.shape) for word in key), row, column)
    axes = tuple(frozenset().union(*map(varying, words)))  # the primitive wants all its operands of one type
    return tuple(threefry2x32_p.bind(*(vary(word, axes) for word in words)))


def uniform(word: jax.Array) -> jax.Array:
    """f32 in [0, 1) from u32: its upper 24 bits, exactly."""
    return (word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


BELL = 2**16 * math.sqrt(32 / 4 + 2 / 12)
"""The standard deviation of `bell`: 32 coin tosses, and two numbers that are even over a width of one toss."""


def bell(key: jax.Array, row: jax.Array, column: jax.Array, deviation: float) -> jax.Array:
    """Numbers with a bell-shaped density, f32 of mean 0 and `deviation`, one for each (row, column).

    The count of ones in a word (binomial) and two even numbers of 16 bits, added as integers, then one multiplication:
    bit for bit the same on every platform and whatever a compiler makes of it. A logarithm and a cosine (Box and Muller
    1958) are not: XLA:CPU computes them otherwise in the last elements of a loop. To the normal distribution's kurtosis
    of 3 it has 2.94, its distribution function is within 0.002 of the normal one, and nothing lies beyond 5.95 deviations.
    """
    first, second = bits(key, row, column)
    ones = lax.population_count(first).astype(jnp.int32) - 16
    even = (second & jnp.uint32(2**16 - 1)).astype(jnp.int32) + (second >> 16).astype(jnp.int32) - (2**16 - 1)
    return (ones * 2**16 + even).astype(jnp.float32) * jnp.float32(deviation / BELL)


def keep(key: jax.Array, rate: float, row: jax.Array, column: jax.Array) -> jax.Array:
    """Which elements dropout at `rate` keeps: bool for each (row, column)."""
    return bits(key, row, column)[0] >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
