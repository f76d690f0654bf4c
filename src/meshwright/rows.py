"""Rows of a table. The gradient of a look-up adds up every use of a row, in float32 or wider, in one of two forms.

A scatter adds each use into the table's gradient: the fastest on CPU. The other form has no scatter: a sort brings the
uses of a row together, a matmul with a mask of equals adds them up within blocks, a scan carries runs from block to
block, and each row of the table reads its own sum. It adds in the same order every time, which the atomic additions of
XLA:GPU do not; those were also up to 450 times slower where a row is used often (jaxlib 0.10.2 to 0.11.0,
openxla/xla#46225). XLA:TPU moved the sums over devices of scatters out of a loop, and got them wrong (0.11.2,
openxla/xla#49143): with microbatches the second form is taken there too.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.compat import vary, varying

BLOCK = 128
"""Uses that one matmul adds up: a side of the matrix units' tiles."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rows(table_VD: jax.Array, row_BT: jax.Array, by_sort: bool = False) -> jax.Array:
    """f[V,D], i32[B,T] -> f[B,T,D]; `by_sort` chooses how the gradient is added up."""
    return table_VD[row_BT]


def _forward(table_VD, row_BT, by_sort):
    return table_VD[row_BT], (row_BT, jnp.zeros((0, *table_VD.shape), table_VD.dtype))


def _backward(by_sort, saved, gradient_BTD):
    row_BT, like_VD = saved
    v, d = like_VD.shape[1:]
    axes = tuple(varying(gradient_BTD) | varying(row_BT))
    row_M, gradient_MD = vary(row_BT.reshape(-1), axes), vary(gradient_BTD.reshape(-1, d), axes)
    add = add_by_sort if by_sort else add_by_scatter
    return add(row_M, gradient_MD, v).astype(like_VD.dtype), None


rows.defvjp(_forward, _backward)


def add_by_scatter(row_M: jax.Array, x_MD: jax.Array, v: int) -> jax.Array:
    """For each of `v` rows the sum of the x whose `row` it is, f[V,D] in float32 or wider."""
    wide = _wide(x_MD.dtype)
    zero_VD = vary(jnp.zeros((v, x_MD.shape[1]), wide), tuple(varying(x_MD)))
    return zero_VD.at[row_M].add(x_MD.astype(wide))


def add_by_sort(row_M: jax.Array, x_MD: jax.Array, v: int) -> jax.Array:
    """The same without a scatter. Blocks G of C = `BLOCK` uses; the last one is filled up with uses of row `v`."""
    (m, d), wide, axes = x_MD.shape, _wide(x_MD.dtype), tuple(varying(x_MD))
    row_M, order_M = lax.sort((row_M, vary(jnp.arange(m, dtype=jnp.int32), axes)), num_keys=1)
    missing = -m % BLOCK
    row_M = jnp.pad(row_M, (0, missing), constant_values=v)
    row_GC, x_GCD = row_M.reshape(-1, BLOCK), jnp.pad(x_MD[order_M], ((0, missing), (0, 0))).reshape(-1, BLOCK, d)
    same_GCC = row_GC[:, :, None] == row_GC[:, None, :]
    sum_GCD = jnp.einsum("gij,gjd->gid", same_GCC.astype(x_MD.dtype), x_GCD, preferred_element_type=wide)

    first_G, last_G = row_GC[:, 0], row_GC[:, -1]
    goes_on_G = jnp.concatenate([first_G[:1] < 0, (last_G[:-1] == first_G[1:]) & (first_G[1:] == last_G[1:])])
    run_GD = _running_sums(sum_GCD[:, -1], goes_on_G)  # of the run that a block ends with, from the run's beginning

    number_V = vary(jnp.arange(v, dtype=jnp.int32), axes)
    at_V = jnp.maximum(jnp.searchsorted(row_M, number_V, side="right").astype(jnp.int32) - 1, 0)  # a row's last use
    before_V = at_V // BLOCK - 1
    own_VD = jnp.where((row_M[at_V] == number_V)[:, None], sum_GCD.reshape(-1, d)[at_V], 0)
    carried_V = (before_V >= 0) & (last_G[before_V] == number_V)
    return own_VD + jnp.where(carried_V[:, None], run_GD[before_V], 0)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def _running_sums(x_GD: jax.Array, goes_on_G: jax.Array) -> jax.Array:
    """x[g] added to the sum before it where g goes on, else begun anew (a segmented scan: Blelloch 1990, section 1.5)."""

    def join(a, b):
        return jnp.where(b[1], a[0] + b[0], b[0]), a[1] & b[1]

    return lax.associative_scan(join, (x_GD, goes_on_G[:, None]))[0]
