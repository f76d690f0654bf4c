"""Checkpoints that know nothing of the layout: orbax files of whole arrays, without vocabulary padding.

Saved on any layout, they are read on any other, each device reading its own shards.
"""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.config import Refused
from meshwright.train.state import Run, moment_letters

Tree = Any

logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports its housekeeping at warning level


class Checkpoints:
    """The checkpoints of one run directory, newest last; an unfinished one is never taken for a checkpoint."""

    def __init__(self, directory: Path, run: Run):
        self.run = run
        self.directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=run.config.train.keep_checkpoints, create=True)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, state: Tree, step: int) -> None:
        """Write `state` in the background; training may go on at once."""
        if self._manager.latest_step() != step:
            self._manager.save(step, args=ocp.args.StandardSave(_trimmed(self.run, state)))

    def finish(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def restore(self, step: int | None = None) -> Tree:
        """The state of `step` (or the newest) on this run's layout; a missing or misshapen leaf is refused."""
        step = self._manager.latest_step() if step is None else step
        if step is None:
            raise Refused(
                f"there is no finished checkpoint in {self.directory.name}/ of this run; start it without --resume"
            )
        wanted = _trimmed_kinds(self.run)
        try:
            state = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except (ValueError, KeyError, FileNotFoundError, OSError) as error:
            raise Refused(
                f"checkpoint {step} does not hold this model's state: {str(error).splitlines()[0][:300]}"
            ) from None
        return _padded(self.run, state)


def _vocabulary_dims(tree: Tree, run: Run) -> Tree:
    """For each leaf of a state, the dim that is the padded vocabulary, or -1."""
    find = lambda path, x: moment_letters(path, x, run.layout).find("V")  # noqa: E731
    return jax.tree_util.tree_map_with_path(find, tree)


def _kinds(run: Run) -> Tree:
    """The state's shapes, dtypes and shardings as they are on the devices."""
    return jax.eval_shape(run.initial_state)


def _is_padded(run: Run) -> bool:
    return run.layout.model.is_language_model and run.layout.padded_vocab_size() != run.layout.model.vocab_size


def _trimmed_kinds(run: Run) -> Tree:
    vocabulary, kinds = run.layout.model.vocab_size, _kinds(run)

    def leaf(kind: Any, sharding: NamedSharding, dim: int) -> jax.ShapeDtypeStruct:
        shape, axes = list(kind.shape), list(sharding.spec) + [None] * (len(kind.shape) - len(sharding.spec))
        if dim >= 0 and _is_padded(run):
            shape[dim], axes[dim] = vocabulary, None
        return jax.ShapeDtypeStruct(tuple(shape), kind.dtype, sharding=NamedSharding(run.mesh, PartitionSpec(*axes)))

    return jax.tree.map(leaf, kinds, run.shardings(), _vocabulary_dims(kinds, run))


def _trimmed(run: Run, state: Tree) -> Tree:
    """The state without vocabulary padding (and out of host memory, where it was offloaded)."""
    if not _is_padded(run):
        return state
    dims, vocabulary = _vocabulary_dims(state, run), run.layout.model.vocab_size
    shardings = jax.tree.map(lambda kind: kind.sharding, _trimmed_kinds(run))
    trim = lambda x, dim: jax.lax.slice_in_dim(x, 0, vocabulary, axis=dim) if dim >= 0 else x  # noqa: E731
    return jax.jit(lambda state: jax.tree.map(trim, state, dims), out_shardings=shardings)(state)


def _padded(run: Run, state: Tree) -> Tree:
    """A trimmed state as this layout has it on its devices."""
    missing = run.layout.padded_vocab_size() - run.layout.model.vocab_size if _is_padded(run) else 0
    dims = _vocabulary_dims(_kinds(run), run)

    def pad(x: jax.Array, dim: int) -> jax.Array:
        if dim < 0 or not missing:
            return x
        return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])

    return jax.jit(
        lambda state: jax.tree.map(pad, state, dims), out_shardings=run.shardings(at_rest=True), donate_argnums=0
    )(state)
