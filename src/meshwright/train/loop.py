"""The training loop on one screen: read a batch, call the step, write down the step before it.

Metrics are read one step late, so that the devices never wait for the host; and never later than that, because on
emulated devices more than two calls in flight can starve a collective (`mesh.emulate`).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright import mesh
from meshwright.config import RunConfig
from meshwright.layout import check
from meshwright.train import record
from meshwright.train.checkpoint import Checkpoints
from meshwright.train.data import Data, TextData, prepare
from meshwright.train.sample import Sampling, generate
from meshwright.train.state import Run
from meshwright.train.step import eval_step, objective_of, put_batch, train_step


def train(config: RunConfig, directory: Path, console: Any, resume: bool = False) -> dict[str, Any]:
    """Train `config`, write the run into `directory` and return its facts (run.json)."""
    layout = check(config)
    screen = record.Screen(console)
    data = prepare(config, screen.say)
    run = Run.of(config, layout, mesh.make(layout))
    records = record.Records(directory, run, data.describe(), resume)
    screen.begin(run, records)
    checkpoints = Checkpoints(directory / "checkpoints", run)
    state = checkpoints.restore() if resume else run.initial_state()
    first = int(state["step"])
    records.keep_until(first)
    if first >= config.train.steps:
        screen.say(f"all {config.train.steps} steps are done; raise train.steps to go on")

    evaluate = Evaluation(run, data)
    if not resume:
        records.note(eval_loss_before=evaluate(state["params"]))
        records.sample("before", sample(run, data, state["params"]))
        screen.show_sample(records)
    step = train_step(run)
    letters = objective_of(run).batch_letters
    with screen.progress(first, config.train.steps) as advance:
        late = Late(lambda number, metrics, seconds: advance(records.step(number, metrics, seconds)))
        for number, batch in zip(range(first + 1, config.train.steps + 1), data.batches(first), strict=False):
            state, metrics = step(state, put_batch(run, batch, letters))
            late.push(number, metrics)
            if due(config.train.eval_every, number, config.train.steps):
                late.flush()
                records.evaluation(number, evaluate(state["params"]))
            if due(config.train.checkpoint_every, number, config.train.steps):
                checkpoints.save(state, number)
        late.flush()
    if first < config.train.steps:
        checkpoints.save(state, config.train.steps)
        records.note(eval_loss=evaluate(state["params"]))
        records.evaluation(config.train.steps, records.facts["eval_loss"])
        records.sample("after", sample(run, data, state["params"]))
    checkpoints.finish()
    records.finish()
    screen.end(records)
    return records.facts


def due(every: int, number: int, steps: int) -> bool:
    """Whether something that happens `every` steps (0: never) happens after step `number`; the end has its own."""
    return bool(every) and number % every == 0 and number < steps


class Late:
    """Hands each step's metrics on when the next step has been started."""

    def __init__(self, read: Callable[[int, dict[str, float], float], None]):
        self._read, self._waiting, self._since = read, None, time.perf_counter()

    def push(self, number: int, metrics: dict[str, jax.Array]) -> None:
        if self._waiting is None:
            self._since = time.perf_counter() if number > 1 else self._since
        self.flush()
        self._waiting = (number, metrics)

    def flush(self) -> None:
        if self._waiting is None:
            return
        number, metrics = self._waiting
        values = {name: float(value) for name, value in metrics.items()}  # waits for that step to end
        now = time.perf_counter()
        self._read(number, values, now - self._since)
        self._waiting, self._since = None, now


class Evaluation:
    """The held-out loss, token-weighted: the same on any number of devices."""

    def __init__(self, run: Run, data: Data):
        self.run, self.data = run, data
        self._step = eval_step(run)

    def __call__(self, params: Any) -> float | None:
        """The loss per target; None where nothing is held out."""
        letters = objective_of(self.run).batch_letters
        total, targets = 0.0, 0.0
        for batch in self.data.eval_batches(self.run.config.train.sequences):
            loss_sum, count = self._step(params, put_batch(self.run, batch, letters))
            total, targets = total + float(loss_sum), targets + float(count)
        return total / targets if targets else None


PROMPT_TOKENS = 24


def sample(run: Run, data: Data, params: Any) -> dict[str, str] | None:
    """A continuation of the prompt, as text; None for a model without text."""
    train = run.config.train
    if not isinstance(data, TextData) or not train.sample_tokens:
        return None
    prompt = data.tokenizer.encode(train.sample_prompt) if train.sample_prompt else data.prompt(PROMPT_TOKENS)
    written = generate(run, params, prompt, train.sample_tokens, Sampling(temperature=0.8, top_p=0.95, seed=train.seed))
    return {"prompt": data.tokenizer.decode(prompt), "text": data.tokenizer.decode(written)}
