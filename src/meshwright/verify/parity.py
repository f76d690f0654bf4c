"""Parity: does a layout compute exactly what one device computes?

The product's own initial state, training step and evaluation step run on the layout; loss, every gradient, the global
norm, one SGD step, five AdamW steps and the evaluation are compared with the oracle (`reference.py`), whole arrays on
the host. The step is compiled once a layout: its optimiser is `_Probe`, which holds the product's SGD and AdamW side
by side, a switch between them, and the gradient it was given. XLA's CPU code is made the quick way (`compile_fast`):
the same program in a quarter of the compile time.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright import mesh
from meshwright.config import LayoutConfig, Refused, RunConfig
from meshwright.engine import Engine
from meshwright.layout import Layout, check, letters_of
from meshwright.model import params as parameters
from meshwright.train import optim, step
from meshwright.train.state import Run, partition
from meshwright.verify import reference
from meshwright.verify.reference import ADAM_STEPS, Case, Expected

Tree = Any


@dataclass(frozen=True)
class Bound:
    """How far a dtype may be from the float64 oracle; each is an error of `leaf_errors`, the loss's is relative."""

    loss: float
    gradient: float
    param: float
    floor: float
    """A leaf's error is relative to its own largest number plus this share of the largest of all leaves."""


def bound(config: RunConfig, dtype: str) -> Bound:
    """The stated bound of `dtype`.

    float64: 1e-9, the law's. Below it every number is rounded by u = 2^-24 (float32) or 2^-9 (bfloat16) of its size
    some 24 times a layer, forward and backward, and 8 times outside; independent roundings add as the root of their
    number, and the largest of a leaf's many elements is about four deviations out: 4 u sqrt(24 L + 8). float32 also
    sums long rows in that precision: four times more. The loss is a mean over many tokens: an eighth. Leaves whose
    gradient is small beside the others' (a key bias has none at all) are sums of larger numbers that cancel, so the
    floor is a hundredth.
    """
    if dtype == "float64":
        return Bound(1e-9, 1e-9, 1e-9, 1e-6)
    unit, sums = {"float32": (2.0**-24, 4), "bfloat16": (2.0**-9, 1)}[dtype]
    error = 4 * sums * unit * math.sqrt(24 * config.model.layers + 8)
    return Bound(error / 8, error, error, 1e-2)


@dataclass(frozen=True)
class Result:
    """What was found of one layout. Errors are None where it was refused."""

    layout: str
    verdict: str
    """`equal`, `differs` or `refused`."""
    reason: str = ""
    loss_rel_err: float | None = None
    grad_rel_err_max: float | None = None
    grad_worst_leaf: str = ""
    norm_rel_err: float | None = None
    param_rel_err_max: float | None = None
    """After one SGD step or after five AdamW steps, whichever is worse."""
    eval_rel_err: float | None = None
    failed: tuple[str, ...] = ()
    """Which checks failed: initial, copies, padding, loss, gradient, norm, sgd, adam, evaluation, dropout; or program."""
    grad_leaves: tuple[str, ...] = ()
    """The leaves whose gradients differ, worst first."""
    param_leaves: tuple[str, ...] = ()
    """The leaves that differ after the SGD step, or if none does after the AdamW steps; worst first."""
    where: str = ""
    """Where the difference begins (see `bisect`)."""
    seconds: float = 0.0


