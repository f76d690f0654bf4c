"""What a step can be compiled for: devices that need not be there. Nothing here imports JAX.

`tpu-v5p:2x2x4` is a TPU of that topology in chips, `h100-sxm:2x8` is hosts x GPUs a host, `cpu:8` is emulated devices.
"""

import functools
import math
from dataclasses import dataclass
from importlib.util import find_spec

from meshwright.config import require


@dataclass(frozen=True)
class Kind:
    """One kind of device that can be described: its platform and the compiler's own name for it."""

    platform: str
    compiler_name: str
    hbm_bytes: float
    """Memory of one device; infinite for CPU, whose devices share the machine's."""
    shape_dims: tuple[int, ...]
    """How many numbers its shape may have."""
    example: str
    source: str = ""


KINDS = {
    "cpu": Kind("cpu", "cpu", math.inf, (1,), "cpu:8"),
    "tpu-v4": Kind("tpu", "v4", 32 * 2**30, (3,), "tpu-v4:2x2x4", "Google Cloud documentation, TPU v4"),
    "tpu-v5e": Kind("tpu", "v5e", 16 * 2**30, (2,), "tpu-v5e:4x4", "Google Cloud documentation, TPU v5e"),
    "tpu-v5p": Kind("tpu", "v5p", 95 * 2**30, (3,), "tpu-v5p:2x2x4", "Google Cloud documentation, TPU v5p"),
    "tpu-v6e": Kind("tpu", "v6e", 32 * 2**30, (2,), "tpu-v6e:4x4", "Google Cloud documentation, TPU v6e"),
    "h100-sxm": Kind("gpu", "h100", 84_978_434_048, (2,), "h100-sxm:2x8", "device_memory_size of an H100 80GB HBM3"),
    "h200-sxm": Kind("gpu", "h200", 141e9, (2,), "h200-sxm:1x8", "NVIDIA H200 datasheet: 141 GB"),
}

HOPPER = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: MEMORY_BANDWIDTH l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: MEMORY_SIZE shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: 2 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 2 } device_description_str: "NAME"
"""
"""A GpuTargetConfigProto. `feature_extension: 2` chooses sm_90a; with 1 the compiler aborts on wgmma (JAX 0.12.0)."""

MEMORY_BANDWIDTH = {"h100": 3_352_320_000_000, "h200": 4_800_000_000_000}
"""Bytes a second: as an H100 80GB HBM3 reports it; NVIDIA H200 datasheet."""


@dataclass(frozen=True)
class Target:
    """A described machine: a kind of device and how many of them, in which shape."""

    text: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def device_count(self) -> int:
        return math.prod(self.shape)

    def gpu_config(self) -> str:
        """What the compiler must be told of a GPU, a GpuTargetConfigProto as text."""
        name = self.kind.compiler_name
        values = {
            "MEMORY_BANDWIDTH": str(MEMORY_BANDWIDTH[name]),
            "MEMORY_SIZE": str(int(self.kind.hbm_bytes)),
            "NAME": f"NVIDIA {name.upper()}",
        }
        return functools.reduce(lambda text, item: text.replace(*item), values.items(), HOPPER)

    def environment(self) -> dict[str, str]:
        """The environment in which the compiler's process must start, besides this one's."""
        if self.kind.platform == "cpu":
            return {"JAX_PLATFORMS": "cpu", "NPROC": str(2 * self.device_count + 2)}
        quiet = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5p-8"}  # any valid name will do
        several = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # else a second process fails on libtpu's lock file
        absent = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
        return {"JAX_PLATFORMS": "cpu", **quiet, **several, **absent, "TF_CPP_MIN_LOG_LEVEL": "2"}


def parse(text: str) -> Target:
    """Read `KIND:SHAPE`; what is not known or not of the right form is refused."""
    name, colon, dims = text.partition(":")
    known = ", ".join(kind.example for kind in KINDS.values())
    require(bool(name and colon and dims), f"--target {text!r} is not KIND:SHAPE; write one like {known}")
    require(name in KINDS, f"--target {text!r}: {name!r} is not known; allowed: {', '.join(KINDS)} (as in {known})")
    kind = KINDS[name]
    parts = dims.split("x")
    require(
        all(part.isdecimal() and 0 < int(part) <= 4096 for part in parts) and len(parts) in kind.shape_dims,
        f"--target {text!r}: the shape {dims!r} must be {kind.shape_dims[0]} whole number(s) joined by x,"
        f" as in {kind.example}",
    )
    return Target(text, kind, tuple(map(int, parts)))


def require_compiler(target: Target) -> None:
    """Refuse where the compiler that `target` needs is not installed."""
    if target.kind.platform == "tpu":
        require(
            find_spec("libtpu") is not None,
            f"--target {target.text} needs the TPU compiler, which is not installed: pip install libtpu"
            " (Linux on x86-64; no TPU needed)",
        )
    if target.kind.platform == "gpu":
        require(
            any(find_spec(plugin) for plugin in ("jax_cuda12_plugin", "jax_cuda13_plugin")),
            f"--target {target.text} needs the GPU compiler, which is not installed: pip install 'jax[cuda13]'"
            " (Linux, Python 3.12 or newer, about 3 GB; no GPU needed)",
        )
