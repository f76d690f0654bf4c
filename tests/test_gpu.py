"""What the step does on a GPU, as far as a CPU can tell; and (slow) what the compiler for GPUs makes of it."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import rows
from meshwright.config import LayoutConfig, ModelConfig, TrainConfig
from meshwright.engine import Engine
from meshwright.layout import Layout
from meshwright.model import cudnn
from meshwright.model.attention import attend

# ---- the gradient of a look-up ---------------------------------------------------------------------------

USES = {
    "each row once": np.arange(40),
    "one row always": np.full(700, 3),
    "a run over three blocks and its neighbours": np.repeat([0, 1, 2, 39], [100, 300, 1, 40]),
    "runs that end with their blocks": np.repeat([4, 5, 39], [rows.BLOCK, 2 * rows.BLOCK, rows.BLOCK]),
    "the last row alone": np.array([39]),
    "frequent words": np.minimum(np.random.default_rng(0).zipf(1.3, 1000) - 1, 39),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("add", [rows.add_by_scatter, rows.add_by_sort])
def test_every_use_of_a_row_is_added_up(name, add):
    used_M = np.random.default_rng(1).permutation(USES[name]).astype(np.int32)
    x_MD = np.random.default_rng(2).normal(size=(used_M.size, 5))
    wanted_VD = np.zeros((40, 5))
    np.add.at(wanted_VD, used_M, x_MD)
    got_VD = jax.jit(add, static_argnums=2)(used_M, x_MD, 40)
    np.testing.assert_allclose(got_VD, wanted_VD, rtol=0, atol=1e-12)


@pytest.mark.parametrize("by_sort", [False, True])
def test_a_look_up_in_bfloat16_is_added_up_in_float32(by_sort):
    """1 + 1023 times 2^-9: in bfloat16 every addition would be lost."""
    used_BT = jnp.zeros((1, 1024), jnp.int32)
    weigh_BTD = jnp.where(jnp.arange(1024) == 0, 1.0, 2.0**-9).astype(jnp.bfloat16)[None, :, None]
    table_VD = jnp.zeros((3, 2), jnp.bfloat16)
    slope_VD = jax.grad(lambda table_VD: (rows.rows(table_VD, used_BT, by_sort) * weigh_BTD).sum())(table_VD)
    np.testing.assert_array_equal(slope_VD[0], jnp.full(2, 1 + 1023 / 512).astype(jnp.bfloat16))
    assert not slope_VD[1:].any()


def test_the_sorted_form_has_no_scatter():
    add = jax.jit(rows.add_by_sort, static_argnums=2)
    program = str(jax.make_jaxpr(lambda r, x: add(r, x, 40))(jnp.zeros(300, jnp.int32), jnp.zeros((300, 8))))
    assert "sort" in program and "scatter" not in program