# ---- the program of a layout -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Probe(Run):
    """A run whose optimiser is the product's AdamW and SGD side by side: its state tells which acts."""

    sgd_scale: float = 1.0
    """The rate of SGD as a multiple of the configured one, which is AdamW's."""

    @property
    def transformation(self) -> optax.GradientTransformation:
        adam = optim.transformation(self.config.optim, self.layout)
        sgd = optim.transformation(replace(self.config.optim, name="sgd", momentum=0.0), self.layout)

        def init(params: Tree) -> Tree:
            return {
                "adam": adam.init(params),
                "gradient": jax.tree.map(jnp.zeros_like, params),
                "adam_acts": jnp.zeros((), bool),
            }

        def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
            by_adam, adam_state = adam.update(updates, state["adam"], params)
            by_sgd, _ = sgd.update(updates, sgd.init(params), params)
            choose = lambda a, s: jnp.where(state["adam_acts"], a, s * jnp.asarray(self.sgd_scale, s.dtype))  # noqa: E731
            state = {"adam": adam_state, "gradient": updates, "adam_acts": state["adam_acts"]}
            return jax.tree.map(choose, by_adam, by_sgd), state

        return optax.GradientTransformation(init, update)

    def _opt_specs(self) -> Tree:
        updated = parameters.specs(self.layout.model, lambda letters: partition(self.layout.updated(letters)))
        return {"adam": super()._opt_specs(), "gradient": updated, "adam_acts": PartitionSpec()}


@dataclass(frozen=True)
class Observed:
    """What a layout computed: whole arrays on the host without padding, and faults of its copies and padding."""

    initial: Tree
    loss: float
    norm: float
    gradient: Tree
    after_sgd: Tree
    after_adam: Tree
    evaluation: float
    copies: tuple[str, ...]
    """Replicated arrays whose copies are not bit for bit the same."""
    padding: tuple[str, ...]
    """Arrays whose vocabulary padding is not exactly zero."""


def observe(case: Case, layout: LayoutConfig, batch: Tree) -> Observed:
    """Run `case` on `layout`: the initial state, one step of SGD, five of AdamW, one evaluation."""
    run = _probe(case, layout)
    on_devices = step.put_batch(run, batch, step.objective_of(run).batch_letters)
    start = compile_fast(run, jax.jit(run.initial_state))()
    initial = start["params"]
    opt = jax.device_get(start["opt"])  # kept on the host: each step takes its state's memory
    state = _state(run, case, opt, adam_acts=False)
    train_step = compile_fast(run, step.train_step(run), state, on_devices)
    sgd, metrics = train_step(state, on_devices)
    adam = _state(run, case, opt, adam_acts=True)
    for _ in range(ADAM_STEPS):
        adam, _ = train_step(adam, on_devices)
    params = put_params(run, case.params)
    evaluated = compile_fast(run, step.eval_step(run), params, on_devices)(params, on_devices)
    arrays = {
        "initial ": initial,
        "gradient of ": sgd["opt"]["gradient"],
        "after one SGD step, ": sgd["params"],
        f"after {ADAM_STEPS} AdamW steps, ": adam["params"],
    }
    moments = {f"after {ADAM_STEPS} AdamW steps, optimiser state ": adam["opt"]}
    trim = functools.partial(trimmed, run.layout)
    return Observed(
        initial=trim(initial),
        loss=float(metrics["loss"]),
        norm=float(metrics["grad_norm"]),
        gradient=_unclipped(run, sgd, metrics),
        after_sgd=trim(sgd["params"]),
        after_adam=trim(adam["params"]),
        evaluation=float(evaluated[0]) / max(float(evaluated[1]), 1),
        copies=tuple(when + fault for when, tree in (arrays | moments).items() for fault in _copy_faults(run, tree)),
        padding=tuple(when + fault for when, tree in arrays.items() for fault in _padding_faults(run, tree)),
    )


def loss_and_gradient(case: Case, layout: LayoutConfig, batch: Tree) -> tuple[float, Tree]:
    """The loss and the gradient of one training step of `case` on `layout` (with dropout where `case` has it)."""
    return gradient_program(case, layout, batch)(batch)


