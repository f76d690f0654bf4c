"""Every named array of a layout's forward and backward pass, put together on the host from the shards of all devices.

The model names its arrays as it makes them (`Engine.name`). Each is watched: its value is an extra output, and a zero
that is added to it is a parameter whose gradient is the array's. `Layout.activation` says how the shards lie.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright import mesh
from meshwright.compat import vary
from meshwright.config import LayoutConfig, RunConfig
from meshwright.dims import AXES, TOKEN_AXES
from meshwright.engine import sum_over
from meshwright.layout import Layout, check
from meshwright.model import params as parameters
from meshwright.parallel import accumulate
from meshwright.train import step
from meshwright.train.state import Run, partition
from meshwright.verify import parity
from meshwright.verify.reference import Case

Tree = Any


@dataclass(frozen=True)
class Watched:
    """The named arrays of one run, whole and on the host, by path in the order of the forward pass."""

    values: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    """By each array, of the loss."""
    copies: dict[str, str]
    """The arrays whose copies differ between devices, and over which axes."""
    loss: float
    params: Tree
    """The gradient of each parameter, of the whole batch at once."""


def points(config: RunConfig) -> dict[str, str]:
    """The path and letters of every named array of the model, in the order of the forward pass."""
    single = replace(config, layout=LayoutConfig())
    layout = check(single)
    run = Run.of(single, layout, mesh.make(layout))
    letters: dict[str, str] = {}

    def note(path: str, word: str, value: jax.Array) -> jax.Array:
        letters[path] = word
        return value

    objective = step.objective_of(replace(run, engine=replace(run.engine, observe=note)))
    shapes = {"tokens_BT": jnp.int32, "targets_BT": jnp.int32, "mask_BT": bool, "segments_BT": jnp.int32}
    shapes |= {"positions_BT": jnp.int32, "sample_B": jnp.int32, "x_BD": float, "y_BD": float}
    sizes = {"B": config.train.sequences, "T": config.train.sequence_length, "D": config.model.d_model}
    batch = {
        name: jax.ShapeDtypeStruct(tuple(sizes[letter] for letter in word), shapes[name])
        for name, word in objective.batch_letters.items()
    }
    params = jax.eval_shape(run.initial_state)["params"]
    run.manual(lambda p, b: objective.loss_sum(p, b, None), PartitionSpec(), PartitionSpec()).lower(params, batch)
    return letters


def watch(case: Case, layout: LayoutConfig, batch: Tree) -> Watched:
    """Run one forward and backward pass of the whole batch on `layout` with every named array watched."""
    run = parity.run_of(case, layout)
    config, checked = run.config, run.layout
    objective, letters = step.objective_of(run), points(config)
    probe_specs = {path: partition(checked.activation(word)) for path, word in letters.items()}
    everywhere = PartitionSpec(AXES)

    def program(params: Tree, probes: Tree, batch: Tree) -> Tree:
        tokens = checked.live(*TOKEN_AXES)
        working = accumulate.enter(run.engine, params)
        total = jnp.maximum(sum_over(objective.count(batch), tokens), 1)

        def share(working: Tree, probes: Tree) -> tuple[jax.Array, Tree]:
            seen = {}

            def note(path: str, word: str, value: jax.Array) -> jax.Array:
                seen[path] = value
                return value + probes[path]

            watched = replace(objective, engine=replace(run.engine, observe=note))
            return watched.loss_sum(working, batch, None) / total, seen

        (loss, seen), (of_params, gradients) = jax.value_and_grad(share, (0, 1), has_aux=True)(working, probes)
        own = lambda x: vary(x, AXES)[None]  # noqa: E731  each device's own, whatever it should be
        of_params = accumulate.reduce(run.engine, of_params)
        return sum_over(loss, tokens), of_params, jax.tree.map(own, (seen, gradients))

    probes = {
        path: jax.device_put(
            np.zeros(whole_shape(checked, config, word), run.engine.compute_dtype),
            NamedSharding(run.mesh, probe_specs[path]),
        )
        for path, word in letters.items()
    }
    params = parity.put_params(run, case.params)
    on_devices = step.put_batch(run, batch, objective.batch_letters)
    specs = (run.specs()["params"], probe_specs, run.batch_specs(objective.batch_letters))
    updated = parameters.specs(config.model, lambda letters: partition(checked.updated(letters)))
    jitted = run.manual(program, specs, (PartitionSpec(), updated, everywhere))
    compiled = parity.compile_fast(run, jitted, params, probes, on_devices)
    loss, of_params, (seen, gradients) = compiled(params, probes, on_devices)
    values, copies = {}, {}
    for path, word in letters.items():
        values[path], axes = assemble(run, config, word, seen[path])
        if axes:
            copies[path] = " ".join(axes)
    sums = {path: assemble(run, config, word, gradients[path])[0] for path, word in letters.items()}
    return Watched(values, sums, copies, float(loss), parity.trimmed(checked, of_params))


def whole_shape(layout: Layout, config: RunConfig, letters: str) -> tuple[int, ...]:
    """The shape of a whole activation; with key/value heads that ranks share, one head a rank."""
    sizes = config.model.sizes | {"B": config.train.sequences, "T": config.train.sequence_length}
    if layout.kv_replicated:
        sizes["K"] = layout.config.tensor
    return tuple(sizes[letter] for letter in letters)


def assemble(run: Run, config: RunConfig, letters: str, stacked: jax.Array) -> tuple[np.ndarray, list[str]]:
    """The whole array from every device's own, and the axes over which copies differ (by more than rounding)."""
    spec = run.layout.activation(letters)
    whole = np.full(whole_shape(run.layout, config, letters), np.nan)
    first: dict[Any, Any] = {}
    differ: list[str] = []
    for shard in stacked.addressable_shards:
        place = place_of(run, shard.device)
        own = np.asarray(shard.data[0], np.float64)
        index = tuple(
            slice((n := number_of(run, axes, place)) * size, (n + 1) * size)
            for axes, size in zip(spec, own.shape, strict=True)
        )
        key = tuple((s.start, s.stop) for s in index)
        if key in first:
            other, other_place = first[key]
            if not np.allclose(own, other, rtol=1e-9, atol=1e-9 * (np.abs(other).max() + 1e-300)):
                differ = differ or [axis for axis in AXES if place[axis] != other_place[axis]]
        else:
            first[key] = own, place
            whole[index] = own
    return whole, differ


def place_of(run: Run, device: Any) -> dict[str, int]:
    """A device's place along every axis."""
    return dict(zip(AXES, map(int, np.argwhere(run.mesh.devices == device)[0]), strict=True))


def number_of(run: Run, axes: tuple[str, ...], place: dict[str, int]) -> int:
    """The number of a device's shard along `axes`, slowest first."""
    number = 0
    for axis in axes:
        number = number * run.mesh.shape[axis] + place[axis]
    return number
