"""Devices and the mesh: emulated or real, one process or several; all six axes, always.

Emulated devices are CPU devices that share this machine's cores: they show what happens, never how fast it would be.
"""

import ctypes
import hashlib
import logging
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.config import Refused, require
from meshwright.dims import AXES
from meshwright.layout import Layout


def emulate(device_count: int) -> None:
    """Make this process see `device_count` CPU devices or more. Must come before JAX makes its first array.

    XLA:CPU runs all devices' programs on pools of NPROC threads, or max(cores, devices) where that is not set; it reads
    NPROC when the CPU client starts. It lets 32 calls of a device wait; the call after them holds a thread while it waits
    for its turn, and so does a device in a collective until the others arrive. So with more than 32 unfinished calls and
    fewer than two threads for each device one device never gets a thread, and XLA ends the process after 40 s. Measured
    (benchmarks/rendezvous.py, jaxlib 0.10.2, 2 cores): with more than 32, 4, 8 and 16 devices starve in every run with 2 n - 1
    threads or fewer, in none with 2 n or more, whether or not calls depend on each other; with 32 or fewer in none. The
    pools get 2 n threads and one spare for each core, and the loop never has more than two calls unfinished.
    """
    keep_heap()
    threads = 2 * device_count + (os.cpu_count() or 1)
    os.environ["NPROC"] = str(max(threads, int(os.environ.get("NPROC") or 0)))
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax  # starts only after the environment above is set

    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", device_count)
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.local_device_count() >= device_count:
            return
        raise Refused(
            f"{device_count} devices cannot be emulated: JAX has started in this process with {jax.local_device_count()};"
            " call meshwright.mesh.emulate before the first JAX array, or start a new process"
        ) from None


def keep_heap() -> None:
    """Let the C library keep freed memory for the next step, where it is glibc: call it before JAX starts on CPU.

    XLA:CPU allocates a step's temporaries anew in every call; mapping and unmapping them is a third of a small step's
    time (benchmarks/README.md). The numbers are those of malloc.h: no mmap, no trimming, one arena.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in ((-4, 0), (-1, -1), (-8, 1)):
            mallopt(parameter, value)


COMPILED_BYTES = 1 << 30
"""Compiled programs are kept up to so much; beyond it the oldest go."""


def keep_compiled(directory: Path) -> None:
    """Keep compiled programs under `directory` for the next process that compiles the same; the user's own setting wins.

    JAX's persistent cache: its key holds the program, the options, the versions and the platform, but for CPU not the
    instructions that this machine has, so each kind of machine gets a directory of its own.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    own = directory / machine_kind()
    try:
        own.mkdir(parents=True, exist_ok=True)
        files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in own.iterdir())
        kept_bytes = sum(size for _, size, _ in files)
        for _, size_bytes, path in files:
            if kept_bytes > COMPILED_BYTES:
                path.unlink()
                kept_bytes -= size_bytes
    except OSError:  # read-only, or another process was faster: programs are compiled as without it
        if not own.is_dir() or not os.access(own, os.W_OK):
            return
    import jax

    jax.config.update("jax_compilation_cache_dir", str(own))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def machine_kind() -> str:
    """Equal where machine code can be exchanged: a hash of the processor's features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    except OSError:
        features = [platform.processor()]
    return hashlib.blake2b("\n".join([platform.machine(), *features]).encode(), digest_size=8).hexdigest()


def join_processes(coordinator: str, process_count: int, process_id: int, timeout_s: int = 60) -> None:
    """Join JAX's own runtime of several processes; `coordinator` is host:port of JAX's service in process 0.

    Between CPU processes collectives go through gloo. Come here only when all processes are known to be there
    (`processes.join`), for JAX aborts where one is missing.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    logging.getLogger("jax._src.distributed").setLevel(logging.ERROR)  # it warns of every proxy variable
    _keep_standard_output()
    try:
        jax.distributed.initialize(
            coordinator,
            process_count,
            process_id,
            initialization_timeout=timeout_s,
            shutdown_timeout_seconds=timeout_s,
        )
    except Exception as error:
        raise Refused(
            f"process {process_id} of {process_count} could not join JAX's runtime at {coordinator} within"
            f" {timeout_s} s: {str(error).splitlines()[0]}"
        ) from None


