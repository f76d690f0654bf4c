"""Devices and the mesh: emulated or real, one process or several; all six axes, always.

Emulated devices are CPU devices that share this machine's cores: they show what happens, never how fast it would be.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any

from meshwright.config import Refused, require
from meshwright.dims import AXES
from meshwright.layout import Layout


def emulate(device_count: int) -> None:
    """Make this process see `device_count` CPU devices or more. Must come before JAX makes its first array.

    XLA:CPU runs each device's program on one thread pool, and a device that waits in a collective holds its thread. With
    fewer threads than devices (times the calls in flight) the last device never arrives and the process is aborted after
    40 s. So the pool gets two threads per device and one spare for each core, and the loop keeps at most one call in
    flight beside the running one (`train.loop`). NPROC is read by XLA's thread pools when the CPU client starts.
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


def join_processes(coordinator: str, process_count: int, process_id: int, timeout_s: int = 60) -> None:
    """Join a run of several processes (JAX's own runtime; gloo between CPU processes).

    `coordinator` is host:port of process 0. A process that does not come within `timeout_s` is an error.
    """
    import jax

    require(0 <= process_id < process_count, f"--process-id {process_id} must be from 0 to {process_count - 1}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, process_count, process_id, initialization_timeout=timeout_s)
    except Exception as error:
        raise Refused(
            f"process {process_id} of {process_count} found not all the others at {coordinator} within {timeout_s} s:"
            f" {str(error).splitlines()[0]}"
        ) from None


def make(layout: Layout, devices: Sequence[Any] | None = None) -> Any:
    """The mesh of `layout`: a `jax.sharding.Mesh` of all six axes over the first devices that it needs.

    Within one slice or NVLink domain JAX chooses the order by the wiring. Across several, the slow axes (first in
    `AXES`) are laid across them and the fast ones inside.
    """
    import jax
    from jax.experimental import mesh_utils
    from jax.sharding import AxisType, Mesh

    shape = tuple(layout.config.degrees[axis] for axis in AXES)
    needed = layout.config.device_count
    devices = list(jax.devices() if devices is None else devices)
    require(
        len(devices) >= needed,
        f"layout '{layout.config}' needs {needed} devices, but there are {len(devices)} {devices[0].device_kind};"
        " use --devices to emulate more, or a smaller layout",
    )
    devices = devices[:needed]
    groups = _fast_groups(devices)
    if len(groups) > 1:
        across = _split_across(shape, len(groups))
        inside = tuple(size // slow for size, slow in zip(shape, across, strict=True))
        by_process = len({getattr(d, "slice_index", 0) for d in devices}) == 1
        grid = mesh_utils.create_hybrid_device_mesh(inside, across, devices, process_is_granule=by_process)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _fast_groups(devices: Sequence[Any]) -> set[tuple[int, int]]:
    """The groups of devices with fast links inside: a TPU slice, or the devices of one GPU or CPU process."""
    slices = {getattr(d, "slice_index", 0) for d in devices}
    if devices[0].platform == "tpu":
        return {(s, 0) for s in slices}
    return {(getattr(d, "slice_index", 0), d.process_index) for d in devices}


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
