"""Every test process sees 8 emulated devices. Tests that compare exactly run in float64 with strict dtype promotion."""

import jax
import pytest

from meshwright import mesh

mesh.emulate(8)


@pytest.fixture
def float64():
    """float64 where asked for, and no silent promotion of dtypes."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield
