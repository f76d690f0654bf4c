"""Pipelines: one compiled program that carries out a schedule's table, loop after loop, tick after tick.

In a tick a stage does at most one F (a chunk's forward pass of a microbatch), one B (its backward pass) and one W (the
weights' gradients that a split backward pass left), each behind a branch; then one permute for each direction takes the
results to their next stage. Inside a branch all devices of every other axis's groups are together, for they share a stage.
What crosses pipe itself (a vocabulary split over it) stands outside, behind a condition that is equal on all stages.

Schedules: Huang et al. 2018 (GPipe), Narayanan et al. 2021 (1F1B, interleaved), Qi et al. 2023 (zero bubble).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.compat import vary, varying
from meshwright.config import LayoutConfig
from meshwright.dims import TOKEN_AXES
from meshwright.engine import Engine, place, shift, sum_over, wider
from meshwright.model.forward import Objective, before_layers, tokens_of
from meshwright.parallel.layer import Layer, zeros
from meshwright.parallel.timetable import Channel, Loop, Timetable, forward_only, timetable
from meshwright.schedules.simulate import Times, executor_form
from meshwright.schedules.table import Schedule
from meshwright.stages import schedule_of

Tree = Any
Row = dict[str, jax.Array]


@dataclass(frozen=True)
class Pipeline:
    """One stage's part in one step, inside `jax.shard_map`."""

    objective: Objective
    working: Tree
    """Working copies of the parameters (`accumulate.enter`)."""
    parts: Tree
    """The microbatches of this device's shard of the batch: each array [M, ...]."""
    key: Any = None
    scale: Any = 1.0
    """What each microbatch's summed loss is multiplied by."""

    @property
    def engine(self) -> Engine:
        return self.objective.engine

    @cached_property
    def layer(self) -> Layer:
        """This stage's layers, one at a time."""
        return Layer(self.objective, self.working["layers"])

    @cached_property
    def ends(self) -> Tree:
        """The parameters that are no layer's."""
        return {name: leaf for name, leaf in self.working.items() if name != "layers"}

    @property
    def split(self) -> bool:
        """Whether all stages work on embedding and head together."""
        return self.engine.layout.config.split_vocabulary

    # ---- microbatches ----

    def part(self, number: jax.Array) -> Tree:
        """The batch of one microbatch; `number` may differ between stages."""
        axes = tuple(varying(number))
        pick = lambda a: lax.dynamic_index_in_dim(vary(a, axes), number, keepdims=False)  # noqa: E731
        return jax.tree.map(pick, self.parts)

    def embed(self, ends: Tree, part: Tree) -> jax.Array:
        """What the first chunk is given."""
        return before_layers(self.engine, ends, part, tokens_of(self.engine, part, self.key))

    def share(self, ends: Tree, x: jax.Array, part: Tree) -> jax.Array:
        """A microbatch's share of the loss, from what the last chunk made."""
        return self.objective.loss_after_layers(ends, x, part) * self.scale

    @cached_property
    def stream(self) -> Callable[[], jax.Array]:
        """Makes zeros of the kind that stages send to each other."""
        kind = jax.eval_shape(lambda: self.embed(self.ends, self.part(jnp.zeros((), jnp.int32))))
        return lambda: vary(zeros(kind), ("pipe",))

    # ---- training ----

    def loss_and_gradients(self, schedule: Schedule) -> tuple[jax.Array, Tree]:
        """This device's share of the loss, and of every gradient, in float32 or wider."""
        table = timetable(schedule)
        state = self._start(table)
        for loop in table.loops:
            tick = lambda state, row, loop=loop: (self._tick(table, loop, state, row), None)  # noqa: E731
            state, _ = lax.scan(tick, state, {name: jnp.asarray(column) for name, column in loop.columns.items()})
        return state["loss"], {"layers": state["layers"], **state["ends"]}

    def _start(self, table: Timetable) -> Tree:
        """The sums, and empty rings."""
        layer, stash, first = self.layer, self.engine.layout.config.stash, jnp.zeros((), jnp.int32)
        chunk = vary(first, ("pipe",))
        tokens = tokens_of(self.engine, self.part(chunk), self.key)
        sums = lambda w: vary(jnp.zeros(w.shape, wider(w.dtype, self.engine.wide_dtype)), tuple(varying(w)))  # noqa: E731
        layers, stream = jax.tree.map(sums, layer.weights), jax.eval_shape(self.stream)
        kept = jax.eval_shape(lambda: layer.forward(chunk, self.stream(), tokens)[1])
        state = {
            "loss": self._no_loss(),
            "layers": layers,
            "ends": jax.tree.map(sums, self.ends),
            "input": ring(stream, table.depths["input"] + 1),  # one more for what is no arrival
            "slope": ring(stream, table.depths["slope"] + 1),
            "stash": ring(kept if stash == "layer" else {"x": stream}, table.depths["stash"]),
            "out": {channel.name: self.stream() for channel in table.channels if channel.by},
        }
        if table.schedule.splits_backward:
            made = lambda kept: layer.input_gradient(chunk, kept, self.stream(), tokens, layers)[2]  # noqa: E731
            state["tape"] = ring(jax.eval_shape(made, kept), table.depths["tape"])
        return state

    def _tick(self, table: Timetable, loop: Loop, state: Tree, row: Row) -> Tree:
        """One tick of this stage."""
        own = self._own(row)
        late = table.schedule.delay > 1
        channels = [c for c in table.channels if c.by and (late or c.kind in loop.kinds)]
        coming = {c.name: shift(state["out"][c.name], "pipe", c.by) for c in channels} if late else {}
        made = {}
        if "F" in loop.kinds:
            state, made["F"] = self._forward(state, own, row)
            state = self._locally(table, "F", state, own, made["F"])
        if "B" in loop.kinds:
            state, made["B"] = self._backward(state, own, row)
            state = self._locally(table, "B", state, own, made["B"])
        if "W" in loop.kinds:
            state = self._weights(state, own)
        out = state["out"] | {c.name: made[c.kind] for c in channels if c.kind in made}
        if not late:
            coming = {c.name: shift(out[c.name], "pipe", c.by) for c in channels}
        state = state | {"out": out if late else state["out"]}
        for channel in channels:
            state = self._arrive(state, channel, own, coming[channel.name])
        return state

    def _no_loss(self) -> jax.Array:
        return vary(jnp.zeros((), self.engine.logits_dtype), (*self.engine.layout.live(*TOKEN_AXES), "pipe"))

    def _own(self, row: Row) -> Row:
        """This stage's part of a row of the timetable."""
        return {name: vary(column, ("pipe",))[place(("pipe",))] for name, column in row.items()}

    def _locally(self, table: Timetable, kind: str, state: Tree, own: Row, x: jax.Array) -> Tree:
        """What goes from one chunk of this stage to another of its own."""
        for channel in table.channels:
            state = self._arrive(state, channel, own, x) if (channel.kind, channel.by) == (kind, 0) else state
        return state

    def _arrive(self, state: Tree, channel: Channel, own: Row, x: jax.Array) -> Tree:
        name = "input" if channel.kind == "F" else "slope"
        return state | {name: put(state[name], own[channel.name], x)}

    def _when(self, does: jax.Array, do: Callable[[Tree], Any], otherwise: Callable[[Tree], Any], state: Tree) -> Any:
        if not self.engine.layout.config.uniform_ticks:
            return lax.cond(does, do, otherwise, state)
        return choose(does, do(state), otherwise(state))

    # ---- F ----

    def _forward(self, state: Tree, own: Row, row: Row) -> tuple[Tree, jax.Array]:
        embedded = self._embedded(row) if self.split and "F_first" in row else None

        def do(state: Tree) -> tuple[Tree, jax.Array]:
            part, x = self._input(own, state["input"], embedded)
            y, kept = self.layer.forward(own["F_chunk"], x, tokens_of(self.engine, part, self.key))
            kept = kept if self.engine.layout.config.stash == "layer" else {"x": x}
            state = state | {"stash": put(state["stash"], own["F_stash"], kept)}
            if not self.split and "F_last" in own:
                last = lambda state: self._slope(state, own["F_slope"], y, part)  # noqa: E731
                state = lax.cond(own["F_last"] == 1, last, lambda state: state, state)
            return state, y

        state, y = self._when(own["F"] == 1, do, lambda state: (state, self.stream()), state)
        if self.split and "F_last" in row:
            slope = lambda state, y, part, mine: self._slope(state, own["F_slope"], y, part, mine)  # noqa: E731
            state = self._together(state, own, row, y, slope)
        return state, y

    def _input(self, own: Row, inputs: jax.Array, embedded: jax.Array | None) -> tuple[Tree, jax.Array]:
        """The microbatch of this stage's F, and what its chunk is given."""
        part, x = self.part(own["F_microbatch"]), get(inputs, own["F_input"])
        if "F_first" not in own:
            return part, x
        first = own["F_first"] == 1
        if embedded is not None:
            return part, jnp.where(first, embedded, x)
        return part, lax.cond(first, lambda: vary(self.embed(self.ends, part), ("pipe",)), lambda: x)

    def _slope(self, state: Tree, slot: jax.Array, y: jax.Array, part: Tree, mine: Any = True) -> Tree:
        """The loss of a microbatch, its gradient by what the last chunk made, and by the parameters of the head."""
        share, (dends, dy) = jax.value_and_grad(self.share, (0, 1))(self.ends, y, part)
        return state | {
            "loss": state["loss"] + jnp.where(mine, share, 0),
            "ends": added(state["ends"], dends),
            "slope": put(state["slope"], slot, vary(dy, ("pipe",))),
        }

    def _embedded(self, row: Row) -> jax.Array:
        """What the first chunk is given in this tick, looked up by all stages together."""
        does = row["F"] * row["F_first"]
        number = (does * row["F_microbatch"]).max()
        embed = lambda: vary(self.embed(self.ends, self.part(number)), ("pipe",))  # noqa: E731
        return lax.cond(does.max() == 1, embed, self.stream)

    def _together(self, state: Any, own: Row, row: Row, y: jax.Array, use: Callable) -> Any:
        """`use` of (state, what the last chunk made in this tick, its microbatch, whether it was made here), on all stages."""
        does = row["F"] * row["F_last"]
        number, mine = (does * row["F_microbatch"]).max(), own["F"] * own["F_last"] == 1
        everywhere = lambda: sum_over(jnp.where(mine, y, 0), ("pipe",))  # noqa: E731
        do = lambda state: use(state, everywhere(), self.part(number), mine)  # noqa: E731
        return lax.cond(does.max() == 1, do, lambda state: state, state)

    # ---- B and W ----

    def _backward(self, state: Tree, own: Row, row: Row) -> tuple[Tree, jax.Array]:
        stash = functools.partial(get, slot=own["B_stash"])
        if self.engine.settle_gradients:
            # before the branch: in it, XLA:TPU copies the whole ring into the layout of its use (0.12.0);
            # a barrier for each array, because it gives all its results one type
            held = jax.tree.map(lax.optimization_barrier, stash(state["stash"]))
            stash = lambda ring: held  # noqa: E731

        def do(state: Tree) -> tuple[Tree, jax.Array]:
            part = self.part(own["B_microbatch"])
            tokens = tokens_of(self.engine, part, self.key)
            kept, chunk = stash(state["stash"]), own["B_chunk"]
            if self.engine.layout.config.stash == "stage":
                _, kept = self.layer.forward(chunk, kept["x"], tokens)
            dy = get(state["slope"], own["B_slope"])
            if "tape" in state:
                dx, layers, tape = self.layer.input_gradient(chunk, kept, dy, tokens, state["layers"])
                state = state | {"tape": put(state["tape"], own["B_tape"], tape)}
            else:
                dx, layers = self.layer.backward(chunk, kept, dy, tokens, state["layers"])
            state = state | {"layers": layers}
            if not self.split and "B_first" in own:
                first = lambda state: self._first(state, dx, part)  # noqa: E731
                state = lax.cond(own["B_first"] == 1, first, lambda state: state, state)
            return state, dx

        state, dx = self._when(own["B"] == 1, do, lambda state: (state, self.stream()), state)
        if self.split and "B_first" in row:
            does = row["B"] * row["B_first"]
            number = (does * row["B_microbatch"]).max()
            dx_all = lambda: sum_over(jnp.where(own["B"] * own["B_first"] == 1, dx, 0), ("pipe",))  # noqa: E731
            first = lambda state: self._first(state, dx_all(), self.part(number))  # noqa: E731
            state = lax.cond(does.max() == 1, first, lambda state: state, state)
        return state, dx

    def _first(self, state: Tree, dx: jax.Array, part: Tree) -> Tree:
        """The gradients of the parameters before the first layer."""
        x, back = jax.vjp(lambda ends: self.embed(ends, part), self.ends)
        (dends,) = back(vary(dx, tuple(varying(x))))
        return state | {"ends": added(state["ends"], dends)}

    def _weights(self, state: Tree, own: Row) -> Tree:
        def do(state: Tree) -> Tree:
            tape = get(state["tape"], own["W_tape"])
            return state | {"layers": self.layer.weight_gradients(own["W_chunk"], tape, state["layers"])}

        return self._when(own["W"] == 1, do, lambda state: state, state)

    # ---- forward alone ----

    def forward(self, total: Any, use: Callable[[Any, jax.Array, Tree], Any]) -> Any:
        """`use` (of the total so far, what the last chunk made, its microbatch) over all microbatches.

        The total of the stage that has the last chunk; on other stages it stays as it was.
        """
        count = next(iter(self.parts.values())).shape[0]
        table = timetable(forward_only(schedule_of(self.engine.layout.config), count))

        def tick(carry: tuple[Any, jax.Array], row: Row) -> tuple[Any, None]:
            (total, inputs), own = carry, self._own(row)
            embedded = self._embedded(row) if self.split and "F_first" in row else None

            def do(total: Any) -> tuple[Any, jax.Array]:
                part, x = self._input(own, inputs, embedded)
                y, _ = self.layer.forward(own["F_chunk"], x, tokens_of(self.engine, part, self.key))
                if not self.split and "F_last" in own:
                    total = lax.cond(own["F_last"] == 1, lambda t: use(t, y, part), lambda t: t, total)
                return total, y

            total, y = self._when(own["F"] == 1, do, lambda total: (total, self.stream()), total)
            if self.split and "F_last" in row:
                together = lambda t, y, part, mine: choose(mine, use(t, y, part), t)  # noqa: E731
                total = self._together(total, own, row, y, together)
            for c in table.channels:
                inputs = put(inputs, own[c.name], shift(y, "pipe", c.by) if c.by else y)
            return (total, inputs), None

        inputs = ring(jax.eval_shape(self.stream), table.depths["input"] + 1)
        for loop in table.loops:
            rows = {name: jnp.asarray(column) for name, column in loop.columns.items()}
            (total, inputs), _ = lax.scan(tick, (total, inputs), rows)
        return total

    def loss_sum(self) -> jax.Array:
        """The loss of all microbatches, summed over this device's targets, on the stage with the last chunk; else 0."""
        add = lambda total, y, part: total + self.objective.loss_after_layers(self.ends, y, part)  # noqa: E731
        return self.forward(self._no_loss(), add)

    def last_stream(self) -> jax.Array:
        """What the last chunk makes of one microbatch, on every stage."""
        x = self.forward(self.stream(), lambda _, y, part: y)
        return sum_over(x, ("pipe",))  # zero but on one stage


