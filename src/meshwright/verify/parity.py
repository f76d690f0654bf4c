"""Parity: does a layout compute exactly what one device computes?

The product's own initial state, training step and evaluation step run on the layout; loss, every gradient, the global
norm, one SGD step, five AdamW steps and the evaluation are compared with the oracle (`reference.py`), whole arrays on
the host. The step is compiled once a layout: its optimiser is `_Probe`, which holds the product's SGD and AdamW side
by side, a switch between them, and the gradient it was given. XLA's CPU code generator runs at level 0: same program,
a third of the compile time.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
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
from meshwright.layout import check, letters_of
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
    sums long rows in that precision: four times more. The loss is a mean over many tokens: a quarter. Leaves whose
    gradient is small beside the others' (a key bias has none at all) are sums of larger numbers that cancel, so the
    floor is a hundredth.
    """
    if dtype == "float64":
        return Bound(1e-9, 1e-9, 1e-9, 1e-6)
    unit, sums = {"float32": (2.0**-24, 4), "bfloat16": (2.0**-9, 1)}[dtype]
    error = 4 * sums * unit * math.sqrt(24 * config.model.layers + 8)
    return Bound(error / 4, error, error, 1e-2)


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

        def update(gradients: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
            by_adam, adam_state = adam.update(gradients, state["adam"], params)
            by_sgd, _ = sgd.update(gradients, sgd.init(params), params)
            choose = lambda a, s: jnp.where(state["adam_acts"], a, s * jnp.asarray(self.sgd_scale, s.dtype))  # noqa: E731
            state = {"adam": adam_state, "gradient": gradients, "adam_acts": state["adam_acts"]}
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
    faults: tuple[str, ...]


def observe(case: Case, layout: LayoutConfig, batch: Tree) -> Observed:
    """Run `case` on `layout`: the initial state, one step of SGD, five of AdamW, one evaluation."""
    config = replace(case.config, layout=layout)
    checked = check(config)
    base = Run.of(config, checked, mesh.make(checked))
    run = _Probe(base.config, base.layout, base.engine, base.mesh, case.sgd_scale)
    letters = step.objective_of(run).batch_letters
    on_devices = step.put_batch(run, batch, letters)
    compiled = functools.partial(_compile, run)

    start = compiled(jax.jit(run.initial_state))()
    initial = start["params"]
    opt = jax.device_get(start["opt"])  # kept on the host: each step takes its state's memory

    def state_of(params: Tree, opt: Tree, *, adam_acts: bool) -> Tree:
        opt = opt | {"adam_acts": np.asarray(adam_acts)}
        return {
            "params": put_params(run, params),
            "opt": jax.tree.map(jax.device_put, opt, run.shardings()["opt"]),
            "step": jax.device_put(np.zeros((), np.int32), NamedSharding(run.mesh, PartitionSpec())),
        }

    state = state_of(case.params, opt, adam_acts=False)
    train_step = compiled(step.train_step(run), state, on_devices)
    sgd, metrics = train_step(state, on_devices)
    adam = state_of(case.params, opt, adam_acts=True)
    for _ in range(ADAM_STEPS):
        adam, _ = train_step(adam, on_devices)
    jax.block_until_ready(adam)
    params = put_params(run, case.params)
    evaluated = compiled(step.eval_step(run), params, on_devices)(params, on_devices)
    gradient = sgd["opt"]["gradient"]
    faults = [
        *(f"initial {fault}" for fault in _faults(run, initial)),
        *(f"gradient of {fault}" for fault in _padding_faults(run, gradient)),
        *(f"after one SGD step, {fault}" for fault in _faults(run, sgd["params"])),
        *(f"after {ADAM_STEPS} AdamW steps, {fault}" for fault in _faults(run, adam["params"])),
        *(f"after {ADAM_STEPS} AdamW steps, optimiser state {fault}" for fault in _copy_faults(run, adam["opt"])),
    ]
    clip = float(metrics["clip_factor"])
    trim = functools.partial(trimmed, case.config.model)
    return Observed(
        initial=trim(initial),
        loss=float(metrics["loss"]),
        norm=float(metrics["grad_norm"]),
        gradient=jax.tree.map(lambda g: np.asarray(g, np.float64) / clip, trim(gradient)),
        after_sgd=trim(sgd["params"]),
        after_adam=trim(adam["params"]),
        evaluation=float(evaluated[0]) / max(float(evaluated[1]), 1),
        faults=tuple(faults),
    )


def _compile(run: Run, jitted: Any, *args: Any) -> Any:
    options = {"xla_backend_optimization_level": 0} if run.platform == "cpu" else {}
    return jitted.lower(*args).compile(compiler_options=options)


# ---- arrays: host and devices ----------------------------------------------------------------------------


def put_params(run: Run, params: Tree) -> Tree:
    """Whole parameters without padding -> on the devices as the layout stores them, padding zero."""
    dtype = np.dtype(run.config.train.param_dtype)

    def put(path: str, array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        wanted = run.layout.shape(letters_of(path))
        padded = np.pad(array.astype(dtype), [(0, w - n) for w, n in zip(wanted, array.shape, strict=True)])
        return jax.device_put(padded, sharding)

    return jax.tree.map(put, parameters.names(run.layout.model), params, run.shardings()["params"])


def trimmed(model: Any, tree: Tree) -> Tree:
    """Whole arrays on the host, without the padding of the vocabulary."""

    def trim(path: str, array: jax.Array) -> np.ndarray:
        true = tuple(slice(model.sizes[letter]) for letter in letters_of(path))
        return np.asarray(jax.device_get(array))[true]

    return jax.tree.map(trim, parameters.names(model), tree)


def _faults(run: Run, tree: Tree) -> Iterator[str]:
    yield from _copy_faults(run, tree)
    yield from _padding_faults(run, tree)


def _padding_faults(run: Run, tree: Tree) -> Iterator[str]:
    """The leaves whose vocabulary padding is not exactly zero."""
    v = run.layout.model.vocab_size
    for path, array in zip(jax.tree.leaves(parameters.names(run.layout.model)), jax.tree.leaves(tree), strict=True):
        letters = letters_of(path)
        if "V" in letters:
            padding = np.moveaxis(np.asarray(array), letters.index("V"), 0)[v:]
            if np.any(padding != 0):
                yield f"{path}: the vocabulary's padding is not zero (up to {np.abs(padding).max():.1e})"


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
    worst = max(gradients, key=lambda path: gradients[path])
    sgd = leaf_errors(observed.after_sgd, expected.after_sgd, limit.floor)
    adam = leaf_errors(observed.after_adam, expected.after_adam, limit.floor)
    reasons = list(observed.faults)
    for path, equal in leaf_equality(observed.initial, initial).items():
        if not equal:
            reasons.append(f"initial {path} is not bit for bit one device's")
    checks = (
        ("loss", _relative(observed.loss, expected.loss), limit.loss),
        (f"gradient of {worst}", gradients[worst], limit.gradient),
        ("gradient norm", _relative(observed.norm, expected.norm), limit.gradient),
        (f"{max(sgd, key=lambda path: sgd[path])} after one SGD step", max(sgd.values()), limit.param),
        (f"{max(adam, key=lambda path: adam[path])} after {ADAM_STEPS} AdamW steps", max(adam.values()), limit.param),
        ("evaluation loss", _relative(observed.evaluation, expected.evaluation), limit.loss),
    )
    reasons += [f"{what}: error {error:.1e}, bound {most:.1e}" for what, error, most in checks if not error <= most]
    return Result(
        layout=str(layout),
        verdict="differs" if reasons else "equal",
        reason="; ".join(reasons),
        loss_rel_err=checks[0][1],
        grad_rel_err_max=gradients[worst],
        grad_worst_leaf=worst,
        norm_rel_err=checks[2][1],
        param_rel_err_max=max(*sgd.values(), *adam.values()),
        eval_rel_err=checks[5][1],
    )


def leaf_equality(a: Tree, b: Tree) -> dict[str, bool]:
    """For each path, whether two host arrays are equal bit for bit."""
    equal = jax.tree.map(lambda x, y: x.shape == y.shape and x.tobytes() == y.tobytes(), a, b)
    return {optim.path_of(path): value for path, value in jax.tree_util.tree_leaves_with_path(equal)}


def verify_one(oracle: reference.Reference, initial: Tree, layout: LayoutConfig, dtype: str) -> Result:
    """One layout against the oracle; `refused` where it is not legal."""
    try:
        check(replace(oracle.case.config, layout=layout))
    except Refused as refusal:
        return Result(str(layout), "refused", str(refusal))
    case, batch = oracle.case, oracle.batch(layout)
    observed = observe(case, layout, batch)
    return compare(layout, observed, oracle.expected(batch), initial, bound(case.config, dtype))


def initial_weights(case: Case) -> Tree:
    """The initial weights that one device makes, without padding."""
    config = replace(case.config, layout=LayoutConfig())
    run = Run.of(config, check(config), mesh.make(check(config)))
    return trimmed(config.model, _compile(run, jax.jit(run.initial_state))()["params"])


def verify(
    config: RunConfig,
    layouts: Iterable[LayoutConfig],
    dtype: str = "float64",
    progress: Callable[[Result], None] = lambda result: None,
) -> tuple[Result, ...]:
    """Hold each layout against one device. `progress` is given each result as it comes.

    The sizes are those of `config`: reduce them first (`sizes.reduced`) where they are large. A layout that cannot
    run is a result with verdict `refused` and the reason.
    """
    results = []
    with jax.enable_x64(True):
        oracle = reference.Reference(config, dtype)
        initial = initial_weights(oracle.case)
        for layout in layouts:
            begin = perf_counter()
            result = replace(verify_one(oracle, initial, layout, dtype), seconds=perf_counter() - begin)
            results.append(result)
            progress(result)
    return tuple(results)