def gradient_program(case: Case, layout: LayoutConfig, batch: Tree) -> Callable[[Tree], tuple[float, Tree]]:
    """`loss_and_gradient` as a function of batches like `batch`, compiled once."""
    run = _probe(case, layout)
    letters = step.objective_of(run).batch_letters
    shapes = jax.eval_shape(run.initial_state)["opt"]
    empty = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
    start = functools.partial(_state, run, case, empty, adam_acts=False)
    program = compile_fast(run, step.train_step(run), start(), step.put_batch(run, batch, letters))

    def call(batch: Tree) -> tuple[float, Tree]:
        state, metrics = program(start(), step.put_batch(run, batch, letters))
        return float(metrics["loss"]), _unclipped(run, state, metrics)

    return call


def run_of(case: Case, layout: LayoutConfig) -> Run:
    """`case` on the first devices that `layout` needs, in its form (with the attention that runs anywhere)."""
    config = replace(case.config, layout=layout)
    checked = check(config)
    run = Run.of(config, checked, mesh.make(checked))
    if case.form in ("", run.platform):
        return run
    engine = Engine.of(checked, config.train, case.form, config.data.packing)
    two_stages = {"rings": (("fsdp", layout.fsdp // 2),)} if case.form == "tpu" and layout.fsdp in (4, 8) else {}
    return replace(run, engine=replace(engine, kernel="blockwise", **two_stages))


def _probe(case: Case, layout: LayoutConfig) -> _Probe:
    run = run_of(case, layout)
    return _Probe(run.config, run.layout, run.engine, run.mesh, case.sgd_scale)


def _state(run: Run, case: Case, opt: Tree, *, adam_acts: bool) -> Tree:
    """A state with the case's weights and an optimiser's state from the host."""
    state = {"opt": opt | {"adam_acts": np.asarray(adam_acts)}, "step": np.zeros((), np.int32)}
    shardings = run.shardings()
    params = shardings.pop("params")
    return {"params": put_params(run, case.params, params)} | jax.tree.map(jax.device_put, state, shardings)


def _unclipped(run: Run, state: Tree, metrics: Tree) -> Tree:
    """The gradient before clipping, f64 on the host, of the state after a step."""
    clip = float(metrics["clip_factor"])
    gradient = trimmed(run.layout, state["opt"]["gradient"])
    return jax.tree.map(lambda g: np.asarray(g, np.float64) / clip, gradient)


def compile_fast(run: Run, jitted: Any, *args: Any) -> Any:
    """Compile for one call or a few: the same program, its code made sooner and slower to run."""
    return jitted.lower(*args).compile(compiler_options=reference.compiler_options(run.platform))


# ---- arrays: host and devices ----------------------------------------------------------------------------


def put_params(run: Run, params: Tree, shardings: Tree = None) -> Tree:
    """Whole parameters without padding -> on the devices as the layout stores them, padding zero."""
    dtype = np.dtype(run.config.train.param_dtype)

    def put(path: str, array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.device_put(parameters.on_devices(run.layout, letters_of(path), array.astype(dtype)), sharding)

    shardings = run.shardings()["params"] if shardings is None else shardings
    return jax.tree.map(put, parameters.names(run.layout.model), params, shardings)


def trimmed(layout: Layout, tree: Tree) -> Tree:
    """Whole arrays on the host, as the model has them."""

    def trim(path: str, array: jax.Array) -> np.ndarray:
        return parameters.of_model(layout, letters_of(path), np.asarray(jax.device_get(array)))

    return jax.tree.map(trim, parameters.names(layout.model), tree)


def _padding_faults(run: Run, tree: Tree) -> Iterator[str]:
    """The leaves that hold anything but zeros where the model has nothing."""
    what = {"V": "the vocabulary's padding", "L": "a row without a layer"}
    for path, array in zip(jax.tree.leaves(parameters.names(run.layout.model)), jax.tree.leaves(tree), strict=True):
        for dim, letter in enumerate(letters_of(path)):
            padding = np.delete(np.asarray(array), run.layout.places(letter) or slice(None), axis=dim)
            if np.any(padding != 0):
                yield f"{path}: {what[letter]} is not zero (up to {np.abs(padding).max():.1e})"


def _copy_faults(run: Run, tree: Tree) -> Iterator[str]:
    """The arrays whose replicated copies are not bit for bit the same, and over which axes."""
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        first: dict[str, Any] = {}
        for shard in array.addressable_shards:
            other = first.setdefault(str(shard.index), shard)
            if np.asarray(other.data).tobytes() != np.asarray(shard.data).tobytes():
                axes = " ".join(_axes_between(run, other.device, shard.device))
                yield f"{optim.path_of(path)}: the copies differ over {axes}"
                break


def _axes_between(run: Run, a: Any, b: Any) -> list[str]:
    ids = np.vectorize(lambda device: device.id)(run.mesh.devices)
    places = [np.argwhere(ids == device.id)[0] for device in (a, b)]
    return [axis for axis, i, j in zip(run.mesh.axis_names, *places, strict=True) if i != j]


# ---- the comparison --------------------------------------------------------------------------------------


def leaf_errors(actual: Tree, expected: Tree, floor: float = 1e-6) -> dict[str, float]:
    """Each leaf's max|a - b| / (max|b| + floor x the largest |b| of all leaves), the law's measure; NaN is infinite."""
    largest = max(float(np.max(np.abs(b), initial=0)) for b in jax.tree.leaves(expected)) or 1.0

    def error(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        value = float(np.max(np.abs(a - b), initial=0) / (np.max(np.abs(b), initial=0) + floor * largest))
        return value if math.isfinite(value) else math.inf

    leaves = jax.tree_util.tree_leaves_with_path(jax.tree.map(error, actual, expected))
    return {optim.path_of(path): value for path, value in leaves}


def _relative(a: float, b: float) -> float:
    error = abs(a - b) / max(abs(b), 1e-300)
    return error if math.isfinite(error) else math.inf


def compare(layout: LayoutConfig, observed: Observed, expected: Expected, initial: Tree, limit: Bound) -> Result:
    """Hold what a layout computed against the oracle, its initial weights against `initial`."""
    gradients = leaf_errors(observed.gradient, expected.gradient, limit.floor)
    sgd = leaf_errors(observed.after_sgd, expected.after_sgd, limit.floor)
    adam = leaf_errors(observed.after_adam, expected.after_adam, limit.floor)
    loss = _relative(observed.loss, expected.loss)
    norm = _relative(observed.norm, expected.norm)
    evaluation = _relative(observed.evaluation, expected.evaluation)
    unequal = [path for path, equal in leaf_equality(observed.initial, initial).items() if not equal]
    worst, worst_sgd, worst_adam = (max(errors, key=lambda path: errors[path]) for errors in (gradients, sgd, adam))
    found = {
        "initial": [f"initial {path} is not bit for bit one device's" for path in unequal],
        "copies": observed.copies,
        "padding": observed.padding,
        "loss": _beyond("loss", loss, limit.loss),
        "gradient": _beyond(f"gradient of {worst}", gradients[worst], limit.gradient),
        "norm": _beyond("gradient norm", norm, limit.gradient),
        "sgd": _beyond(f"{worst_sgd} after one SGD step", sgd[worst_sgd], limit.param),
        "adam": _beyond(f"{worst_adam} after {ADAM_STEPS} AdamW steps", adam[worst_adam], limit.param),
        "evaluation": _beyond("evaluation loss", evaluation, limit.loss),
    }
    failed = tuple(check for check, reasons in found.items() if reasons)
    return Result(
        layout=str(layout),
        verdict="differs" if failed else "equal",
        reason="; ".join(reason for reasons in found.values() for reason in reasons),
        loss_rel_err=loss,
        grad_rel_err_max=gradients[worst],
        grad_worst_leaf=worst,
        norm_rel_err=norm,
        param_rel_err_max=max(sgd[worst_sgd], adam[worst_adam]),
        eval_rel_err=evaluation,
        failed=failed,
        grad_leaves=worst_first(gradients, limit.gradient),
        param_leaves=worst_first(sgd, limit.param) or worst_first(adam, limit.param),
    )


def _beyond(what: str, error: float, most: float) -> list[str]:
    return [] if error <= most else [f"{what}: error {error:.1e}, bound {most:.1e}"]


def worst_first(errors: dict[str, float], most: float) -> tuple[str, ...]:
    """The paths whose errors are above `most`."""
    return tuple(sorted((path for path in errors if errors[path] > most), key=lambda path: -errors[path]))


def leaf_equality(a: Tree, b: Tree) -> dict[str, bool]:
    """For each path, whether two host arrays are equal bit for bit."""
    equal = jax.tree.map(lambda x, y: x.shape == y.shape and x.tobytes() == y.tobytes(), a, b)
    return {optim.path_of(path): value for path, value in jax.tree_util.tree_leaves_with_path(equal)}


class Verifier:
    """Everything that the layouts of one configuration are held against, in one dtype.

    The sizes are those of `config`: reduce them first (`sizes.reduced`) where they are large. `form`: see `Case.form`.
    """

    def __init__(self, config: RunConfig, dtype: str, form: str = ""):
        with jax.enable_x64(True):
            self.oracle, self.limit = reference.Reference(config, dtype, form), bound(config, dtype)
            self.case = self.oracle.case
            self.initial = initial_weights(self.case)
        model = config.model
        dropout = model.dropout_embedding or model.dropout_attention or model.dropout_residual
        self.dropout_case = replace(self.case, config=replace(self.case.config, model=model)) if dropout else None
        self._dropped: dict[bytes, tuple[float, Tree]] = {}

    def __call__(self, layout: LayoutConfig) -> Result:
        """One layout against the oracle; verdict `refused` where it is not legal, `differs` where it does not run."""
        begin = perf_counter()
        try:
            result = self._verified(layout)
        except Refused as refusal:
            result = Result(str(layout), "refused", str(refusal))
        except Exception as error:  # whatever stops a program that `check` lets through is a finding, beside the others
            reason = f"the program does not run: {type(error).__name__}: {str(error).splitlines()[0]}"
            result = Result(str(layout), "differs", reason, failed=("program",))
        return replace(result, seconds=perf_counter() - begin)

    def _verified(self, layout: LayoutConfig) -> Result:
        check(replace(self.case.config, layout=layout))
        with jax.enable_x64(True):
            batch = self.oracle.batch(layout)
            observed = observe(self.case, layout, batch)
            result = compare(layout, observed, self.oracle.expected(batch), self.initial, self.limit)
            return self._with_dropout(layout, batch, result) if self.dropout_case else result

    def _with_dropout(self, layout: LayoutConfig, batch: Tree, result: Result) -> Result:
        """The same with dropout as configured, against one device of the engine itself (the oracle has no dropout)."""
        assert self.dropout_case
        key = batch["mask_BT"].tobytes()
        if key not in self._dropped:
            self._dropped[key] = loss_and_gradient(self.dropout_case, LayoutConfig(), batch)
        one_loss, one_gradient = self._dropped[key]
        loss, gradient = loss_and_gradient(self.dropout_case, layout, batch)
        errors = leaf_errors(gradient, one_gradient, self.limit.floor)
        worst = max(errors, key=lambda path: errors[path])
        reasons = [
            *_beyond("loss with dropout", _relative(loss, one_loss), self.limit.loss),
            *_beyond(f"gradient of {worst} with dropout", errors[worst], self.limit.gradient),
        ]
        if not reasons:
            return result
        reason = "; ".join([*([result.reason] if result.reason else []), *reasons])
        return replace(result, verdict="differs", reason=reason, failed=(*result.failed, "dropout"))


def initial_weights(case: Case) -> Tree:
    """The initial weights that one device makes, without padding."""
    run = run_of(case, LayoutConfig())
    return trimmed(run.layout, compile_fast(run, jax.jit(run.initial_state))()["params"])
