"""What is right: the oracle's loss and gradients, and optax on whole arrays, for the case that `verify` runs.

One device, float64, no engine and no layout; clipping and AdamW are optax's own, on the whole tree.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from meshwright.config import LayoutConfig, ModelConfig, RunConfig, TrainConfig
from meshwright.model import params as parameters
from meshwright.verify import cases, oracle

Tree = Any

ADAM_STEPS = 5
ADAM_RATE = 2.0**-7
"""A power of two: the step holds its rate in float32, so that this one is exact in every dtype."""


@dataclass(frozen=True)
class Case:
    """What runs on every layout: the configuration in one dtype, and weights f[...] without padding."""

    config: RunConfig
    params: Tree
    form: str
    """The platform whose form of the program runs (`cpu`, `tpu`, `gpu`), whatever the devices are; empty: their own."""
    sgd_scale: float
    """SGD's rate as a multiple of AdamW's, so that its step changes the weights by about a tenth of their size."""


@dataclass(frozen=True)
class Expected:
    """What one device computes, in float64."""

    loss: float
    norm: float
    gradient: Tree
    after_sgd: Tree
    after_adam: Tree
    evaluation: float


def case_of(config: RunConfig, dtype: str, form: str = "") -> Case:
    """The case that verifies `config` in `dtype`: its model and settings, hard weights, clipping that acts.

    Dropout is turned off: the oracle has none (`parity` holds dropout against one device of the engine itself).
    """
    wide = {"param_dtype": dtype, "compute_dtype": dtype, "reduce_dtype": dtype, "logits_dtype": dtype}
    precision = {
        "float64": wide,
        "float32": wide,
        "bfloat16": {"param_dtype": "float32", "compute_dtype": "bfloat16"},
    }[dtype]
    moments = "float64" if dtype == "float64" else "float32"
    chunk = min(config.train.loss_chunk_tokens, max(1, 5 * config.train.sequence_length // 3))
    model = replace(config.model, dropout_embedding=0.0, dropout_attention=0.0, dropout_residual=0.0)
    remat = "full" if config.train.remat == "auto" and form in ("tpu", "gpu") else config.train.remat
    train = replace(config.train, loss_chunk_tokens=chunk, remat=remat, **precision)
    params = cases.hard_params(model, parameters.names(model))
    params = jax.tree.map(lambda a: a.astype(np.dtype(train.param_dtype)).astype(np.float64), params)
    batch = cases.hard_batch(config)
    _, gradient = _loss_and_gradient(model, train)(params, batch)
    norm = _root_of_squares(gradient)
    size = sum(g.size for g in jax.tree.leaves(gradient))
    deviation = 0.5 * norm / size**0.5  # of the clipped gradient's elements
    optim = replace(
        config.optim,
        name="adamw",
        lr=ADAM_RATE,
        schedule="constant",
        warmup_steps=0,
        weight_decay=config.optim.weight_decay or 0.1,
        clip_norm=0.5 * norm,
        # Adam's update is a sign where a gradient is rounding noise; in low precision eps makes it proportional instead
        eps=1e-8 if dtype == "float64" else deviation,
        moment_dtype=moments,
        offload=False,
    )
    step_size = 0.1 * _root_of_squares(params) / size**0.5
    scale = step_size / deviation / ADAM_RATE
    return Case(replace(config, model=model, train=train, optim=optim, layout=LayoutConfig()), params, form, scale)


class Reference:
    """One device's results for one configuration and dtype, computed once for each batch that layouts ask for."""

    def __init__(self, config: RunConfig, dtype: str, form: str = ""):
        self.case = case_of(config, dtype, form)
        self.config = config
        self._by_batch: dict[bytes, Expected] = {}

    def batch(self, layout: LayoutConfig) -> Tree:
        """The batch of `layout` (its silent rows differ with the layout; see `cases.hard_batch`)."""
        return cases.hard_batch(self.config, layout)

    def expected(self, batch: Tree) -> Expected:
        key = batch["mask_BT"].tobytes() if "mask_BT" in batch else b""
        if key not in self._by_batch:
            self._by_batch[key] = expected(self.case, batch)
        return self._by_batch[key]


def expected(case: Case, batch: Tree) -> Expected:
    """The oracle's loss, gradient and norm, and the weights after one SGD step and after `ADAM_STEPS` AdamW steps."""
    optim = case.config.optim
    loss_and_gradient = _loss_and_gradient(case.config.model, case.config.train)
    loss, gradient = loss_and_gradient(case.params, batch)
    decay = optax.add_decayed_weights(optim.weight_decay, functools.partial(_decayed, optim.decay_exempt))
    clip = optax.clip_by_global_norm(optim.clip_norm)
    sgd = optax.chain(clip, decay, optax.sgd(optim.lr * case.sgd_scale))
    adam = optax.chain(clip, optax.scale_by_adam(optim.b1, optim.b2, optim.eps), decay, optax.sgd(optim.lr))
    after_adam, state = case.params, adam.init(case.params)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        for _ in range(ADAM_STEPS):
            _, g = loss_and_gradient(after_adam, batch)
            updates, state = adam.update(g, state, after_adam)
            after_adam = optax.apply_updates(after_adam, updates)
        updates, _ = sgd.update(gradient, sgd.init(case.params), case.params)
        after_sgd = optax.apply_updates(case.params, updates)
    host = functools.partial(jax.tree.map, np.asarray)
    return Expected(
        loss=float(loss),
        norm=_root_of_squares(gradient),
        gradient=host(gradient),
        after_sgd=host(after_sgd),
        after_adam=host(after_adam),
        evaluation=float(loss),
    )


def loss_and_gradient(case: Case, batch: Tree) -> tuple[float, Tree]:
    """The oracle's loss and gradient of a batch."""
    loss, gradient = _loss_and_gradient(case.config.model, case.config.train)(case.params, batch)
    return float(loss), jax.tree.map(np.asarray, gradient)


def _loss_and_gradient(model: ModelConfig, train: TrainConfig) -> Any:
    return _compiled_oracle(model, TrainConfig(z_loss=train.z_loss, label_smoothing=train.label_smoothing))


@functools.cache
def _compiled_oracle(model: ModelConfig, train: TrainConfig) -> Any:
    loss = lambda params, batch: oracle.loss(model, train, params, batch)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss), compiler_options=compiler_options(jax.default_backend()))


@functools.cache
def compiler_options(platform: str) -> dict[str, Any]:
    """XLA:CPU's code generator at level 0 and without its fusion emitters (2.0 s -> 0.7 s for a step of three layers)."""
    if platform != "cpu":
        return {}
    level, emitters = {"xla_backend_optimization_level": 0}, {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=emitters).lower().compile()
    except jax.errors.JaxRuntimeError:  # JAX 0.12 has no such option any more
        return level
    return level | emitters


def _decayed(exempt: tuple[str, ...], params: Tree) -> Tree:
    words = lambda path: jax.tree_util.keystr(path)  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, _: not any(word in words(path) for word in exempt), params)


def _root_of_squares(tree: Tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree))))
