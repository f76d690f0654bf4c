"""Faults of which part of the data, the positions, the vocabulary and the random numbers a device has."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.compat import vary, varying
from meshwright.engine import Engine, place
from meshwright.model import forward, gpt, llama
from meshwright.model import params as parameters
from meshwright.model.loss import CrossEntropy
from meshwright.train import step
from meshwright.verify.faults.fault import Fault

Tree = Any


def _same_initial_shards(right: Any) -> Any:
    return lambda local_size, axes, dim, rank: right(local_size, (), dim, rank)


def _same_dropout_on_every_shard(right: Any) -> Any:
    def offset(self: Engine, letters: str, letter: str, local_size: int) -> Any:
        return 0 if letter == "T" else right(self, letters, letter, local_size)

    return offset


def _padding_has_probability(right: Any) -> Any:
    def chunk(self: CrossEntropy, *args: Any) -> Any:
        own = self.engine.layout
        padded = replace(own, model=replace(own.model, vocab_size=own.padded_vocab_size()))
        return right(replace(self, engine=replace(self.engine, layout=padded)), *args)

    return chunk


def _embedding_off_by_one(right: Any) -> Any:
    def lookup(self: Engine, table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
        axes = self.layout.live("tensor")
        return right(self, table_VD, ids_BT + jnp.asarray(place(axes) > 0).astype(ids_BT.dtype))

    return lookup


def _first_positions(right: Any) -> Any:
    def residual_shard(self: Engine, x_BT: jax.Array) -> jax.Array:
        own = right(self, x_BT)
        return vary(x_BT[:, : own.shape[1]], tuple(varying(own)))

    return residual_shard


def _local_positions(right: Any) -> Any:
    def rope_tables(model: Any, positions_BT: jax.Array, dtype: Any) -> Any:
        n = lax.axis_size("tensor")
        return right(model, positions_BT % (positions_BT.shape[1] // n), dtype)

    return rope_tables


def _across_documents(right: Any) -> Any:
    def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BT: jax.Array, **options: Any):
        split = "tensor" in varying(q_BTNH)
        return right(q_BTNH, k_BSKH, v_BSKH, jnp.zeros_like(segments_BT) if split else segments_BT, **options)

    return attend


def _same_data_everywhere(right: Any) -> Any:
    def put_batch(run: Any, batch: Tree, letters: Any) -> Tree:
        n = run.layout.degree(run.layout.activation("B")[0])
        first = {name: np.concatenate([array[: len(array) // n]] * n) for name, array in batch.items()}
        return right(run, first, letters)

    return put_batch


FAULTS = (
    Fault(
        "initial-shards-equal",
        "every shard draws the same random numbers for its initial weights",
        "fsdp=2",
        ((parameters, "_global_index", _same_initial_shards),),
        "initial",
    ),
    Fault(
        "dropout-shards-equal",
        "under sequence parallelism every rank draws the mask of the first one",
        "tensor=2",
        ((Engine, "offset", _same_dropout_on_every_shard),),
        "dropout",
        settings=("model.dropout_residual=0.3",),
    ),
    Fault(
        "padding-has-probability",
        "the padding of the vocabulary takes part in the softmax",
        "tensor=2",
        ((CrossEntropy, "chunk", _padding_has_probability),),
        "loss",
        settings=("model.vocab_size=101",),
    ),
    Fault(
        "embedding-off-by-one",
        "a rank's part of the vocabulary begins one row too early",
        "tensor=2",
        ((Engine, "lookup", _embedding_off_by_one),),
        "forward",
        "embedding",
    ),
    Fault(
        "positions-of-the-first-shard",
        "under sequence parallelism every rank takes the positions of the first one",
        "tensor=2",
        ((Engine, "residual_shard", _first_positions),),
        "forward",
        "embedding",
        families=("gpt",),
    ),
    Fault(
        "rope-by-local-position",
        "rotary angles are those of the position within a rank's part of the sequence",
        "tensor=2",
        ((forward, "rope_tables", _local_positions),),
        "forward",
        "layers/0/q",
        families=("llama",),
    ),
    Fault(
        "attention-across-documents",
        "the mask that keeps documents apart is dropped where heads are split",
        "tensor=2",
        ((gpt, "attend", _across_documents), (llama, "attend", _across_documents)),
        "forward",
        "layers/0/attention",
    ),
    Fault(
        "same-data-on-every-device",
        "all data-parallel ranks train on the first one's sequences",
        "data=2",
        ((step, "put_batch", _same_data_everywhere),),
        "forward",
        "embedding",
    ),
)
