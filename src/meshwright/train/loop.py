"""The training loop on one screen: read a batch, call the step, write down the step before it.

Metrics are read one step late, so that the devices never wait for the host; and never later than that, because on
emulated devices many unfinished calls can starve a collective (`mesh.emulate`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshwright import mesh
from meshwright.config import RunConfig
from meshwright.layout import check
from meshwright.train import record, resume
from meshwright.train.checkpoint import Checkpoints
from meshwright.train.data import Data, prepare
from meshwright.train.interrupt import Interrupts, stop
from meshwright.train.programs import Programs
from meshwright.train.state import Run
from meshwright.train.step import objective_of, own_rows, put_batch

Tree = Any


@dataclass(frozen=True)
class Session:
    """A run under way, with all that it works with."""

    run: Run
    data: Data
    programs: Programs
    checkpoints: Checkpoints
    records: record.Records
    screen: record.Screen


def train(
    config: RunConfig,
    directory: Path,
    console: Any,
    resumed: bool = False,
    agree: Callable[[str, str], None] = lambda what, value: None,
    data: Data | None = None,
) -> dict[str, Any]:
    """Train `config`, write the run into `directory` and return its facts (run.json).

    `agree` refuses where another process of this run has another value (`processes.Crew.agree`). Nothing is written before
    the data are ready, the layout is placed on devices and the programs are traced.
    """
    layout = check(config)
    screen = record.Screen(console)
    data = prepare(config, screen.say) if data is None else data
    described = data.describe()
    agree("data with the fingerprint", str(described.get("fingerprint")))
    if resumed:
        resume.require_same_data(directory, described)
    run = Run.of(config, layout, mesh.make(layout))
    programs = Programs(run, data, resumed)
    checkpoints = Checkpoints(directory / "checkpoints", run, screen.say)
    state = checkpoints.restore() if resumed else None
    records = record.Records(directory, run, described, resumed)
    session = Session(run, data, programs, checkpoints, records, screen)
    screen.begin(run, records)
    state = programs.initial() if state is None else state
    records.begin(int(state["step"]), screen.say)
    before(session, state)
    state = steps(session, state)
    after(session, state)
    return records.facts


def before(session: Session, state: Tree) -> None:
    """What the model can do before its first step: its held-out loss and a sample."""
    if int(state["step"]) == 0:
        programs, records = session.programs, session.records
        records.note(eval_loss_before=programs.evaluate(state["params"]))
        records.sample("before", programs.sample(state["params"]))
        session.screen.show_sample(records)


def steps(session: Session, state: Tree) -> Tree:
    """The steps that `state` has not seen; returns the last state. Interrupted, it saves the state it has, and raises."""
    run, programs, records, checkpoints = session.run, session.programs, session.records, session.checkpoints
    train, letters = run.config.train, objective_of(run).batch_letters
    first = done = int(state["step"])
    batches = session.data.batches(first, own_rows(run, train.sequences)) if first < train.steps else ()
    with Interrupts() as interrupts, session.screen.progress(first, train.steps) as advance:
        programs.step.wait()
        late = Late(lambda number, metrics, seconds: advance(records.step(number, metrics, seconds)))
        for done, batch in zip(range(first + 1, train.steps + 1), batches, strict=False):
            on_devices = put_batch(run, batch, letters)
            late.begin()
            state, metrics = programs.step(state, on_devices)
            late.push(done, metrics)
            if due(train.eval_every, done, train.steps):
                late.flush()
                records.evaluation(done, programs.evaluate(state["params"]))
            if due(train.checkpoint_every, done, train.steps) or interrupts.asked:
                checkpoints.save(state, done)
            if interrupts.asked:
                break
        late.flush()
    if done > first:
        checkpoints.save(state, done)
    if done < train.steps:
        checkpoints.finish()
        stop(done)
    return state


def after(session: Session, state: Tree) -> None:
    """What the model can do after its last step; then everything is on disk."""
    programs, records = session.programs, session.records
    if not records.facts["finished"]:
        loss = programs.evaluate(state["params"])
        records.evaluation(session.run.config.train.steps, loss)
        records.note(eval_loss=loss)
        records.sample("after", programs.sample(state["params"]))
    session.checkpoints.finish()
    records.finish()
    session.screen.end(records)


def due(every: int, number: int, steps: int) -> bool:
    """Whether something that happens `every` steps (0: never) happens after step `number`; the end has its own."""
    return bool(every) and number % every == 0 and number < steps


class Late:
    """Hands each step's metrics on when the next step has been started."""

    def __init__(self, read: Callable[[int, dict[str, float], float], None]):
        self._read, self._waiting, self._since = read, None, 0.0

    def begin(self) -> None:
        """A step is about to be called: where none is under way, its time starts now."""
        if self._waiting is None:
            self._since = time.perf_counter()

    def push(self, number: int, metrics: dict[str, jax.Array]) -> None:
        """A step has been called; the metrics of the one before it are read."""
        self.flush()
        self._waiting = (number, metrics)

    def flush(self) -> None:
        """Read what has not been read."""
        if self._waiting is None:
            return
        number, metrics = self._waiting
        values = {name: float(value) for name, value in metrics.items()}  # waits for that step to end
        now = time.perf_counter()
        seconds, self._since, self._waiting = now - self._since, now, None
        self._read(number, values, seconds)
