"""Every test process sees 8 emulated devices and runs in float64 with strict dtype promotion.

A module that tests what users run (float32, JAX's defaults) says so: ``pytestmark = pytest.mark.usefixtures("as_users_run")``.
"""

import jax
import pytest

from meshwright import mesh

mesh.emulate(8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def as_users_run():
    """JAX's own defaults: no float64, ordinary promotion."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield
