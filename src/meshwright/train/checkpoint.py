"""Checkpoints that know nothing of the layout: orbax files of whole arrays as the model has them: no padding of
the vocabulary, every layer in order.

Saved on any layout, they are read on any other, each device reading its own shards. Each has a list of its files with
their checksums, written before the directory gets its final name: what is named and agrees with its list is complete.
"""

import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.config import Refused
from meshwright.model import params as parameters
from meshwright.train.state import Run, moment_letters

Tree = Any

MANIFEST = "files.json"
UNFINISHED = ".orbax-checkpoint-tmp"
"""What orbax adds to the name of a directory that it has not finished."""

logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports its housekeeping at warning level


class Checkpoints:
    """The checkpoints of one run directory; an unfinished or damaged one is never taken for a checkpoint."""

    def __init__(self, directory: Path, run: Run, say: Callable[[str], None] = lambda text: None):
        self.run, self.directory, self._say = run, directory.absolute(), say
        self._opened: Any = None
        self._step = -1

    @property
    def _manager(self) -> Any:
        """orbax's manager, made when it is first needed."""
        if self._opened is None:
            import orbax.checkpoint as ocp

            several = (
                jax.process_count() > 1
            )  # they share the writing of what is replicated; one alone would only compile
            arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=several)
            handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.run.config.train.keep_checkpoints,
                create=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._list_files),
            )
            self._opened = ocp.CheckpointManager(
                self.directory,
                item_handlers=ocp.PyTreeCheckpointHandler(type_handler_registry=handlers),
                options=options,
            )
        return self._opened

    def save(self, state: Tree, step: int) -> None:
        """Write `state` in the background; training may go on at once. A step that is there already is left alone."""
        import orbax.checkpoint as ocp

        self.wait()
        if self._manager.latest_step() == step:
            return
        self._step = step
        with _written(step):
            self._manager.save(step, args=ocp.args.PyTreeSave(_of_model(self.run, state)))

    def wait(self) -> None:
        """Until everything is on disk; refuses where it could not be written."""
        if self._opened is not None:
            with _written(self._step):
                self._opened.wait_until_finished()

    def finish(self) -> None:
        """Wait until everything is on disk, and close."""
        self.wait()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _list_files(self) -> None:
        if jax.process_index() == 0:
            found = [*self.directory.glob(f"{self._step}{UNFINISHED}*"), self.directory / str(self._step)]
            write_manifest(found[0])

    def restore(self) -> Tree | None:
        """The newest complete state on this run's layout, None where there is no checkpoint yet.

        Damaged checkpoints are set aside and named; a leaf that is missing or has another shape is refused.
        """
        import orbax.checkpoint as ocp

        step = self._newest()
        if step is None:
            return None
        wanted = _model_kinds(self.run)
        try:
            found = self._manager.item_metadata(step)
            require_same_leaves(step, getattr(found, "tree", found), wanted)
            where = ocp.checkpoint_utils.construct_restore_args(wanted)
            state = self._manager.restore(step, args=ocp.args.PyTreeRestore(wanted, restore_args=where))
        except Refused:
            raise
        except Exception as error:  # whatever orbax and its storage raise for files that are not as they should be
            raise Refused(
                f"checkpoint {self.directory.name}/{step} cannot be read: {str(error).splitlines()[0][:300]};"
                " remove it to go on from the one before"
            ) from None
        return _on_devices(self.run, state)

    def _newest(self) -> int | None:
        """The newest complete step, by process 0's judgement."""
        step = -1
        if jax.process_index() == 0:
            step, damaged = newest_complete(self.directory)
            for number, fault in damaged.items():
                self._say(f"checkpoint {number} is damaged ({fault}); it is set aside as checkpoints/damaged-{number}")
                os.replace(self.directory / str(number), _unused(self.directory / f"damaged-{number}"))
            if damaged and step < 0:
                raise Refused(
                    f"all checkpoints of this run are damaged: {', '.join(map(str, sorted(damaged)))}; start a new run"
                )
            for leftover in self.directory.glob(f"*{UNFINISHED}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        if jax.process_count() > 1:
            step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        return None if step < 0 else step


class _written:
    """Turns what goes wrong while a checkpoint is written into one message."""

    def __init__(self, step: int):
        self.step = step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, Refused):
            text = (str(error).splitlines() or [kind.__name__])[0][:300]
            raise Refused(f"checkpoint {self.step} could not be written: {text}; earlier ones are untouched") from None


# ---- whole or damaged ------------------------------------------------------------------------------------


def write_manifest(directory: Path) -> None:
    """List the files of a checkpoint with their sizes in bytes and CRC-32."""
    files = sorted(path for path in directory.glob("*/**/*") if path.is_file())  # orbax still writes beside them
    with ThreadPoolExecutor() as threads:
        sums = list(threads.map(_size_and_checksum, files))
    table = {str(path.relative_to(directory)): one for path, one in zip(files, sums, strict=True)}
    unfinished = directory / f"{MANIFEST}.tmp"
    unfinished.write_text(json.dumps({"format": 1, "files": table}), encoding="utf-8")
    os.replace(unfinished, directory / MANIFEST)


