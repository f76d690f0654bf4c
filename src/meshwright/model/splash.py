"""Causal attention within documents on TPU: JAX's own splash attention kernels, under varying-axes types.

Splash attention (JAX, `jax.experimental.pallas.ops.tpu.splash_attention`) is FlashAttention (Dao et al. 2022,
arXiv:2205.14135) that skips blocks which the causal mask leaves empty. Key/value heads are not repeated: the kernels
index the head of each group themselves.
"""

import functools
import importlib.util
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import ManualAxisType

from meshwright.compat import vary, varying

LANES = 128
"""The kernels' grain in tokens: blocks are multiples of a vector register's lanes (Google Cloud, TPU architecture)."""


def splash_attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """o_BTNH. Position t sees the positions s <= t of its own document; N is a multiple of K.

    T of any length: it is filled up to a multiple of 128 with positions of document 0, which come last and are cut off.
    """
    length, n, h = q_BTNH.shape[1:]
    missing = -length % LANES
    fill = lambda x: jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x  # noqa: E731
    axes = tuple(frozenset().union(*map(varying, (q_BTNH, k_BSKH, v_BSKH, segments_BT))))
    q_BTNH, k_BSKH, v_BSKH, segments_BT = (vary(fill(x), axes) for x in (q_BTNH, k_BSKH, v_BSKH, segments_BT))
    library = _library(axes)
    attend = _kernel(library, length + missing, n)
    q_BNTH, k_BKSH, v_BKSH = (x.swapaxes(1, 2) for x in (q_BTNH * h**-0.5, k_BSKH, v_BSKH))
    o_BNTH = jax.vmap(attend)(q_BNTH, k_BKSH, v_BKSH, library.SegmentIds(segments_BT, segments_BT))
    return o_BNTH.swapaxes(1, 2)[:, :length]


def _kernel(library: Any, length: int, heads: int) -> Any:
    """The causal kernel for one sequence: (q_NTH, k_KSH, v_KSH, segment ids) -> o_NTH."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block = next(size for size in (1024, 512, 256, LANES) if length % size == 0)
    compute = min(block, 512)
    sizes = library.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length)) for _ in range(heads)])
    return library.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


@functools.cache
def _library(axes: tuple[str, ...]) -> Any:
    """The library's kernels, with outputs that vary over `axes`.

    Their `pallas_call` states output types without varying axes, which `jax.shard_map(check_vma=True)` refuses ("vma on
    jax.ShapeDtypeStruct must not be None"; JAX 0.10.2 to 0.12.0: try again at 0.13). So this is a private copy of the
    module, in which that one name has the axes; the library itself is left as it is.
    """
    name = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if axes:
        module.jax = types.SimpleNamespace(**{**vars(jax), "ShapeDtypeStruct": _shapes(axes)})
    return module


def _shapes(axes: tuple[str, ...]) -> Any:
    """What stands for `jax.ShapeDtypeStruct`: it makes types that vary over `axes`."""

    def shape(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, manual_axis_type=ManualAxisType(varying=frozenset(axes)))

    shape.like = lambda x: shape(x.shape, x.dtype)
    return shape
