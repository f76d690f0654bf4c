"""Layout: letters to axes, and what must move for an einsum written in letters.

An array's layout follows from all its letters (design: one table for activations, one for weights). From the
layouts of the operands and of the result follows what has to move: the four sharded-matmul cases of
"How to Scale Your Model" (Austin et al. 2025, chapter "Sharded Matrices and How to Multiply Them").

Nothing here imports JAX: a layout is checked, drawn and priced without devices. `engine.py` carries it out.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.config import LayoutConfig, ModelConfig, Refused, RunConfig, require
from meshwright.dims import AXES, BATCH_AXES, TOKEN_AXES, ZERO_AXES
from meshwright.stages import Stages, stages_of

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
"""For each dimension of an array, the axes that split it, slowest first."""


@dataclass(frozen=True)
class Layout:
    """The degree of every axis and how they are used, for one model."""

    config: LayoutConfig
    model: ModelConfig

    # ---- degrees ----

    def live(self, *axes: str) -> Axes:
        """Those of `axes` whose degree is above 1, in mesh order: an axis of degree 1 splits and moves nothing."""
        return tuple(axis for axis in AXES if axis in axes and self.config.degrees[axis] > 1)

    def degree(self, axes: Axes) -> int:
        """The number of shards that `axes` make."""
        return math.prod(self.config.degrees[axis] for axis in axes)

    @property
    def sequence_parallel(self) -> bool:
        return self.config.sequence_parallel and bool(self.live("tensor"))

    @property
    def kv_replicated(self) -> bool:
        """Whether there are fewer key/value heads than tensor ranks, so that ranks share them."""
        return self.model.is_language_model and self.config.tensor > self.model.kv_heads

    @property
    def vocabulary_axes(self) -> Axes:
        """The axes that split the vocabulary."""
        return self.live("pipe", "tensor") if self.config.split_vocabulary else self.live("tensor")

    @property
    def stages(self) -> Stages:
        """The layers of each pipeline stage."""
        return stages_of(self.config, self.model)

    # ---- letters to axes ----

    def activation(self, letters: str) -> Spec:
        """The layout of an activation, an array with a batch: ``x_BTD`` -> B over data, fsdp, expert; T over ..."""
        residual = not set(letters) & set("FNKV")
        tokens = self.live("context", "tensor") if residual and self.sequence_parallel else self.live("context")
        axes = {
            "B": self.live(*BATCH_AXES),
            "T": tokens,
            "S": self.live("context"),
            "V": self.vocabulary_axes,
            **dict.fromkeys("FNK", self.live("tensor")),
        }
        return tuple(axes.get(letter, ()) for letter in letters)

    def weight(self, letters: str, *, zero: bool) -> Spec:
        """The layout of a weight; `zero` tells whether its model dimension is split by the ZeRO axes."""
        axes = {
            "L": self.live("pipe"),
            "D": self.live(*ZERO_AXES) if zero and set(letters) & set("FNKV") else (),
            "K": () if self.kv_replicated else self.live("tensor"),
            "V": self.vocabulary_axes,
            **dict.fromkeys("FN", self.live("tensor")),
        }
        return tuple(axes.get(letter, ()) for letter in letters)

    def stored(self, letters: str) -> Spec:
        """How a parameter is kept between steps."""
        return self.weight(letters, zero=self.config.zero == 3)

    def working(self, letters: str) -> Spec:
        """How a parameter enters the forward pass, and so how its gradient comes out of the backward pass."""
        return self.weight(letters, zero=self.config.zero == 3 and self.config.gather == "use")

    def updated(self, letters: str) -> Spec:
        """How the optimiser sees a parameter: its state, and the part of the update that a device computes."""
        return self.weight(letters, zero=self.config.zero >= 1)

    def gradient_axes(self, letters: str) -> Axes:
        """The axes over which a parameter's working copy is the same but its gradient is a partial sum.

        They are the axes over which the activations that meet it are split: all token axes; pipe for a leaf without L;
        tensor for a leaf of the residual stream under sequence parallelism, and for key/value heads that ranks share.
        """
        held = {axis for axes in self.working(letters) for axis in axes}
        residual = not set(letters) & set("FNKV")
        over_tensor = (residual and self.sequence_parallel and "D" in letters) or (
            "K" in letters and self.kv_replicated
        )
        over_pipe = "L" not in letters and not self.config.split_vocabulary
        axes = (*TOKEN_AXES, *(("tensor",) if over_tensor else ()), *(("pipe",) if over_pipe else ()))
        return tuple(axis for axis in self.live(*axes) if axis not in held)

    def reduced_by_layer(self, letters: str) -> bool:
        """Whether a layer's gradient is summed over `gradient_axes` in its own backward pass, beside the next layer's work.

        So it is for the matrices of the layers where a step has one microbatch. Otherwise, and where ZeRO-1 or 2 keep only
        a shard of the sum, gradients are reduced once, at the end.
        """
        matrix = "L" in letters and bool(set(letters) & set("FNK")) and "D" in letters
        at_once = self.config.microbatches == 1 and not self.live("pipe")
        return matrix and at_once and self.updated(letters) == self.working(letters)

    # ---- sizes ----

    def padded_vocab_size(self) -> int:
        """V as arrays on devices have it: rounded up to a multiple of its shards. Padding has no probability and no gradient."""
        degree = self.degree(self.vocabulary_axes)
        return -(-self.model.vocab_size // degree) * degree

    def shape(self, letters: str) -> tuple[int, ...]:
        """The global shape of a parameter as its array on the devices has it (V padded, L the stages' rows)."""
        sizes = self.model.sizes | {"V": self.padded_vocab_size(), "L": len(self.stages.layer_of_row)}
        return tuple(sizes[letter] for letter in letters)

    def places(self, letter: str) -> tuple[int, ...] | None:
        """Where each index of a dim of the model lies in the arrays on the devices; None where they are the same.

        Only V (padded) and L (`stages`) may differ.
        """
        if letter == "V" and self.padded_vocab_size() != self.model.vocab_size:
            return tuple(range(self.model.vocab_size))
        return self.stages.row_of_layer if letter == "L" and not self.stages.in_order else None

    def shard_shape(self, letters: str, spec: Spec) -> tuple[int, ...]:
        return tuple(size // self.degree(axes) for size, axes in zip(self.shape(letters), spec, strict=True))

    # ---- what moves ----

    def plan(self, x: str, w: str, out: str) -> "Moves":
        """What moves in ``x . w -> out``, the four sharded-matmul cases; the cases that no move can serve are refused."""
        return _plan(self, x, w, out)


@dataclass(frozen=True)
class Moves:
    """The moves of one contraction. Each is the dimension's letter and the axes; none is empty."""

    gather_x: tuple[tuple[str, Axes], ...] = ()
    gather_w: tuple[tuple[str, Axes], ...] = ()
    slice_w: tuple[tuple[str, Axes], ...] = ()
    sum_over: Axes = ()
    scatter_sum: tuple[tuple[str, Axes], ...] = ()


def _minus(a: Axes, b: Axes) -> Axes:
    return tuple(axis for axis in a if axis not in b)


@functools.cache
def _plan(layout: Layout, x: str, w: str, out: str) -> Moves:
    have_x = dict(zip(x, layout.activation(x), strict=True))
    have_w = dict(zip(w, layout.working(w), strict=True))
    want = dict(zip(out, layout.activation(out), strict=True))
    equation = f"{x},{w}->{out}"

    for axis in layout.live(*AXES):
        split = [letter for letter in out if axis in want[letter]]
        require(
            len(split) <= 1,
            f"{equation}: {' and '.join(split)} of the result are both split over {axis}, and one device cannot hold both;"
            " write the result with one of them, or gather one first",
        )

    contracted = [letter for letter in x if letter in w and letter not in out]
    partial = tuple(a for letter in contracted for a in have_x[letter] if a in have_w[letter])  # case 3
    gather_x, gather_w, slice_w, scatter = [], [], [], []
    for letter in x:  # case 2: x is split where the other operand or the result needs it whole
        other = have_w[letter] if letter in contracted else want[letter]
        gather_x.append((letter, _minus(have_x[letter], other)))
    for letter in w:  # case 2, for the weight: ZeRO's gather of D
        other = have_x[letter] if letter in contracted else want[letter]
        gather_w.append((letter, _minus(have_w[letter], other)))
        if letter not in contracted:
            slice_w.append((letter, _minus(want[letter], have_w[letter])))
    for letter in out:
        if letter in have_x:
            lacks = _minus(want[letter], have_x[letter])
            require(
                set(lacks) <= set(partial),
                f"{equation}: {letter} of the result is split over {' '.join(lacks)}, which splits neither operand;"
                " nothing sums over it, so nothing can be scattered",
            )
            scatter.append((letter, lacks))
    scattered = {axis for _, axes in scatter for axis in axes}
    keep = lambda moves: tuple((letter, axes) for letter, axes in moves if axes)  # noqa: E731
    return Moves(
        gather_x=keep(gather_x),
        gather_w=keep(gather_w),
        slice_w=keep(slice_w),
        sum_over=tuple(axis for axis in partial if axis not in scattered),
        scatter_sum=keep(scatter),
    )


def letters_of(name: str) -> str:
    """The letters of a parameter from its name: ``q_bias_LNH`` -> ``LNH``."""
    return name.rsplit("_", 1)[1]


def show(dtype: str, letters: str, spec: Spec) -> str:
    """An array's type as JAX prints it: ``f32[B@data,T,F@tensor]``."""
    dims = [f"{letter}@{'.'.join(axes)}" if axes else letter for letter, axes in zip(letters, spec, strict=True)]
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int32": "i32"}
    return f"{short.get(dtype, dtype)}[{','.join(dims)}]"


# ---- checks ------------------------------------------------------------------------------------------


def check(config: RunConfig, device_count: int | None = None) -> Layout:
    """Check the layout against the model, the batch and (where given) the devices; return it, or refuse by name."""
    layout = Layout(config.layout, config.model)
    _check_devices(layout, device_count)
    _check_model(layout)
    _check_batch(layout, config)
    stages_of(config.layout, config.model)  # last, for a schedule of many microbatches takes its time
    return layout


def _allowed(values: list[int]) -> str:
    return "allowed here: " + ", ".join(map(str, values))


def _check_devices(layout: Layout, device_count: int | None) -> None:
    needed = layout.config.device_count
    if device_count is not None and needed != device_count:
        degrees = [f"{axis}={degree}" for axis, degree in layout.config.degrees.items() if degree > 1]
        product = f"{' x '.join(degrees)} = {needed} devices" if degrees else "1 device"
        fits = ", ".join(f"'{text}'" for text in _suggest(layout, device_count)) or "none with data, fsdp and tensor"
        raise Refused(
            f"layout '{layout.config}' needs {product}, but there are {device_count}; layouts that fit: {fits}"
        )


def _suggest(layout: Layout, device_count: int) -> Iterator[str]:
    """A few layouts of the same model for exactly `device_count` devices; the same with more data parallelism comes first."""
    shown = 0
    if device_count % layout.config.device_count == 0 and layout.live(*AXES):
        shown += 1
        more = layout.config.data * (device_count // layout.config.device_count)
        yield str(replace(layout.config, data=more))
    for tensor in (1, 2, 4, 8):
        if device_count % tensor or shown == 4:
            continue
        config = replace(layout.config, pipe=1, data=1, expert=1, context=1, tensor=tensor, fsdp=device_count // tensor)
        try:
            _check_model(Layout(config, layout.model))
        except Refused:
            continue
        shown += 1
        yield " ".join(f"{axis}={degree}" for axis, degree in config.degrees.items() if degree > 1) or "data=1"


def _check_model(layout: Layout) -> None:
    model, tensor = layout.model, layout.config.tensor
    candidates = range(1, max(8, tensor) + 1)
    if model.is_language_model:
        n, k = model.heads, model.kv_heads
        require(
            n % tensor == 0,
            f"layout.tensor={tensor} must divide the {n} query heads (model.heads, N); "
            + _allowed([t for t in candidates if n % t == 0]),
        )
        fits = [t for t in candidates if n % t == 0 and (k % t == 0 or t % k == 0)]
        require(
            k % tensor == 0 or tensor % k == 0,
            f"layout.tensor={tensor} must divide the {k} key/value heads (model.kv_heads, K) or be a multiple of them; "
            + _allowed(fits),
        )
    f = model.d_ff
    require(
        f % tensor == 0,
        f"layout.tensor={tensor} must divide the feed-forward size {f} (model.d_ff, F); "
        + _allowed([t for t in candidates if f % t == 0]),
    )
    require(
        model.is_language_model or not layout.config.split_vocabulary,
        f"layout.split_vocabulary needs a vocabulary, and the family {model.family!r} has none; leave it out",
    )
    axes = layout.live(*ZERO_AXES)
    degree = layout.degree(axes)
    require(
        layout.config.zero == 0 or model.d_model % degree == 0,
        f"layout.{' x '.join(axes)}={degree} must divide the model size {model.d_model} (model.d_model, D), whose shards"
        f" it holds; {_allowed([d for d in range(1, max(8, degree) + 1) if model.d_model % d == 0])}, or layout.zero=0",
    )


def _check_batch(layout: Layout, config: RunConfig) -> None:
    batch, length, parts = config.train.sequences, config.train.sequence_length, config.layout.microbatches
    axes = layout.live(*BATCH_AXES)
    degree = layout.degree(axes)
    whole = degree * parts
    split = " x ".join(f"{axis}={config.layout.degrees[axis]}" for axis in axes) or "one device"
    require(
        batch % whole == 0,
        f"the global batch of {batch} sequences (train.batch_sequences, B) must be a multiple of {split}"
        f" x microbatches={parts} = {whole}; the batch never changes by itself: set train.batch_sequences="
        f"{-(-batch // whole) * whole}, or a layout whose batch axes and microbatches divide {batch}",
    )
    if config.model.is_language_model:
        axes = layout.activation("BTD")[1]
        degree = layout.degree(axes)
        require(
            length % degree == 0,
            f"train.sequence_length={length} (T) must be a multiple of {' x '.join(axes)}={degree}, which splits the"
            f" residual stream's tokens; set it to {-(-length // degree) * degree}, or layout.sequence_parallel=false",
        )