def running_schedule(objective: Objective) -> Schedule:
    """The schedule of a layout in the form in which the program runs it: the fastest for what the layers recompute."""
    layout = objective.engine.layout.config
    return _form(layout, (objective.remat != "none") + (layout.stash == "stage"))


@functools.lru_cache(maxsize=16)
def _form(layout: LayoutConfig, recomputed: int) -> Schedule:
    return executor_form(schedule_of(layout), Times(F=1, B=1 + recomputed, W=1))


# ---- rings of buffers ----------------------------------------------------------------------------------------


def ring(kinds: Tree, depth: int) -> Tree:
    """`depth` empty slots for trees of these kinds."""
    slots = lambda kind: vary(jnp.zeros((depth, *kind.shape), kind.dtype), tuple(kind.manual_axis_type.varying))  # noqa: E731
    return jax.tree.map(slots, kinds)


def choose(does: jax.Array, a: Tree, b: Tree) -> Tree:
    """`a` where `does`, else `b`; what is the same array in both is left alone."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(does, a, b), a, b)


def get(slots: Tree, slot: jax.Array) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, slot, keepdims=False), slots)


def put(slots: Tree, slot: jax.Array, values: Tree) -> Tree:
    return jax.tree.map(lambda a, x: lax.dynamic_update_index_in_dim(a, x.astype(a.dtype), slot, 0), slots, values)


def added(sums: Tree, gradients: Tree) -> Tree:
    return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, gradients)
