"""A matmul of two matrices whose gradients run at the platform's best rate.

XLA:CPU contracts two operands over their first dims (a weight's gradient, x' dy) at half its best rate, and undoes a
transpose that is written before such a matmul. A barrier keeps a transposed copy of the narrower operand (measured in
benchmarks/README.md, JAX 0.10.2 and 0.12). Other platforms need no such rule.
"""

import jax
from jax import lax

from meshwright.compat import vary, varying


def linear(x_RK: jax.Array, w_KC: jax.Array, *, copy_transposed: bool) -> jax.Array:
    """x w, f[R,K] . f[K,C] -> f[R,C]; `copy_transposed` is the rule for XLA:CPU."""
    if not copy_transposed:
        return x_RK @ w_KC
    axes = tuple(varying(x_RK) | varying(w_KC))
    return _linear(vary(x_RK, axes), vary(w_KC, axes))


@jax.custom_vjp
def _linear(x_RK: jax.Array, w_KC: jax.Array) -> jax.Array:
    return x_RK @ w_KC


def _forward(x_RK, w_KC):
    return x_RK @ w_KC, (x_RK, w_KC)


def _backward(saved, dy_RC):
    x_RK, w_KC = saved
    if x_RK.shape[1] <= dy_RC.shape[1]:
        dw_KC = lax.optimization_barrier(x_RK.T) @ dy_RC
    else:
        dw_KC = lax.optimization_barrier(lax.optimization_barrier(dy_RC.T) @ x_RK).T
    return dy_RC @ w_KC.T, dw_KC


_linear.defvjp(_forward, _backward)
