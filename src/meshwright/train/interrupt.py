"""Ctrl-C and SIGTERM while steps run: stop between two steps, with a checkpoint, and say so."""

import signal
import sys
import threading
from typing import Any

import jax


class Interrupts:
    """The first signal asks the loop to stop after its step (`asked`); a second stops at once.

    Where several processes run, each would stop at another step, so there the first signal stops at once too.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._ask) for one in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: Any) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked or jax.process_count() > 1:
            raise KeyboardInterrupt("interrupted")
        self.asked = True
        print("\nmeshwright: stopping after this step; once more to stop at once", file=sys.stderr)


def stop(done: int) -> None:
    """Leave an interrupted run whose state after step `done` is saved."""
    raise KeyboardInterrupt(f"interrupted after step {done}, whose checkpoint is saved; go on with --resume")
