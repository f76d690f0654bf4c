"""Optimisers from optax, on shards: element by element where they are, on whole matrices where they must be.

AdamW (Loshchilov and Hutter 2019), Lion (Chen et al. 2023) and SGD act on each number alone, so a shard is enough.
Adafactor (Shazeer and Stern 2018) and Muon (Jordan 2024) look at whole matrices: each device gathers the leaf, computes
the same update and keeps its shard.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshwright.config import OptimConfig
from meshwright.engine import gather, take_shard
from meshwright.layout import Layout, Spec, letters_of
from meshwright.model import params as parameters

Tree = Any


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
    """The rate at each step (0-based): warm-up from 0, then the schedule, down to `final_lr_share` at the last step."""
    warmup, final = min(config.warmup_steps, steps - 1), config.lr * config.final_lr_share
    rest = max(steps - warmup - 1, 1)
    fall = max(round(rest * config.decay_share), 1)
    after = {
        "constant": lambda: optax.constant_schedule(config.lr),
        "cosine": lambda: optax.cosine_decay_schedule(config.lr, rest, config.final_lr_share),
        "linear": lambda: optax.linear_schedule(config.lr, final, rest),
        "wsd": lambda: optax.join_schedules(
            [optax.constant_schedule(config.lr), optax.linear_schedule(config.lr, final, fall)], [rest - fall]
        ),
    }[config.schedule]()
    if not warmup:
        return after
    # step i of the warm-up has rate (i + 1) / warmup, so that the first step is not wasted on a rate of 0
    warm = optax.linear_schedule(config.lr / warmup, config.lr, max(warmup - 1, 1))
    return optax.join_schedules([warm, after], [warmup])


def transformation(config: OptimConfig, layout: Layout) -> optax.GradientTransformation:
    """Gradients in `layout.updated` -> updates, to be multiplied by minus the learning rate."""
    decay = optax.add_decayed_weights(config.weight_decay, functools.partial(is_decayed, config))
    parts = [_direction(config, layout), decay] if config.weight_decay else [_direction(config, layout)]
    return optax.chain(*parts)


def is_decayed(config: OptimConfig, params: Tree) -> Tree:
    """True for each parameter that weight decay acts on: its path contains none of `decay_exempt`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(word in path_of(path) for word in config.decay_exempt), params
    )


def path_of(path: tuple[Any, ...]) -> str:
    return "/".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def _direction(config: OptimConfig, layout: Layout) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.moment_dtype)
    if config.name == "adamw":
        return adam
    if config.name == "lion":
        return optax.scale_by_lion(config.b1, config.b2, mu_dtype=config.moment_dtype)
    if config.name == "sgd":
        return optax.trace(config.momentum) if config.momentum else optax.identity()
    if config.name == "adafactor":
        parts = optax.chain(
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
        )
        return on_whole_leaves(parts, layout)
    muon = optax.chain(optax.trace(config.momentum or 0.95, nesterov=True), on_whole_leaves(_orthogonalised(), layout))
    return optax.partition({"muon": muon, "adam": adam}, _muon_or_adam)


def _muon_or_adam(params: Tree) -> Tree:
    """Muon for the matrices of the layers, Adam for everything else (embedding, head, norms, biases)."""
    is_matrix = lambda path: path.startswith("layers/") and len(letters_of(path)) > 2 and "bias" not in path  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if is_matrix(path_of(path)) else "adam", params)


def _orthogonalised() -> optax.GradientTransformation:
    """Each matrix of a stack, [L, D, rest] or [L, rest, D], made orthogonal, times sqrt(max(1, rows / columns))."""

    def leaf(path: tuple[Any, ...], g: jax.Array) -> jax.Array:
        letters = letters_of(path_of(path))
        rows = g.shape[1] if letters[1] == "D" else math.prod(g.shape[1:-1])
        matrices = g.reshape(g.shape[0], rows, -1)
        scale = max(1.0, rows / matrices.shape[2]) ** 0.5
        return (jax.vmap(newton_schulz)(matrices) * scale).reshape(g.shape)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(leaf, updates))


def newton_schulz(matrix: jax.Array, steps: int = 5, eps: float = 1e-8) -> jax.Array:
    """The quintic iteration of Muon (Jordan 2024), in the matrix's own dtype: X <- aX + (bA + cAA)X with A = XX'."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (jnp.linalg.norm(x) + eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


def on_whole_leaves(inner: optax.GradientTransformation, layout: Layout) -> optax.GradientTransformation:
    """`inner` on whole leaves: gathered from their shards, without padding, equal on every device; each keeps its shard."""

    def whole(tree: Tree) -> Tree:
        gathered = _each_split(layout, tree, lambda x, axes, dim: gather(x, axes, dim, same=True))
        return _each_leaf(gathered, functools.partial(parameters.of_model, layout))

    def shards(tree: Tree) -> Tree:
        return _each_split(layout, _each_leaf(tree, functools.partial(parameters.on_devices, layout)), take_shard)

    def init(params: Tree) -> Tree:
        return inner.init(whole(params))

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        updates, state = inner.update(whole(updates), state, whole(params))
        return shards(updates), state

    return optax.GradientTransformation(init, update)


def _each_split(layout: Layout, tree: Tree, move: Callable[[jax.Array, tuple[str, ...], int], jax.Array]) -> Tree:
    def leaf(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        spec: Spec = layout.updated(letters_of(path_of(path)))
        for dim, axes in enumerate(spec):
            x = move(x, axes, dim) if axes else x
        return x

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _each_leaf(tree: Tree, change: Callable[[str, jax.Array], jax.Array]) -> Tree:
    """`change` (of letters and array) on each leaf: a whole leaf is as the model has it."""
    return jax.tree_util.tree_map_with_path(lambda path, x: change(letters_of(path_of(path)), x), tree)
