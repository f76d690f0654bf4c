"""The engine: carries a layout out inside one `jax.shard_map` over the whole mesh, all axes manual.

A model is one-device maths in letters that asks the engine for what may cross devices. Five words move data: gather,
scatter-sum, sum, shift, exchange. Each is differentiable, is checked by JAX's varying-axes types (``check_vma=True``)
and does nothing where its axes are empty, so that one device runs the bare maths.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.compat import vary, varying
from meshwright.config import ModelConfig, TrainConfig
from meshwright.layout import Axes, Layout, Moves, Spec, letters_of
from meshwright.linear import linear
from meshwright.rows import rows

# ---- the five words ----------------------------------------------------------------------------------


def gather(x: jax.Array, axes: Axes, dim: int, *, same: bool = False) -> jax.Array:
    """Every shard of `dim` along `axes`, in order. `same`: the result counts as equal on all of them."""
    return lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying" if same else "varying") if axes else x


def scatter_sum(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The sum over `axes`, of which each device keeps its shard of `dim`."""
    return lax.psum_scatter(vary(x, axes), axes, scatter_dimension=dim, tiled=True) if axes else x


def sum_over(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over `axes`, equal on all of them."""
    return lax.psum(vary(x, axes), axes) if axes else x


def shift(x: jax.Array, axis: str, by: int = 1) -> jax.Array:
    """What the device `by` places before this one along `axis` holds; the ends are joined."""
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + by) % n) for i in range(n)])


def exchange(x: jax.Array, axes: Axes, split: int, concat: int) -> jax.Array:
    """Split `dim` `split` over `axes` and put the received pieces together along `concat`."""
    return lax.all_to_all(x, axes, split, concat, tiled=True) if axes else x


def max_over(x: jax.Array, axes: Axes) -> jax.Array:
    """The largest over `axes`, equal on all of them; has no gradient."""
    return lax.pmax(vary(lax.stop_gradient(x), axes), axes) if axes else lax.stop_gradient(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def gather_weight(
    w: jax.Array, axes: Axes, dim: int, compute: jnp.dtype, reduce: jnp.dtype, ring: int = 0
) -> jax.Array:
    """A whole weight from its ZeRO shards, moved in `compute`; its gradient is summed in `reduce` back onto the shards.

    `ring`: in two stages, within each `ring` neighbours along the one axis and then across, where `mesh.rings` says so.
    """
    w = _narrowed(w, compute)
    if not ring:
        return gather(w, axes, dim)
    near, far = _stages(axes, ring)
    w = lax.all_gather(w, axes[0], axis=dim, tiled=True, axis_index_groups=near)
    return lax.all_gather(w, axes[0], axis=dim, tiled=True, axis_index_groups=far)


def _gather_weight_fwd(w, axes, dim, compute, reduce, ring):
    return gather_weight(w, axes, dim, compute, reduce, ring), jnp.zeros((0,), w.dtype)


def _gather_weight_bwd(axes, dim, compute, reduce, ring, empty, gradient):
    gradient = gradient.astype(reduce)
    if not ring:
        return (scatter_sum(gradient, axes, dim).astype(empty.dtype),)
    gradient = vary(gradient, axes)
    for groups in reversed(_stages(axes, ring)):
        gradient = lax.psum_scatter(gradient, axes[0], scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return (gradient.astype(empty.dtype),)


def _stages(axes: Axes, ring: int) -> tuple[list[list[int]], list[list[int]]]:
    """The groups of places along one axis: `ring` neighbours each, and those at the same place of every ring."""
    (axis,) = axes
    places = range(lax.axis_size(axis))
    near = [list(places[start : start + ring]) for start in places[::ring]]
    return near, [list(group) for group in zip(*near, strict=True)]


gather_weight.defvjp(_gather_weight_fwd, _gather_weight_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def gathered_weight(w: jax.Array, whole: jax.Array, axes: Axes, dim: int, reduce: jnp.dtype, ring: int) -> jax.Array:
    """`whole`, which `gather_weight` made of `w` before; its gradient goes to `w` in the same way."""
    return whole


gathered_weight.defvjp(
    lambda w, whole, axes, dim, reduce, ring: (whole, jnp.zeros((0,), w.dtype)),
    lambda axes, dim, reduce, *rest: (*_gather_weight_bwd(axes, dim, None, reduce, *rest), None),
)


def _narrowed(w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`w` in `dtype`, rounded where it is used.

    XLA:TPU moves a plain cast out of the loop over layers and then holds a copy of every layer's weights (JAX 0.12.0); a
    rounding before it stays where it is, and so does the cast.
    """
    info = jnp.finfo(dtype)
    return (lax.reduce_precision(w, info.nexp, info.nmant) if info.bits < jnp.finfo(w.dtype).bits else w).astype(dtype)


def settle(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, whose gradients the compiler finishes together before it goes on.

    For XLA:TPU: what follows is not fused into the matmul (its own estimate of one with the reductions of a norm's
    gradient behind it is 1.5 times that of the two apart: 13.8 and 9.1 million cycles for Llama-3.1-8B, v5p, libtpu
    0.0.52), and no weight's gradient is put off while the activations that it needs take memory.
    """
    axes = tuple(frozenset().union(*map(varying, arrays)))  # a barrier gives all its results one type
    return _settle(*(vary(x, axes) for x in arrays))


@jax.custom_vjp
def _settle(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


_settle.defvjp(lambda *arrays: (arrays, None), lambda _, gradients: tuple(lax.optimization_barrier(gradients)))


def place(axes: Axes) -> jax.Array | int:
    """This device's place along `axes` together, slowest first: the number of its shard."""
    return lax.axis_index(axes) if axes else 0


def take_shard(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This device's shard of `dim` of an array that every device along `axes` holds whole. Moves nothing."""
    if not axes:
        return x
    size = x.shape[dim] // math.prod(lax.axis_size(axis) for axis in axes)
    return lax.dynamic_slice_in_dim(vary(x, axes), place(axes) * size, size, dim)


# ---- the engine --------------------------------------------------------------------------------------


UNROLLED_LAYERS = {"cpu": 12, "gpu": 16}
"""Up to this many layers stand in the program one after another. A loop copies what each keeps for its backward pass
into arrays of all layers and out again, and its program is compiled sooner. On GPU by estimate: Llama-3.2-1B, H200,
65,536 tokens: 0.97 s a step and 105 GB, in a loop 1.05 s and 80 GB (what is saved chosen for each; JAX 0.12.0)."""


@dataclass(frozen=True)
class Engine:
    """One layout and one set of dtypes, as the model sees them."""

    layout: Layout
    compute_dtype: jnp.dtype
    reduce_dtype: jnp.dtype
    logits_dtype: jnp.dtype
    kernel: str = "blockwise"
    """The attention: `blockwise` (any platform), `splash` (TPU) or `cudnn` (GPU)."""
    packed: bool = True
    """Whether a row may hold several documents."""
    unroll_layers: bool = False
    """Whether the layers are a loop or stand one after another."""
    copy_transposed: bool = False
    """Whether weight gradients are matmuls of a transposed copy (`linear`)."""
    flat_matmuls: bool = True
    """Whether a contraction becomes a matmul of two matrices (fastest on CPU) or stays an einsum (no copies on TPU)."""
    settle_gradients: bool = False
    """Whether the gradients of a contraction are finished before the backward pass goes on (`settle`)."""
    sort_rows: bool = False
    """Whether the gradient of a look-up is added up by a sort (`rows`)."""
    rings: tuple[tuple[str, int], ...] = ()
    """Axes along which weights are gathered in two stages, and how many neighbours make the first (`mesh.rings`)."""
    observe: Callable[[str, str, jax.Array], jax.Array] | None = None
    """Called with the path, letters and value of every named array; its answer takes the array's place (for `verify`)."""
    defer: Callable[["Engine", str, jax.Array, tuple[jax.Array, ...]], Any] | None = None
    """Called in the place of `einsum` (for backward passes in two parts), with an engine that calls it no more."""
    path: str = ""
    """Where in the model the named arrays are: ``layers/3/``."""

    @classmethod
    def of(cls, layout: Layout, train: TrainConfig, platform: str, packed: bool = True) -> "Engine":
        """The engine for `platform`: `cpu`, `tpu` or `gpu`. `packed`: whether a row may hold several documents."""
        compute = jnp.dtype(compute_dtype_of(train, platform))
        wide = lambda name: jnp.dtype(name) if compute != jnp.float64 else compute  # noqa: E731
        return cls(
            layout,
            compute_dtype=compute,
            reduce_dtype=wide(train.reduce_dtype),
            logits_dtype=wide(train.logits_dtype),
            kernel=attention_kernel(layout.model, compute, platform),
            packed=packed,
            unroll_layers=layout.model.layers <= UNROLLED_LAYERS.get(platform, 0),
            copy_transposed=platform == "cpu",
            flat_matmuls=platform != "tpu",
            settle_gradients=platform == "tpu",
            sort_rows=platform == "gpu" or (platform == "tpu" and layout.config.microbatches > 1),
        )

    @property
    def wide_dtype(self) -> jnp.dtype:
        """The dtype of norms, softmax and sums: float32, or the compute dtype where that is wider."""
        return wider(self.compute_dtype, jnp.float32)

    def name(self, x: jax.Array, name: str, letters: str) -> jax.Array:
        """Name an array of a layer, for rematerialisation policies and for `verify`."""
        x = checkpoint_name(x, name)
        return x if self.observe is None else self.observe(f"{self.path}{name}", letters, x)

    # ---- matmuls ----

    def einsum(self, equation: str, x: jax.Array, *weights: jax.Array) -> Any:
        """``"BTD,DNH DKH->BTNH BTKH"``: contract `x` with one or several weights, moving what the layouts ask for.

        `x` is gathered once for all weights. One weight gives one array, several a tuple.
        """
        if self.defer is not None:
            return self.defer(replace(self, defer=None), equation, x, weights)
        operands, results = equation.split("->")
        x_letters, w_letters = operands.split(",")
        outs = results.split()
        plans = [self.layout.plan(x_letters, w, out) for w, out in zip(w_letters.split(), outs, strict=True)]
        assert len({plan.gather_x for plan in plans}) == 1, f"{equation}: the weights need x in different layouts"
        x, *used = settle(x, *weights) if self.settle_gradients else (x, *weights)
        for letter, axes in plans[0].gather_x:
            x = gather(x, axes, x_letters.index(letter))
        parts = zip(w_letters.split(), outs, used, plans, strict=True)
        if self.settle_gradients and len(outs) > 1 and outs[0] == "BTNH" and self.layout.live("tensor"):
            x, *moved = _alike(x, *(self._moved_weight(w, w_in, plan) for w_in, _, w, plan in parts))
            return project_heads(x, tuple(moved))
        arrays = [self._contract(x_letters, w_in, out, x, w, plan) for w_in, out, w, plan in parts]
        return tuple(arrays) if len(arrays) > 1 else arrays[0]

    def _contract(self, x_in: str, w_in: str, out: str, x: jax.Array, w: jax.Array, plan: Moves) -> jax.Array:
        w = self._moved_weight(w, w_in, plan)
        y = contract(x_in, w_in, out, x, w, flat=self.flat_matmuls, copy_transposed=self.copy_transposed)
        for letter, axes in plan.scatter_sum:
            y = scatter_sum(y, axes, out.index(letter))
        return sum_over(y, plan.sum_over)

    def _moved_weight(self, w: jax.Array, letters: str, plan: Moves) -> jax.Array:
        for letter, axes in plan.gather_w:
            w = self._gathered(w, axes, letters.index(letter))
        w = w.astype(self.compute_dtype)
        for letter, _ in plan.slice_w:
            w = self._own_heads(w, letters.index(letter))
        return w

    def _own_heads(self, w: jax.Array, dim: int) -> jax.Array:
        """The key/value head that this rank's query heads use, of heads that are fewer than the ranks."""
        axes = self.layout.live("tensor")
        ranks_per_head = self.layout.degree(axes) // self.layout.model.kv_heads
        return lax.dynamic_slice_in_dim(vary(w, axes), place(axes) // ranks_per_head, 1, dim)

    def bias(self, b: jax.Array, letters: str) -> jax.Array:
        """A bias as the activations it is added to have it."""
        b = b.astype(self.compute_dtype)
        return self._own_heads(b, letters.index("K")) if "K" in letters and self.layout.kv_replicated else b

    def _gathered(self, w: jax.Array, axes: Axes, dim: int) -> jax.Array:
        return gather_weight(w, axes, dim, self.compute_dtype, self.reduce_dtype, self._ring(axes))

    def _ring(self, axes: Axes) -> int:
        return dict(self.rings).get(axes[0], 0) if len(axes) == 1 else 0

    def fetched(self, w: jax.Array, letters: str, before: jax.Array | None = None) -> jax.Array:
        """A layer's leaf with its ZeRO shards gathered, in the compute dtype; one that ZeRO does not split, as it is.

        `letters`: of all layers' leaf. `before`: what an earlier call made of `w`; nothing is gathered again.
        """
        for dim, axes in enumerate(self.zero_axes(letters.removeprefix("L"))):
            if axes and before is None:
                return self._gathered(self._enter(w, letters), axes, dim)
            if axes:
                return gathered_weight(self._enter(w, letters), before, axes, dim, self.reduce_dtype, self._ring(axes))
        return w

    def gradient_dtype(self, w: jnp.dtype, letters: str) -> jnp.dtype:
        """The narrowest dtype that holds a layer's gradient exactly: that in which ZeRO summed it, or the weight's own.

        A loop over layers stacks them: in float32, one GiB more for 8 billion parameters on 16 devices.
        """
        dtype = self.reduce_dtype
        scattered = any(self.zero_axes(letters)) and jnp.finfo(self.compute_dtype).bits <= jnp.finfo(dtype).bits
        return dtype if scattered and jnp.finfo(dtype).bits < jnp.finfo(w).bits else w

    def whole_weight(self, w: jax.Array, letters: str) -> jax.Array:
        """A weight with its ZeRO shards gathered, in the compute dtype (for loss and look-up, which are no einsum)."""
        for dim, axes in enumerate(self.zero_axes(letters)):
            w = self._gathered(w, axes, dim) if axes else w
        return w.astype(self.compute_dtype)

    def zero_axes(self, letters: str) -> Spec:
        """The axes that ZeRO alone splits a working weight over."""
        whole = self.layout.weight(letters, zero=False)
        return tuple(
            tuple(axis for axis in axes if axis not in kept)
            for axes, kept in zip(self.layout.working(letters), whole, strict=True)
        )

    def enter_layer(self, weights: Any) -> Any:
        """A layer's weights, those that are reduced by layer now different on every device (`Layout.reduced_by_layer`)."""

        def leaf(path: tuple[Any, ...], w: jax.Array) -> jax.Array:
            return self._enter(w, letters_of(path[-1].key))

        return jax.tree_util.tree_map_with_path(leaf, weights)

    def _enter(self, w: jax.Array, letters: str) -> jax.Array:
        return vary(w, self.layout.gradient_axes(letters)) if self.layout.reduced_by_layer(letters) else w

    # ---- the residual stream ----

    def lookup(self, table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
        """Rows of the token embedding, as a residual stream x_BTD. Each rank looks up its part of the vocabulary."""
        axes = self.layout.vocabulary_axes
        table_VD = self.whole_weight(table_VD, "VD")
        row_BT = ids_BT - place(axes) * table_VD.shape[0]
        mine_BT = (row_BT >= 0) & (row_BT < table_VD.shape[0])
        rows_BTD: Any = rows(table_VD, jnp.where(mine_BT, row_BT, 0), self.sort_rows)
        x_BTD = jnp.where(mine_BT[..., None], rows_BTD, 0) if axes else rows_BTD
        scattered = self.layout.live("tensor") if self.layout.sequence_parallel else ()
        return sum_over(scatter_sum(x_BTD, scattered, 1), tuple(axis for axis in axes if axis not in scattered))

    def residual_shard(self, x_BT: jax.Array) -> jax.Array:
        """This device's tokens of the residual stream, of an array that has the tokens of its context shard."""
        return take_shard(x_BT, self.layout.live("tensor") if self.layout.sequence_parallel else (), 1)

    def whole_tokens(self, x_BTD: jax.Array) -> jax.Array:
        """The residual stream gathered over sequence parallelism: all tokens of this context shard."""
        return gather(x_BTD, self.layout.live("tensor") if self.layout.sequence_parallel else (), 1)

    def offset(self, letters: str, letter: str, local_size: int) -> jax.Array | int:
        """Where this device's shard of `letter` begins in an activation with `letters`."""
        return place(self.layout.activation(letters)[letters.index(letter)]) * local_size


@jax.custom_vjp
def project_heads(x_BTD: jax.Array, weights_DNH: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Queries, keys and values of one x; its gradient by one matmul with the weights side by side.

    Split over tensor ranks, key/value heads are few, and a gradient by x of their own is a matmul too narrow for a TPU's
    matrix unit, whose result is as large as all of x: 5.1 million cycles for the three, 3.7 for the one (Llama-3.1-8B,
    tensor=4, v5p).
    """
    return tuple(jnp.einsum("BTD,DNH->BTNH", x_BTD, w) for w in weights_DNH)


def _project_heads_bwd(saved, gradients_BTNH):
    x_BTD, weights_DNH = saved
    together_DNH = jnp.concatenate(weights_DNH, axis=1)
    dx_BTD = jnp.einsum("BTNH,DNH->BTD", jnp.concatenate(gradients_BTNH, axis=2), together_DNH)
    return dx_BTD, tuple(jnp.einsum("BTD,BTNH->DNH", x_BTD, dy) for dy in gradients_BTNH)


project_heads.defvjp(lambda x, weights: (project_heads(x, weights), (x, weights)), _project_heads_bwd)


def _alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, each different on every device along all the axes over which any of them differs."""
    axes = tuple(frozenset().union(*map(varying, arrays)))
    return tuple(vary(a, axes) for a in arrays)


def compute_dtype_of(train: TrainConfig, platform: str) -> str:
    if train.compute_dtype != "auto":
        return train.compute_dtype
    return "float32" if platform == "cpu" else "bfloat16"


def attention_kernel(model: ModelConfig, compute_dtype: jnp.dtype, platform: str) -> str:
    """The platform's own attention where it has one that serves. cuDNN's is 16-bit, for heads of 8, 16 ... 128."""
    if platform == "tpu":
        return "splash"
    served = compute_dtype.itemsize == 2 and model.head_size % 8 == 0 and model.head_size <= 128
    return "cudnn" if platform == "gpu" and served else "blockwise"


def contract(
    x_in: str, w_in: str, out: str, x: jax.Array, w: jax.Array, *, flat: bool, copy_transposed: bool
) -> jax.Array:
    """One device's ``x . w``, as a matmul of two matrices where the letters allow it: XLA:CPU is fastest on those."""
    shared = "".join(letter for letter in x_in if letter in w_in)
    lead, trail = x_in.removesuffix(shared), w_in.removeprefix(shared)
    if not flat or x_in != lead + shared or out != lead + trail or len(trail) + len(shared) != len(w_in):
        return jnp.einsum(f"{x_in},{w_in}->{out}", x, w)
    k = math.prod(x.shape[len(lead) :])
    y = linear(x.reshape(-1, k), w.reshape(k, -1), copy_transposed=copy_transposed)
    return y.reshape(*x.shape[: len(lead)], *w.shape[len(shared) :])


def wider(a: jnp.dtype, b: jnp.dtype) -> jnp.dtype:
    """The floating dtype of `a` and `b` that has more bits."""
    return jnp.dtype(a if jnp.finfo(a).bits >= jnp.finfo(b).bits else b)


def require_same(x: jax.Array, axes: Axes) -> jax.Array:
    """Assert (while tracing) that `x` is equal on all devices along `axes`."""
    assert not varying(x) & set(axes), f"varies over {varying(x) & set(axes)}"
    return x
