"""Random numbers are the same whoever makes them: any shard, any shape, any optimisation of the compiler."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import random

ROWS, COLUMNS = 37, 481
"""Odd, so that loops over vectors have remainders."""


def field(rows: slice, columns: slice, optimise: bool = True) -> np.ndarray:
    """A piece of one large array of numbers, compiled for that piece alone."""
    row = jnp.arange(ROWS, dtype=jnp.uint32)[rows, None]
    column = jnp.arange(COLUMNS, dtype=jnp.uint32)[None, columns]
    make = jax.jit(lambda row, column: random.bell(random.key_of(3, "w"), row, column, 0.02))
    options = None if optimise else {"xla_backend_optimization_level": 0}
    return np.asarray(make.lower(row, column).compile(options)(row, column))


WHOLE = slice(None)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(5, 18), slice(36, 37)])
@pytest.mark.parametrize("columns", [slice(0, 3), slice(100, 240), slice(240, 481), slice(0, 481, 2)])
@pytest.mark.parametrize("optimise", [True, False])
def test_a_shard_makes_its_piece_bit_for_bit(rows, columns, optimise):
    assert (field(rows, columns, optimise) == field(WHOLE, WHOLE)[rows, columns]).all()


def test_the_bell_is_what_its_words_say():
    """From the bits by integers in numpy, one rounding at the end: no platform has another answer."""
    row, column = np.mgrid[:ROWS, :COLUMNS].astype(np.uint32)
    first, second = (np.asarray(word) for word in random.bits(random.key_of(3, "w"), jnp.array(row), jnp.array(column)))
    ones = np.array([word.bit_count() for word in map(int, first.ravel())]).reshape(first.shape)
    whole = (ones - 16) * 2**16 + (second % 2**16).astype(int) + (second // 2**16).astype(int) - (2**16 - 1)
    assert (field(WHOLE, WHOLE) == whole.astype(np.float32) * np.float32(0.02 / random.BELL)).all()


def test_the_bell_is_nearly_normal():
    x = np.asarray(random.bell(random.key_of(0), *(jnp.arange(n, dtype=jnp.uint32)[s] for n, s in SQUARE), 1.0))
    x = x.ravel().astype(np.float64)
    assert x.mean() == pytest.approx(0, abs=4 / x.size**0.5)
    assert x.var() == pytest.approx(1, rel=4 * (2 / x.size) ** 0.5)
    assert (x**4).mean() == pytest.approx(3 - 0.06, abs=0.02)
    points = np.linspace(-4, 4, 161)
    normal = [0.5 * (1 + math.erf(p / 2**0.5)) for p in points]
    assert np.abs(np.searchsorted(np.sort(x), points) / x.size - normal).max() < 3e-3


SQUARE = ((2000, np.s_[:, None]), (2000, np.s_[None]))