def fault(directory: Path) -> str | None:
    """What is wrong with the files of a checkpoint, or None where all are as they were written."""
    try:
        table = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name, (size_bytes, _) in table.items():
        if not (directory / name).is_file():
            return f"{name} is missing"
        has_bytes = (directory / name).stat().st_size
        if has_bytes != size_bytes:
            return f"{name} has {has_bytes:,} of {size_bytes:,} bytes"
    with ThreadPoolExecutor() as threads:
        sums = threads.map(_size_and_checksum, [directory / name for name in table])
    for (name, wanted), got in zip(table.items(), sums, strict=True):
        if tuple(wanted) != got:
            return f"{name} has another checksum than when it was written"
    return None


def newest_complete(directory: Path) -> tuple[int, dict[int, str]]:
    """The newest step whose files are whole (-1: none), and what is wrong with each newer one."""
    steps = [int(path.name) for path in directory.glob("*") if path.is_dir() and path.name.isdecimal()]
    damaged = {}
    for step in sorted(steps, reverse=True):
        found = fault(directory / str(step))
        if found is None:
            return step, damaged
        damaged[step] = found
    return -1, damaged


def _size_and_checksum(path: Path) -> tuple[int, int]:
    checksum = size_bytes = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            checksum, size_bytes = zlib.crc32(chunk, checksum), size_bytes + len(chunk)
    return size_bytes, checksum


def _unused(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def require_same_leaves(step: int, found: Tree, wanted: Tree) -> None:
    """Refuse a checkpoint that lacks a leaf of the state, has one too many or one of another shape or dtype."""
    there, here = _leaves(found), _leaves(wanted)
    for name in sorted(here.keys() | there.keys()):
        have, want = there.get(name), here.get(name)
        if have != want:
            words = "has no" if have is None else "has, and this model has not," if want is None else "has"
            kinds = "" if have is None or want is None else f" as {_kind(have)}, and this model needs {_kind(want)}"
            raise Refused(f"checkpoint {step} {words} the array {name}{kinds}; it is not of this model and optimiser")


def _leaves(tree: Tree) -> dict[str, tuple[tuple[int, ...], str]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        "/".join(_word(key) for key in path): (tuple(leaf.shape), str(np.dtype(leaf.dtype)))
        for path, leaf in paths
        if hasattr(leaf, "shape")
    }


def _word(key: Any) -> str:
    """A step of a path, the same for a NamedTuple's field and for the dictionary that orbax makes of it."""
    return str(next(getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)))


def _kind(kind: tuple[tuple[int, ...], str]) -> str:
    return f"{kind[1]}[{','.join(map(str, kind[0]))}]"


# ---- arrays of the model and arrays on the devices ---------------------------------------------------------


def _letters(tree: Tree, run: Run) -> Tree:
    """For each leaf of a state as it is on the devices, its letters where any of its dims differs from the model's."""

    def leaf(path: tuple[Any, ...], x: Any) -> str:
        letters = moment_letters(path, x, run.layout)
        return letters if any(run.layout.places(letter) for letter in letters) else ""

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _kinds(run: Run) -> Tree:
    """The state's shapes, dtypes and shardings as they are on the devices."""
    return jax.eval_shape(run.initial_state)


def _model_kinds(run: Run) -> Tree:
    """The same as the model has them, and as a checkpoint holds them."""
    kinds, layout = _kinds(run), run.layout

    def leaf(kind: Any, sharding: NamedSharding, letters: str) -> jax.ShapeDtypeStruct:
        if letters:
            kind = jax.eval_shape(lambda x: parameters.of_model(layout, letters, x), kind)
            sharding = NamedSharding(run.mesh, PartitionSpec(*_fitting(run, sharding.spec, kind.shape)))
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)

    return jax.tree.map(leaf, kinds, run.shardings(), _letters(kinds, run))


def _fitting(run: Run, spec: Any, shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    """Axes for each dim as in `spec`; those that do not divide their dim go to another that they divide, or nowhere."""
    axes: list[tuple[str, ...]] = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
    axes += [()] * (len(shape) - len(axes))
    degree = run.layout.degree
    for dim, size in enumerate(shape):
        if size % degree(axes[dim]):
            homeless, axes[dim] = axes[dim], ()
            free = [d for d, n in enumerate(shape) if d != dim and n % (degree(axes[d]) * degree(homeless)) == 0]
            if free:
                axes[free[0]] += homeless
    return axes


def _of_model(run: Run, state: Tree) -> Tree:
    """The state as the model has it (and out of host memory, where it was offloaded)."""
    letters = _letters(state, run)
    if not any(jax.tree.leaves(letters)):
        return state
    shardings = jax.tree.map(lambda kind: kind.sharding, _model_kinds(run))
    leaf = lambda x, word: parameters.of_model(run.layout, word, x) if word else x  # noqa: E731
    return jax.jit(lambda state: jax.tree.map(leaf, state, letters), out_shardings=shardings)(state)


def _on_devices(run: Run, state: Tree) -> Tree:
    """A state of the model as this layout has it on its devices."""
    letters = _letters(_kinds(run), run)
    if not any(jax.tree.leaves(letters)) and not run.config.optim.offload:
        return state
    leaf = lambda x, word: parameters.on_devices(run.layout, word, x) if word else x  # noqa: E731
    return jax.jit(lambda state: jax.tree.map(leaf, state, letters), out_shardings=run.shardings(at_rest=True))(state)
