"""The differences between the versions of JAX that we support (0.10.2 to 0.12), in one place."""

import jax
from jax import lax


def varying(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which `x` may differ between devices, inside `jax.shard_map`."""
    return jax.typeof(x).mat.varying


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Let `x` count as different on every device along `axes`; its gradient is then not summed over them."""
    missing = tuple(axis for axis in axes if axis not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x