def _keep_standard_output() -> None:
    """Let only Python write to standard output: gloo announces each of its connections there."""
    old = sys.stdout
    old.flush()
    own = os.dup(1)
    sys.stdout = open(own, "w", buffering=1 if os.isatty(own) else -1, encoding=old.encoding, errors=old.errors)  # noqa: SIM115
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def require_groups(layout: Layout, count: int) -> None:
    """Refuse a layout that cannot be laid over `count` processes with as many emulated devices each."""
    needed = layout.config.device_count
    require(
        needed % count == 0,
        f"layout '{layout.config}' needs {needed} devices, which {count} processes cannot share equally;"
        f" give --processes one of {', '.join(str(n) for n in range(1, needed + 1) if needed % n == 0)}",
    )
    _split_across(tuple(layout.config.degrees[axis] for axis in AXES), count)


def make(layout: Layout, devices: Sequence[Any] | None = None) -> Any:
    """The mesh of `layout`: a `jax.sharding.Mesh` of all six axes over the first devices that it needs."""
    import jax
    from jax.sharding import AxisType, Mesh

    needed = layout.config.device_count
    devices = list(jax.devices() if devices is None else devices)
    require(
        len(devices) >= needed,
        f"layout '{layout.config}' needs {needed} devices, but there are {len(devices)} {devices[0].device_kind};"
        " use --devices to emulate more, or a smaller layout",
    )
    return Mesh(device_grid(layout, devices[:needed]), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def device_grid(layout: Layout, devices: Sequence[Any]) -> Any:
    """The devices as an array with one dim for each axis.

    Within one group of fast links JAX chooses the order by the wiring. Across several, the slow axes (first in `AXES`) are
    laid across them and the fast ones inside.
    """
    from jax.experimental import mesh_utils

    shape = tuple(layout.config.degrees[axis] for axis in AXES)
    groups = {_fast_group(device) for device in devices}
    if len(groups) == 1:
        return mesh_utils.create_device_mesh(shape, devices)
    across = _split_across(shape, len(groups))
    inside = tuple(size // slow for size, slow in zip(shape, across, strict=True))
    by_process = devices[0].platform == "cpu"
    return mesh_utils.create_hybrid_device_mesh(inside, across, devices, process_is_granule=by_process)


def rings(mesh: Any) -> tuple[tuple[str, int], ...]:
    """The axes that cover all three dimensions of a TPU torus, each with how many neighbours lie along the first.

    Over such an axis XLA:TPU compiles an all-gather and a reduce-scatter to an all-reduce of the whole array, twice the
    bytes (v5p, libtpu 0.0.52); over one or two dimensions it does not. So such an axis is crossed in two stages.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return ()
    found = []
    for dim, axis in enumerate(mesh.axis_names):
        line = mesh.devices[tuple(slice(None) if d == dim else 0 for d in range(mesh.devices.ndim))]
        crossed: set[int] = set()
        ring = 0
        for device in line:
            crossed |= {i for i, at in enumerate(device.coords) if at != line[0].coords[i]}
            ring += len(crossed) <= 1
        if len(crossed) == 3:
            found.append((axis, ring))
    return tuple(found)


def _fast_group(device: Any) -> int:
    """The group of devices with fast links that `device` is in: its TPU slice or NVLink domain, or its process (CPU)."""
    return device.process_index if device.platform == "cpu" else getattr(device, "slice_index", 0)


def _split_across(shape: tuple[int, ...], group_count: int) -> tuple[int, ...]:
    """How much of each axis lies across groups: the slowest axes first, whole factors only."""
    across, left = [], group_count
    for axis, size in zip(AXES, shape, strict=True):
        slow = (
            next(d for d in range(min(size, left), 0, -1) if size % d == 0 and left % d == 0) if axis != "tensor" else 1
        )
        across.append(slow)
        left //= slow
    require(
        left == 1,
        f"{group_count} groups of devices (hosts or slices) cannot be filled by the slow axes of this layout"
        f" ({', '.join(f'{a}={s}' for a, s in zip(AXES, shape, strict=True) if s > 1)}): tensor stays inside one group;"
        f" let pipe x data x fsdp be a multiple of {group_count}",
    )
    return tuple(across)
