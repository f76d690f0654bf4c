"""Where a difference begins: the first layer and array, forward and backward, at which a layout leaves one device.

The named arrays of a layout (`watch`) are compared in order with those of one device. A layout with a pipeline is tried
without it first: if that is right, the pipeline is searched stage by stage (`pipelines`).
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from meshwright.config import LayoutConfig
from meshwright.legal import without_pipe
from meshwright.verify import parity, pipelines
from meshwright.verify.parity import Bound, Result, Verifier
from meshwright.verify.place import Place, listed
from meshwright.verify.reference import Expected
from meshwright.verify.watch import Watched, watch

Tree = Any


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
        if layout.pipe > 1:
            return self._with_pipe(layout, result)
        verifier = self.verifier
        batch = verifier.oracle.batch(layout)
        one = self.one_device(batch)
        with jax.enable_x64(True):
            expected = verifier.oracle.expected(batch)
            ours = watch(verifier.case, layout, batch)
        return _model_fault(verifier, one, expected) or compare(verifier.limit, ours, one) or _after(result)

    def _with_pipe(self, layout: LayoutConfig, result: Result) -> Place:
        alone = without_pipe(layout)
        without = self.verifier(alone)
        if without.verdict == "differs":
            place = self(alone, without)
            return replace(place, sentence=f"without the pipeline ({alone}) it differs too: {place.sentence}")
        place = pipelines.located(self.verifier, layout, result)
        sentence = f"without the pipeline ({alone}) it is {without.verdict}, with it not: {place.sentence}"
        return replace(place, sentence=sentence)

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
    return Place("model", "loss", sentence + (f"; gradient leaves that differ: {listed(wrong)}" if wrong else ""))


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
    leaves = f"; the gradient leaves that differ: {listed(wrong)}" if wrong else ""
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
    leaves = f": {listed(result.grad_leaves)}" if result.grad_leaves else ""
    if "loss" in result.failed or "gradient" in result.failed:
        sentence = f"{agree}; what the step adds up (parallel/accumulate.py) differs{leaves}"
        return Place("accumulation", (result.grad_leaves or ("loss",))[0], sentence)
    if "norm" in result.failed:
        sentence = f"every gradient agrees; their global norm differs (relative error {result.norm_rel_err:.1e})"
        return Place("norm", "norm", sentence)
    if "sgd" in result.failed:
        sentence = f"every gradient and the norm agree; one step of SGD differs: {listed(result.param_leaves)}"
        return Place("sgd", result.param_leaves[0], sentence)
    if "adam" in result.failed:
        sentence = f"every gradient and one step of SGD agree; AdamW differs: {listed(result.param_leaves)}"
        return Place("adam", result.param_leaves[0], sentence)
    return Place(result.failed[0], result.failed[0], f"{agree}; {result.reason}")


def _copies_of_heads(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One device's key/value heads as ranks that share them hold them: each repeated."""
    return value if value.shape == shape else np.repeat(value, shape[2] // value.shape[2], axis=2)


def _sum_of_copies(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradients by copies of a head, added."""
    if gradient.shape == shape:
        return gradient
    b, t, k, h = shape
    return gradient.reshape(b, t, k, -1, h).sum(axis=3)
