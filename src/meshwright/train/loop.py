"""The training loop on one screen: read a batch, call the step, write down the step before it.

Metrics are read one step late, so that the devices never wait for the host; and never later than that, because on
emulated devices many calls in flight can starve a collective (`mesh.emulate`).
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright import mesh
from meshwright.config import RunConfig
from meshwright.layout import check
from meshwright.train import record, resume
from meshwright.train.checkpoint import Checkpoints
from meshwright.train.data import Batch, Data, TextData, prepare
from meshwright.train.interrupt import Interrupts, stop
from meshwright.train.sample import Sampling, generate, writer
from meshwright.train.state import Run
from meshwright.train.step import eval_step, objective_of, own_rows, put_batch, train_step

Tree = Any


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
    programs = Programs(run, data)
    checkpoints = Checkpoints(directory / "checkpoints", run, screen.say)
    state = checkpoints.restore() if resumed else None
    records = record.Records(directory, run, described, resumed)
    screen.begin(run, records)
    if state is None:
        state = programs.initial()
    first = int(state["step"])
    records.begin(first, screen.say)
    if first == 0:
        before(programs, records, screen, state["params"])
    state = steps(run, programs, data, checkpoints, records, screen, state, first)
    after(programs, checkpoints, records, screen, state["params"])
    return records.facts


def steps(
    run: Run,
    programs: "Programs",
    data: Data,
    checkpoints: Checkpoints,
    records: record.Records,
    screen: record.Screen,
    state: Tree,
    first: int,
) -> Tree:
    """The steps after `first`; returns the last state. Interrupted, it saves the state that it has and raises."""
    train, letters, done = run.config.train, objective_of(run).batch_letters, first
    batches = data.batches(first, own_rows(run, train.sequences)) if first < train.steps else ()
    with Interrupts() as interrupts, screen.progress(first, train.steps) as advance:
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


def before(programs: "Programs", records: record.Records, screen: record.Screen, params: Tree) -> None:
    """What the model can do before the first step: its held-out loss and a sample."""
    records.note(eval_loss_before=programs.evaluate(params))
    records.sample("before", programs.sample(params))
    screen.show_sample(records)


def after(
    programs: "Programs", checkpoints: Checkpoints, records: record.Records, screen: record.Screen, params: Tree
) -> None:
    """What it can do after the last one; then everything is on disk."""
    if not records.facts.get("finished"):
        loss = programs.evaluate(params)
        records.evaluation(records.run.config.train.steps, loss)
        records.note(eval_loss=loss)
        records.sample("after", programs.sample(params))
    checkpoints.finish()
    records.finish()
    screen.end(records)


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


# ---- the programs --------------------------------------------------------------------------------------


PROMPT_TOKENS = 24
SAMPLING = Sampling(temperature=0.8, top_p=0.95)
"""How a run's own samples are drawn: with chance, so that an untrained model shows itself, but never from the tail."""


class Program:
    """A compiled program that is called when it is needed: traced now, compiled meanwhile by another thread."""

    def __init__(self, threads: ThreadPoolExecutor, jitted: Any, *kinds: Any, options: dict[str, Any] | None = None):
        lowered = jitted.lower(*kinds)
        self.out = lowered.out_info
        self._compiled = threads.submit(lowered.compile, options)

    def wait(self) -> None:
        """Until it is compiled."""
        self._compiled.result()

    def __call__(self, *arguments: Any) -> Any:
        return self._compiled.result()(*arguments)


class Programs:
    """All programs of a run, in the order in which they are needed. None is compiled again later."""

    def __init__(self, run: Run, data: Data):
        self._run, self._data = run, data
        self._letters = objective_of(run).batch_letters
        self._threads = ThreadPoolExecutor(2, "compile")
        prompt, sample_tokens = self._prompt(), run.config.train.sample_tokens
        write, kinds = writer(run, len(prompt), sample_tokens, SAMPLING) if prompt is not None else (None, ())
        once = {"xla_backend_optimization_level": 0} if run.platform == "cpu" else None  # 0.7 CPU s instead of 2.7
        self.initial = Program(self._threads, run.initial_program(), options=once)
        state = jax.tree.map(_kind, self.initial.out, run.shardings(at_rest=True))
        batch = self._batch_kinds(data.batch(0, own_rows(run, run.config.train.sequences)))
        has_held_out = next(held_out_batches(run, data), None) is not None
        self._eval = Program(self._threads, eval_step(run), state["params"], batch) if has_held_out else None
        self.step = Program(self._threads, train_step(run), state, batch)
        self._writing = prompt, write and Program(self._threads, write, state["params"], *kinds)
        self._threads.shutdown(wait=False)

    def _batch_kinds(self, batch: Batch) -> Tree:
        specs, sequences = self._run.batch_specs(self._letters), self._run.config.train.sequences
        return {
            name: jax.ShapeDtypeStruct(
                (sequences, *batch[name].shape[1:]),
                jax.dtypes.canonicalize_dtype(batch[name].dtype),
                sharding=NamedSharding(self._run.mesh, spec),
            )
            for name, spec in specs.items()
        }

    def evaluate(self, params: Tree) -> float | None:
        """The held-out loss per target; None where nothing is held out."""
        return None if self._eval is None else held_out_loss(self._run, self._data, self._eval, params)

    def _prompt(self) -> list[int] | None:
        """What is continued; None for a model without text."""
        train = self._run.config.train
        if not isinstance(self._data, TextData) or not train.sample_tokens:
            return None
        if train.sample_prompt:
            return self._data.tokenizer.encode(train.sample_prompt)
        return self._data.prompt(max(min(PROMPT_TOKENS, train.sequence_length // 2), 1))

    def sample(self, params: Tree) -> dict[str, str] | None:
        """A continuation of the prompt, as text; None for a model without text."""
        prompt, program = self._writing
        if prompt is None:
            return None
        written = generate(self._run, params, prompt, self._run.config.train.sample_tokens, SAMPLING, program)
        decode = self._data.tokenizer.decode
        return {"prompt": decode(prompt), "text": decode(written)}


def held_out_batches(run: Run, data: Data) -> Iterator[Batch]:
    """This process's rows of the held-out batches; the last is filled up with rows that do not count."""
    train = run.config.train
    return data.eval_batches(train.sequences, own_rows(run, train.sequences)) if train.eval_sequences else iter(())


def held_out_loss(run: Run, data: Data, program: Any, params: Tree) -> float | None:
    """The loss of all held-out targets divided by their number, so the same on any layout."""
    letters = objective_of(run).batch_letters
    total = targets = 0.0
    for batch in held_out_batches(run, data):
        loss_sum, count = program(params, put_batch(run, batch, letters))
        total, targets = total + float(loss_sum), targets + float(count)
    return total / targets if targets else None


def _kind(out: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=sharding)
