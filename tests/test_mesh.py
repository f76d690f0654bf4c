"""Devices and the mesh: a clear error when JAX has started, all six axes, fast axes inside and slow ones across."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from meshwright import mesh
from meshwright.config import ModelConfig, Refused, parse_layout
from meshwright.dims import AXES
from meshwright.layout import Layout


def layout(text: str) -> Layout:
    return Layout(parse_layout(text), ModelConfig())


@dataclass(frozen=True)
class Device:
    """What the mesh looks at in a device that is not here."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "H100"


def devices(slices: int, each: int, platform: str = "gpu", processes_each: int = 1) -> list[Device]:
    return [
        Device(i, i * processes_each // each, i // each if platform != "cpu" else 0, platform)
        for i in range(slices * each)
    ]


def test_more_devices_than_jax_has_started_with_are_refused():
    assert jax.device_count() == 8  # and so JAX has started
    with pytest.raises(
        Refused, match=r"16 devices cannot be emulated: JAX has started .* with 8; call .*emulate before"
    ):
        mesh.emulate(16)
    mesh.emulate(4)
    assert jax.device_count() == 8


@pytest.mark.parametrize("text", ["data=1", "data=2 fsdp=2 tensor=2", "tensor=8", "fsdp=3"])
def test_all_six_axes_always(text):
    made = mesh.make(layout(text))
    assert made.axis_names == AXES
    assert dict(made.shape) == parse_layout(text).degrees
    assert [device.id for device in made.devices.flat] == list(range(made.size))


def test_too_few_devices_are_refused_with_both_numbers():
    with pytest.raises(Refused, match=r"layout 'fsdp=16' needs 16 devices, but there are 8 cpu"):
        mesh.make(layout("fsdp=16"))


@pytest.mark.parametrize(
    ("text", "across"),
    [
        ("data=2 fsdp=2 tensor=2", {"data": 2}),
        ("fsdp=8", {"fsdp": 2}),
        ("fsdp=2 tensor=4", {"fsdp": 2}),
        ("data=4 tensor=2", {"data": 2}),
    ],
)
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_slow_axes_lie_across_hosts_and_fast_ones_inside(text, across, platform):
    grid = mesh.device_grid(layout(text), devices(2, 4, platform))
    host = np.vectorize(lambda device: device.process_index)(grid)
    assert sorted(device.id for device in grid.flat) == list(range(8))
    for dim, axis in enumerate(AXES):
        moves = np.diff(host, axis=dim)
        assert np.count_nonzero(moves) == (0 if axis not in across else host.size // grid.shape[dim]), axis


def test_one_process_for_each_gpu_of_a_host_is_one_group():
    grid = mesh.device_grid(layout("tensor=8"), devices(1, 8, processes_each=8))
    assert grid.size == 8
    grid = mesh.device_grid(layout("data=2 tensor=4"), devices(2, 4, processes_each=4))
    assert [[device.slice_index for device in row.flat] for row in grid[0]] == [[0] * 4, [1] * 4]


def test_tensor_across_hosts_is_refused_with_what_would_do():
    with pytest.raises(Refused, match="tensor stays inside one group; let pipe x data x fsdp be a multiple of 2"):
        mesh.device_grid(layout("tensor=8"), devices(2, 4))
    with pytest.raises(
        Refused, match="8 devices, which 3 processes cannot share equally; give --processes one of 1, 2, 4, 8"
    ):
        mesh.require_groups(layout("fsdp=8"), 3)
    mesh.require_groups(layout("fsdp=4 tensor=2"), 4)


def test_compiled_programs_are_kept_by_machine_and_within_bounds(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    own = tmp_path / mesh.machine_kind()
    own.mkdir()
    for number in range(4):
        (own / str(number)).write_bytes(bytes(40))
    monkeypatch.setattr(mesh, "COMPILED_BYTES", 100)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    try:
        mesh.keep_compiled(tmp_path)
        assert jax.config.jax_compilation_cache_dir == str(own)
        assert len(list(own.iterdir())) == 2
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
        mesh.keep_compiled(tmp_path / "other")
        assert jax.config.jax_compilation_cache_dir == str(own), "the user's own setting is left alone"
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
        (tmp_path / "file").write_text("")
        mesh.keep_compiled(tmp_path / "file")  # cannot be made: goes without
        assert jax.config.jax_compilation_cache_dir == str(own)
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
