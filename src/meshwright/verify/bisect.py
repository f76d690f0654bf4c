"""Where a difference begins: the first layer and array, forward and backward, at which a layout leaves one device.

The model names its arrays as it makes them (`Engine.name`). Each is watched: its value is an extra output, and a zero
that is added to it is a parameter whose gradient is the array's. A layout's arrays are put together from the shards
of all devices, as `Layout.activation` says they lie, and compared in order with those of one device.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
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
from meshwright.verify.parity import Bound, Result, Verifier
from meshwright.verify.reference import Case, Expected

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


@dataclass(frozen=True)
class Place:
    """Where a layout first differs.

    `kind`: model (one device itself is wrong), forward, loss, backward, gradient (of parameters, with one microbatch),
    accumulation (of the step), or the check of `Result.failed` that alone differs.
    """

    kind: str
    at: str
    sentence: str


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
        place: dict[str, int] = dict(zip(AXES, np.argwhere(run.mesh.devices == shard.device)[0], strict=True))
        own = np.asarray(shard.data[0], np.float64)
        index = tuple(
            slice((n := _number(run, axes, place)) * size, (n + 1) * size)
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


def _number(run: Run, axes: tuple[str, ...], place: dict[str, int]) -> int:
    number = 0
    for axis in axes:
        number = number * run.mesh.shape[axis] + int(place[axis])
    return number


# ---- the search ------------------------------------------------------------------------------------------


class Bisector:
    """Finds where layouts of one configuration first leave one device, which is watched once for each batch."""

    def __init__(self, verifier: Verifier):
        self.verifier = verifier
        self._one: dict[bytes, Watched] = {}

    def __call__(self, layout: LayoutConfig, result: Result) -> Place:
        """Where the layout of a `result` that differs first leaves one device, and one sentence that says it."""
        if "program" in result.failed:
            return Place("program", "program", result.reason)
        if "initial" in result.failed:
            at = result.reason.split()[1]
            return Place("initial", at, f"the initial weights depend on the layout, first {at}")
        verifier = self.verifier
        batch = verifier.oracle.batch(layout)
        one = self.one_device(batch)
        with jax.enable_x64(True):
            expected = verifier.oracle.expected(batch)
            ours = watch(verifier.case, layout, batch)
        return _model_fault(verifier, one, expected) or compare(verifier.limit, ours, one) or _after(result)

    def one_device(self, batch: Tree) -> Watched:
        key = batch["mask_BT"].tobytes() if "mask_BT" in batch else b""
        if key not in self._one:
            with jax.enable_x64(True):
                self._one[key] = watch(self.verifier.case, LayoutConfig(), batch)
        return self._one[key]


def _model_fault(verifier: Verifier, one: Watched, expected: Expected) -> Place | None:
    """One device of the engine against the oracle: if they differ, no layout can be right."""
    errors = parity.leaf_errors(one.params, expected.gradient, verifier.limit.floor)
    wrong = parity.worst_first(errors, verifier.limit.gradient)
    if abs(one.loss - expected.loss) <= verifier.limit.loss * abs(expected.loss) and not wrong:
        return None
    losses = f"loss {one.loss:.9g}, oracle {expected.loss:.9g}"
    sentence = f"one device itself differs from the oracle ({losses}): the model is wrong, not the layout"
    return Place("model", "loss", sentence + (f"; gradient leaves that differ: {_listed(wrong)}" if wrong else ""))


def compare(limit: Bound, ours: Watched, one: Watched) -> Place | None:
    """The first named array, forward and then backward, at which `ours` leaves `one`; None where all agree."""
    order = list(one.values)
    repeated = {path: _copies_of_heads(value, ours.values[path].shape) for path, value in one.values.items()}
    forward = parity.leaf_errors(ours.values, repeated, limit.floor)
    for before, path in pairwise(["the batch", *order]):
        differs = [f"max relative error {forward[path]:.1e}"] if forward[path] > limit.gradient else []
        differs += [f"its copies differ over {ours.copies[path]}"] if path in ours.copies else []
        if differs:
            sentence = f"forward first differs at {path} ({', '.join(differs)}); before it, {before} agrees"
            return Place("forward", path, sentence)
    if abs(ours.loss - one.loss) > limit.loss * abs(one.loss):
        last = order[-1] if order else "the batch"
        sentence = f"forward agrees up to {last}; the loss differs ({ours.loss:.9g}, one device {one.loss:.9g})"
        return Place("loss", "loss", sentence)
    summed = {path: _sum_of_copies(g, one.gradients[path].shape) for path, g in ours.gradients.items()}
    backward = parity.leaf_errors(summed, one.gradients, limit.floor)
    errors = parity.leaf_errors(ours.params, one.params, limit.floor)
    wrong = parity.worst_first(errors, limit.gradient)
    leaves = f"; the gradient leaves that differ: {_listed(wrong)}" if wrong else ""
    for after, path in pairwise(["the loss", *reversed(order)]):
        if backward[path] > limit.gradient:
            error = f"max relative error {backward[path]:.1e}"
            sentence = f"forward agrees; backward first differs at {path} ({error}); after it, {after} agrees"
            return Place("backward", path, sentence + leaves)
    if wrong:
        sentence = "forward and backward agree at every named array; gradients differ where they are put together"
        return Place("gradient", wrong[0], sentence + leaves)
    return None


def _after(result: Result) -> Place:
    """The whole batch's gradients agree: what is wrong comes after them, in the step."""
    agree = "with the whole batch at once the loss and every gradient agree"
    leaves = f": {_listed(result.grad_leaves)}" if result.grad_leaves else ""
    if "loss" in result.failed or "gradient" in result.failed:
        sentence = f"{agree}; what the step adds up (parallel/accumulate.py) differs{leaves}"
        return Place("accumulation", (result.grad_leaves or ("loss",))[0], sentence)
    if "norm" in result.failed:
        sentence = f"every gradient agrees; their global norm differs (relative error {result.norm_rel_err:.1e})"
        return Place("norm", "norm", sentence)
    if "sgd" in result.failed:
        sentence = f"every gradient and the norm agree; one step of SGD differs: {_listed(result.param_leaves)}"
        return Place("sgd", result.param_leaves[0], sentence)
    if "adam" in result.failed:
        sentence = f"every gradient and one step of SGD agree; AdamW differs: {_listed(result.param_leaves)}"
        return Place("adam", result.param_leaves[0], sentence)
    return Place(result.failed[0], result.failed[0], f"{agree}; {result.reason}")


def _listed(leaves: tuple[str, ...], most: int = 6) -> str:
    more = f" and {len(leaves) - most} more" if len(leaves) > most else ""
    return ", ".join(leaves[:most]) + more


def _copies_of_heads(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One device's key/value heads as ranks that share them hold them: each repeated."""
    return value if value.shape == shape else np.repeat(value, shape[2] // value.shape[2], axis=2)


def _sum_of_copies(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradients by copies of a head, added."""
    if gradient.shape == shape:
        return gradient
    b, t, k, h = shape
    return gradient.reshape(b, t, k, -1, h).sum(axis=3)
