"""Where a pipeline leaves one device: the stage, the chunk, its layers and the microbatches.

For a layout that is right without its pipeline. The loops of the training step run once more and hand out what every
stage makes in every tick: results of F and gradients of B. The schedule says of which microbatch and layers each is, and
one device says what it should be: the first that is wrong although what it was made from is right names the stage. Where
all of them agree, the step runs with the targets of one microbatch at a time, and gradients of parameters are compared
layer by layer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.compat import vary
from meshwright.config import LayoutConfig
from meshwright.dims import AXES, TOKEN_AXES
from meshwright.engine import sum_over
from meshwright.layout import letters_of
from meshwright.model.forward import before_layers, tokens_of
from meshwright.parallel import accumulate, pipeline
from meshwright.parallel.pipeline import Pipeline, Row, running_schedule
from meshwright.schedules.table import Op, Schedule
from meshwright.train import step
from meshwright.train.state import Run
from meshwright.verify import parity, reference
from meshwright.verify.cases import microbatch_rows
from meshwright.verify.parity import Bound, Result, Verifier
from meshwright.verify.place import Place, listed
from meshwright.verify.reference import Case
from meshwright.verify.watch import number_of, place_of

Tree = Any
Errors = dict[tuple[int, int], float]
"""For each (microbatch, position), how far what a stage makes is from one device."""


def located(verifier: Verifier, layout: LayoutConfig, result: Result) -> Place:
    """Where the pipeline of `layout` is wrong; of a `result` that differs although the layout without pipe is right."""
    if not {"loss", "gradient", "dropout"} & set(result.failed):
        return Place("pipeline", result.failed[0], f"loss and every gradient agree; {result.reason}")
    dropped = not {"loss", "gradient"} & set(result.failed)
    case = verifier.dropout_case if dropped else verifier.case
    assert case
    with jax.enable_x64(True):
        place = _Search(case, layout, verifier.oracle.batch(layout), verifier.limit, dropped).place()
    sentence = f"with dropout, {place.sentence}" if dropped else place.sentence
    sentence += f"; {result.reason}" if place.at == "sum" else ""
    return Place("pipeline", place.at, sentence)


# ---- what the stages make --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Watched(Pipeline):
    """A pipeline that keeps what its stage makes in a tick, while it is traced."""

    made: dict[str, jax.Array] = field(default_factory=dict)

    def _forward(self, state: Tree, own: Row, row: Row) -> tuple[Tree, jax.Array]:
        state, self.made["F"] = super()._forward(state, own, row)
        return state, self.made["F"]

    def _backward(self, state: Tree, own: Row, row: Row) -> tuple[Tree, jax.Array]:
        state, self.made["B"] = super()._backward(state, own, row)
        return state, self.made["B"]


def stage_results(run: Run, params: Tree, batch: Tree) -> tuple[Schedule, dict[str, list[np.ndarray]]]:
    """The schedule that runs, and for F and B what each stage makes in each tick: f[stages, microbatch's rows, ...]."""
    objective = step.objective_of(run)
    found = []

    def program(params: Tree, batch: Tree) -> Tree:
        engine = run.engine
        total = sum_over(objective.count(batch), engine.layout.live(*TOKEN_AXES))
        parts, key = accumulate.microbatches(engine, batch), step.dropout_key(run, jnp.zeros((), jnp.int32))
        watched = _Watched(objective, accumulate.enter(engine, params), parts, key, 1 / jnp.maximum(total, 1))
        schedule = running_schedule(objective)
        table = pipeline.timetable(schedule)
        found[:] = [schedule, table]
        state, made = watched._start(table), []
        for loop in table.loops:

            def tick(state: Tree, row: Row, loop: Any = loop) -> tuple[Tree, Tree]:
                watched.made.clear()
                return watched._tick(table, loop, state, row), dict(watched.made)

            state, own = lax.scan(tick, state, {name: jnp.asarray(column) for name, column in loop.columns.items()})
            made.append(own)
        return jax.tree.map(lambda x: vary(x, AXES)[None], made)

    on_devices = step.put_batch(run, batch, objective.batch_letters)
    specs = run.specs()["params"], run.batch_specs(objective.batch_letters)
    jitted = run.manual(program, specs, PartitionSpec(AXES))
    params = parity.put_params(run, params)
    loops = parity.compile_fast(run, jitted, params, on_devices)(params, on_devices)
    schedule, table = found
    made: dict[str, list[np.ndarray]] = {"F": [], "B": []}
    for loop, own in zip(table.loops, loops, strict=True):
        ticks = len(next(iter(loop.columns.values())))
        for kind, arrays in made.items():
            arrays += list(_assembled(run, own[kind])) if kind in own else [np.zeros(0)] * ticks
    return schedule, made


def _assembled(run: Run, stacked: jax.Array) -> np.ndarray:
    """f[ticks, stages, rows, ...] from every device's f[ticks, own rows, ...]."""
    language = run.layout.model.is_language_model
    spec = run.layout.activation("BTD" if language else "BD")
    ticks, *local = stacked.shape[1:]
    shape = [size * run.layout.degree(axes) for size, axes in zip(local, spec, strict=True)]
    whole = np.zeros((ticks, run.layout.config.pipe, *shape))
    for shard in stacked.addressable_shards:
        place = place_of(run, shard.device)
        starts = [number_of(run, axes, place) * size for axes, size in zip(spec, local, strict=True)]
        index = tuple(slice(start, start + size) for start, size in zip(starts, local, strict=True))
        whole[(slice(None), place["pipe"], *index)] = np.asarray(shard.data[0], np.float64)
    return whole


def streams(case: Case, batch: Tree) -> tuple[np.ndarray, np.ndarray]:
    """What stands before each layer and after the last on one device, and the loss's gradient by it: f64[L + 1, B, ...]."""
    run = parity.run_of(case, LayoutConfig())
    objective, engine, layers = step.objective_of(run), run.engine, run.layout.model.layers
    letters = "BTD" if run.layout.model.is_language_model else "BD"
    sizes = run.config.model.sizes | {"B": run.config.train.sequences, "T": run.config.train.sequence_length}
    probes = np.zeros((layers + 1, *(sizes[letter] for letter in letters)), engine.compute_dtype)

    def program(params: Tree, probes: jax.Array, batch: Tree) -> Tree:
        working = accumulate.enter(engine, params)
        tokens = tokens_of(engine, batch, step.dropout_key(run, jnp.zeros((), jnp.int32)))

        def share(probes: jax.Array) -> tuple[jax.Array, jax.Array]:
            x, seen = before_layers(engine, working, batch, tokens), []
            for layer in range(layers):
                seen.append(x := x + probes[layer])
                own = engine.enter_layer(jax.tree.map(lambda w, layer=layer: w[layer], working["layers"]))
                x = objective.block(engine, own, x, tokens, layer)
            seen.append(x := x + probes[layers])
            loss = objective.loss_after_layers(working, x, batch)
            return loss / jnp.maximum(objective.count(batch), 1), jnp.stack(seen)

        (_, seen), slopes = jax.value_and_grad(share, has_aux=True)(probes)
        return seen, slopes

    on_devices = step.put_batch(run, batch, objective.batch_letters)
    specs = run.specs()["params"], PartitionSpec(), run.batch_specs(objective.batch_letters)
    params = parity.put_params(run, case.params)
    jitted = run.manual(program, specs, PartitionSpec())
    seen, slopes = parity.compile_fast(run, jitted, params, probes, on_devices)(params, probes, on_devices)
    return np.asarray(seen, np.float64), np.asarray(slopes, np.float64)


# ---- the search ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Search:
    case: Case
    layout: LayoutConfig
    batch: Tree
    limit: Bound
    dropout: bool

    @cached_property
    def run(self) -> Run:
        return parity.run_of(self.case, self.layout)

    def place(self) -> Place:
        schedule, made = stage_results(self.run, self.case.params, self.batch)
        states, slopes = streams(self.case, self.batch)
        forward = self._errors(schedule, "F", made["F"], states)
        backward = self._errors(schedule, "B", made["B"], slopes)
        first = self._stage(schedule, "F", forward)
        if first:
            return first
        shares = self._shares()
        losses = tuple(m for m, (loss, _) in enumerate(shares) if loss > self.limit.loss)
        if losses:
            stage = schedule.at(schedule.positions - 1)[0]
            sentence = (
                f"every stage makes what it should, but the loss of {self._counted(losses)} is wrong"
                f" (the last layer and the head are on stage {stage})"
            )
            return Place("pipeline", "loss", sentence)
        return self._stage(schedule, "B", backward) or self._gradients(schedule, shares)

    def _errors(self, schedule: Schedule, kind: str, made: list[np.ndarray], right: np.ndarray) -> Errors:
        """How far each result of a kind is from one device, by the law's measure of its layer."""
        errors, stages = {}, self.run.layout.stages
        largest = np.max(np.abs(right))
        for (stage, op), tick in schedule.tick_of.items():
            if op.kind != kind or tick >= len(made) or not made[tick].size:
                continue
            layers = stages.layers[stage][op.chunk]
            own = right[layers[-1] + 1 if kind == "F" else layers[0]]
            expected = own[microbatch_rows(len(own), self.layout, op.microbatch)]
            distance = np.max(np.abs(made[tick][stage] - expected))
            error = distance / (np.max(np.abs(own)) + self.limit.floor * largest)
            errors[op.microbatch, schedule.position(stage, op.chunk)] = float(error if np.isfinite(error) else np.inf)
        return errors

    def _stage(self, schedule: Schedule, kind: str, errors: Errors) -> Place | None:
        """The stage that first makes a wrong result of what is right."""
        wrong = {where for where, error in errors.items() if error > self.limit.gradient}
        before = -1 if kind == "F" else 1
        first = [(m, p) for m, p in wrong if (m, p + before) not in wrong]
        if not first:
            return None
        tick = lambda where: schedule.tick_of[_at(schedule, kind, *where)]  # noqa: E731
        _, position = min(first, key=lambda where: (tick(where), where))
        stage, chunk = schedule.at(position)
        numbers = tuple(sorted(m for m, p in first if p == position))
        others = sorted({schedule.at(p)[0] for _, p in first} - {stage})
        direction, what, given = {
            "F": ("forward", "its result", "what it was sent"),
            "B": ("forward and loss agree; backward", "the gradient by its input", "the gradient that it was sent"),
        }[kind]
        error = max(errors[m, position] for m in numbers)
        end = 0 if kind == "F" else schedule.positions - 1
        given = f", though {given} is right" if position != end else ""
        sentence = (
            f"{direction} first differs on {self._named(stage, chunk)}: {what} of {self._counted(numbers)} is wrong"
            f" (max relative error {error:.1e}){given}"
        )
        more = f"; so it is on stage {' and '.join(map(str, others))}" if others else ""
        word = "forward" if kind == "F" else "backward"
        return Place("pipeline", f"{word} stage {stage} chunk {chunk}", sentence + more)

    def _shares(self) -> list[tuple[float, float]]:
        """For each microbatch, with its targets alone: the errors of the loss and of the worst leaf's gradient."""
        ours = parity.gradient_program(self.case, self.layout, self.batch)
        right = self._right()
        errors = []
        for number in range(self.layout.microbatches):
            batch = _alone(self.batch, self.layout, number)
            (loss, gradient), (one_loss, one_gradient) = ours(batch), right(batch)
            leaves = parity.leaf_errors(gradient, one_gradient, self.limit.floor)
            errors.append((abs(loss - one_loss) / max(abs(one_loss), 1e-300), max(leaves.values())))
        return errors

    def _right(self) -> Callable[[Tree], tuple[float, Tree]]:
        if self.dropout:  # the oracle has none
            return parity.gradient_program(self.case, LayoutConfig(), self.batch)
        return lambda batch: reference.loss_and_gradient(self.case, batch)

    def _gradients(self, schedule: Schedule, shares: list[tuple[float, float]]) -> Place:
        """The layers, their stages, and the other parameters whose gradients differ."""
        _, gradient = parity.loss_and_gradient(self.case, self.layout, self.batch)
        _, expected = self._right()(self.batch)
        layers, ends, leaves = self._wrong_leaves(gradient, expected)
        wrong = tuple(m for m, (_, error) in enumerate(shares) if error > self.limit.gradient)
        by_chunk = {
            (stage, chunk): [n for n in own if n in layers]
            for stage, chunks in enumerate(self.run.layout.stages.layers)
            for chunk, own in enumerate(chunks)
        }
        found = [(*where, own) for where, own in by_chunk.items() if own]
        places = [self._named(stage, chunk, own) for stage, chunk, own in found]
        parts = [f"on {' and on '.join(places)}, {listed(leaves)}"] if places else []
        parts += [f"of {listed(ends)}"] if ends else []
        if not parts:
            return Place(
                "pipeline", "sum", "what stages make and every gradient agree when they are computed once more"
            )
        counted = f"of {self._counted(wrong)} " if wrong else ""
        at = f"stage {found[0][0]} chunk {found[0][1]}" if found else ends[0]
        sentence = f"what stages send each other agrees; gradients {counted}differ: {'; '.join(parts)}"
        return Place("pipeline", f"gradient {at}", sentence)

    def _wrong_leaves(self, gradient: Tree, expected: Tree) -> tuple[set[int], tuple[str, ...], tuple[str, ...]]:
        """The layers with a wrong gradient, the wrong leaves that are no layer's, and those that are."""
        wrong = parity.worst_first(parity.leaf_errors(gradient, expected, self.limit.floor), self.limit.gradient)
        of_layers = tuple(path for path in wrong if letters_of(path).startswith("L"))
        largest = max(float(np.max(np.abs(b))) for b in jax.tree.leaves(expected))
        layers = set()
        for path in of_layers:
            ours, right = (np.asarray(_leaf(tree, path), np.float64) for tree in (gradient, expected))
            distance = np.abs(ours - right).reshape(len(right), -1).max(axis=1)
            bound = self.limit.gradient * (np.max(np.abs(right)) + self.limit.floor * largest)
            layers |= set(np.flatnonzero(~(distance <= bound)).tolist())
        names = tuple(path.removeprefix("layers/") for path in of_layers)
        return layers, tuple(path for path in wrong if path not in of_layers), names

    # ---- words ----

    def _named(self, stage: int, chunk: int, layers: Iterable[int] | None = None) -> str:
        chunks = self.run.layout.stages.layers[stage]
        own = list(chunks[chunk] if layers is None else layers)
        text = f"layer {own[0]}" if len(own) == 1 else f"layers {', '.join(map(str, own))}"
        return f"stage {stage}{f', chunk {chunk}' if len(chunks) > 1 else ''} ({text})"

    def _counted(self, numbers: tuple[int, ...]) -> str:
        count = self.layout.microbatches
        if len(numbers) == count:
            return {1: "the one microbatch", 2: "both microbatches"}.get(count, f"all {count} microbatches")
        return f"microbatch{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of {count}"


def _at(schedule: Schedule, kind: str, microbatch: int, position: int) -> tuple[int, Op]:
    stage, chunk = schedule.at(position)
    return stage, Op(kind, microbatch, chunk)


def _alone(batch: Tree, layout: LayoutConfig, number: int) -> Tree:
    """The batch with the targets of one microbatch, all of them; of a regression, with zeros for the others."""
    rows = microbatch_rows(len(next(iter(batch.values()))), layout, number)
    if "mask_BT" not in batch:
        only = lambda a: np.where(np.isin(np.arange(len(a)), rows)[:, None], a, 0)  # noqa: E731
        return {name: only(array) for name, array in batch.items()}
    mask_BT = np.zeros_like(batch["mask_BT"])
    mask_BT[rows] = batch["segments_BT"][rows] > 0
    return batch | {"mask_BT": mask_BT}


def _leaf(tree: Tree, path: str) -> Any:
    for key in path.split("/"):
        tree = tree[key]
    return tree
