"""The words that move data, on eight devices: what each device gets, and that gradients take the same way back."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, PartitionSpec

from meshwright import engine

AXIS = "tensor"
P = PartitionSpec


def over_four(function, in_spec, out_spec):
    mesh = jax.make_mesh((4,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:4])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=True))


X = np.arange(32.0).reshape(8, 4)
SHARDS = X.reshape(4, 2, 4)  # what each of four devices holds


def test_gather_gives_every_shard_in_order():
    whole = over_four(lambda x: engine.gather(x, (AXIS,), 0, same=True), P(AXIS), P())(X)
    np.testing.assert_array_equal(whole, X)


def test_a_sum_is_a_scatter_sum_and_a_gather():
    summed = over_four(lambda x: engine.sum_over(x, (AXIS,)), P(AXIS), P())(X)
    np.testing.assert_array_equal(summed, SHARDS.sum(0))
    both = lambda x: engine.gather(engine.scatter_sum(x, (AXIS,), 1), (AXIS,), 1, same=True)  # noqa: E731
    np.testing.assert_array_equal(over_four(both, P(AXIS), P())(X), summed)


@pytest.mark.parametrize("by", [1, 2, -1])
def test_shift_gives_what_the_device_before_holds(by):
    shifted = over_four(lambda x: engine.shift(x, AXIS, by), P(AXIS), P(AXIS))(X)
    np.testing.assert_array_equal(shifted, np.roll(SHARDS, by, axis=0).reshape(8, 4))


def test_exchange_splits_one_dim_and_joins_another():
    exchanged = over_four(lambda x: engine.exchange(x, (AXIS,), split=1, concat=0), P(AXIS), P(None, AXIS))(X)
    np.testing.assert_array_equal(exchanged, X)  # rows split become columns split: the same array, laid out otherwise


def test_empty_axes_move_nothing():
    for word in (engine.gather, engine.scatter_sum, partial(engine.exchange, concat=0)):
        assert word(X, (), 1) is X
    assert engine.sum_over(X, ()) is X


WORDS = {
    "gather": lambda x: engine.gather(x, (AXIS,), 0),
    "scatter-sum": lambda x: engine.scatter_sum(x, (AXIS,), 1),
    "sum": lambda x: engine.sum_over(x, (AXIS,)),
    "shift": lambda x: engine.shift(x, AXIS),
    "exchange": lambda x: engine.exchange(x, (AXIS,), 1, 0),
}


@pytest.mark.parametrize("word", WORDS)
def test_the_derivative_of_each_word_takes_the_same_way_back(word):
    """A word is linear, so for the loss <c, word(x)> with any c: <gradient, d> = <c, word(d)> for any d."""

    def weighed(x):
        moved = WORDS[word](x)
        place = jax.lax.axis_index(AXIS).astype(jnp.float64)
        weights = jnp.cos(jnp.arange(moved.size, dtype=jnp.float64) + place)
        return engine.sum_over((moved * weights.reshape(moved.shape)).sum(), (AXIS,))

    loss = over_four(weighed, P(AXIS), P())
    x, d = np.random.default_rng(0).normal(size=(2, 8, 4))
    slope = jax.grad(loss)(x)
    np.testing.assert_allclose((slope * d).sum(), float(loss(d)), rtol=1e-12)


def moves(jaxpr, found=()):
    """(primitive, shape, dtype) of every gather and scatter-sum in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("all_gather", "reduce_scatter"):
            kind = equation.outvars[0].aval
            found = (*found, (equation.primitive.name, kind.shape, str(kind.dtype)))
        for inner in jaxprs_in_params(equation.params):
            found = moves(inner, found)
    return found


def test_a_weight_moves_in_one_dtype_and_its_gradient_in_another():
    def loss(w):
        whole = engine.gather_weight(w, (AXIS,), 0, jnp.dtype("bfloat16"), jnp.dtype("float32"))
        return whole.astype(jnp.float32).sum()

    program = jax.make_jaxpr(over_four(jax.grad(loss), P(AXIS), P(AXIS)))(jnp.ones((8, 4), jnp.float32))
    assert set(moves(program.jaxpr)) == {
        ("all_gather", (8, 4), "bfloat16"),
        ("reduce_scatter", (2, 4), "float32"),
    }
