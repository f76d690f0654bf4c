"""From a batch to a loss: what comes before the layers, a layer, what comes after. One device's maths in letters."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from meshwright.config import TrainConfig
from meshwright.engine import Engine
from meshwright.model import gpt, llama, regression
from meshwright.model.layers import Block, Tokens, Tree, dropout, layer_norm, rms_norm, rope_tables, run_layers
from meshwright.model.loss import CrossEntropy, Head

BLOCKS: dict[str, Block] = {
    "gpt": gpt.block,
    "llama": llama.block,
    "ffn": regression.block,
    "residual": regression.block,
}

BATCH_LETTERS = {
    "tokens_BT": "BT",
    "targets_BT": "BT",
    "mask_BT": "BT",
    "segments_BT": "BT",
    "positions_BT": "BT",
    "sample_B": "B",
}
REGRESSION_LETTERS = {"x_BD": "BD", "y_BD": "BD"}


@dataclass(frozen=True)
class Objective:
    """What a model is trained on: the summed loss of a batch's shard, and how much one device's shard counts."""

    engine: Engine
    train: TrainConfig
    remat: str

    @property
    def batch_letters(self) -> dict[str, str]:
        """The arrays of a batch and their letters. B comes first in each."""
        return BATCH_LETTERS if self.engine.layout.model.is_language_model else REGRESSION_LETTERS

    @property
    def block(self) -> Block:
        return BLOCKS[self.engine.layout.model.family]

    def count(self, batch: Tree) -> jax.Array:
        """How many targets this device's shard has: unmasked tokens, or numbers to predict."""
        dtype = self.engine.logits_dtype
        if not self.engine.layout.model.is_language_model:
            return jnp.full((), batch["y_BD"].size, dtype)
        return batch["mask_BT"].sum(dtype=dtype)

    def loss_sum(self, params: Tree, batch: Tree, dropout_key: jax.Array | None) -> jax.Array:
        """The loss summed over this device's targets; equal on all tensor ranks."""
        tokens = tokens_of(self.engine, batch, dropout_key)
        x = before_layers(self.engine, params, batch, tokens)
        x = run_layers(self.engine, self.block, params["layers"], x, tokens, self.remat)
        return self.loss_after_layers(params, x, batch)

    def loss_after_layers(self, params: Tree, x: jax.Array, batch: Tree) -> jax.Array:
        """The summed loss of what the layers made: x_BTD, or x_BD of a regression."""
        engine, train = self.engine, self.train
        if not engine.layout.model.is_language_model:
            return regression.squared_error_sum(engine, x, batch["y_BD"].astype(engine.compute_dtype))
        loss = CrossEntropy(engine, train.loss_chunk_tokens, train.z_loss, train.label_smoothing)
        x_BTD = after_layers(engine, params, x)
        return loss(x_BTD, head(engine, params), batch["targets_BT"], batch["mask_BT"])


def tokens_of(engine: Engine, batch: Tree, dropout_key: jax.Array | None = None) -> Tokens | None:
    """What the layers know of a batch; None of a regression's."""
    model = engine.layout.model
    if not model.is_language_model:
        return None
    cosine, sine = None, None
    if model.family == "llama":
        cosine, sine = rope_tables(model, batch["positions_BT"], engine.wide_dtype)
    return Tokens(batch["segments_BT"], batch["sample_B"], cosine, sine, dropout_key)


def before_layers(engine: Engine, params: Tree, batch: Tree, tokens: Tokens | None) -> jax.Array:
    """The residual stream that the first layer is given."""
    model = engine.layout.model
    if tokens is None:
        return batch["x_BD"].astype(engine.compute_dtype)
    x_BTD = engine.lookup(params["embedding"]["tokens_VD"], batch["tokens_BT"])
    if model.family == "gpt":
        table_PD = params["embedding"]["positions_PD"].astype(engine.compute_dtype)
        x_BTD = x_BTD + table_PD[engine.residual_shard(batch["positions_BT"])]
    return engine.name(dropout(engine, x_BTD, model.dropout_embedding, tokens, "embedding"), "embedding", "BTD")


def after_layers(engine: Engine, params: Tree, x_BTD: jax.Array) -> jax.Array:
    """x_BTD after the last norm, with all tokens of the context shard."""
    model, norm = engine.layout.model, params["final_norm"]
    if model.family == "gpt":
        x_BTD = layer_norm(x_BTD, norm["scale_D"], norm["bias_D"], model.norm_eps)
    else:
        x_BTD = rms_norm(x_BTD, norm["scale_D"], model.norm_eps)
    return engine.whole_tokens(engine.name(x_BTD, "final_norm", "BTD"))


def hidden(engine: Engine, params: Tree, batch: Tree) -> jax.Array:
    """x_BTD after the last norm, without dropout."""
    tokens = tokens_of(engine, batch)
    x_BTD = before_layers(engine, params, batch, tokens)
    x_BTD = run_layers(engine, BLOCKS[engine.layout.model.family], params["layers"], x_BTD, tokens, "none")
    return after_layers(engine, params, x_BTD)


def logits(engine: Engine, params: Tree, batch: Tree) -> jax.Array:
    """logits_BTV with V split over tensor; padding has the lowest number there is."""
    return vocabulary_logits(engine, hidden(engine, params, batch), whole_head(engine, params))


def head(engine: Engine, params: Tree) -> Head:
    """The head's working parameter, its own or (tied) the embedding's, and what makes the whole head_DV of it."""
    if "head" in params:
        return params["head"]["tokens_DV"], functools.partial(_own_head, engine)
    return params["embedding"]["tokens_VD"], functools.partial(_tied_head, engine)


def _own_head(engine: Engine, tokens_DV: jax.Array) -> jax.Array:
    return engine.whole_weight(tokens_DV, "DV")


def _tied_head(engine: Engine, tokens_VD: jax.Array) -> jax.Array:
    return engine.whole_weight(tokens_VD, "VD").T


def whole_head(engine: Engine, params: Tree) -> jax.Array:
    """head_DV, whole in D and split in V."""
    leaf, whole = head(engine, params)
    return whole(leaf)


def vocabulary_logits(engine: Engine, x_BTD: jax.Array, head_DV: jax.Array) -> jax.Array:
    """This rank's part of the logits of hidden states."""
    z_BTV = jnp.einsum("BTD,DV->BTV", x_BTD, head_DV, preferred_element_type=engine.logits_dtype)
    v = head_DV.shape[1]
    real_V = jnp.arange(v, dtype=jnp.int32) + engine.offset("BTV", "V", v) < engine.layout.model.vocab_size
    return jnp.where(real_V, z_BTV, jnp.finfo(z_BTV.dtype).min)
