"""All programs of a run: traced in the order in which they are needed, compiled side by side, none compiled again later."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.train.data import Batch, Data, TextData
from meshwright.train.sample import Sampling, generate, writer
from meshwright.train.state import Run
from meshwright.train.step import eval_step, objective_of, own_rows, put_batch, train_step

Tree = Any

PROMPT_TOKENS = 24
SAMPLING = Sampling(temperature=0.8, top_p=0.95)
"""How a run's own samples are drawn: with chance, so that an untrained model shows itself, but never from the tail."""


class Program:
    """A compiled program that is called when it is needed: traced now, compiled meanwhile by another thread."""

    def __init__(self, jitted: Any, *kinds: Any, options: dict[str, Any] | None = None):
        self._lowered, self._options = jitted.lower(*kinds), options
        self._compiled: Future[Any] | None = None
        self.out = self._lowered.out_info

    def compile(self, threads: ThreadPoolExecutor) -> "Program":
        """Begin to compile."""
        self._compiled = threads.submit(self._lowered.compile, self._options)
        return self

    def wait(self) -> Any:
        """The compiled program, once it is there."""
        return self._compiled.result() if self._compiled else self._lowered.compile(self._options)

    def __call__(self, *arguments: Any) -> Any:
        return self.wait()(*arguments)


class Programs:
    """The programs of one run. The initial state's is compiled only if it is called, where the run is resumed."""

    def __init__(self, run: Run, data: Data, resumed: bool):
        self._run, self._data = run, data
        self._letters = objective_of(run).batch_letters
        prompt, sample_tokens = self._prompt(), run.config.train.sample_tokens
        write, kinds = writer(run, len(prompt), sample_tokens, SAMPLING) if prompt is not None else (None, ())
        threads = ThreadPoolExecutor(2, "compile")
        once = {"xla_backend_optimization_level": 0} if run.platform == "cpu" else None  # 0.7 CPU s instead of 2.7
        self.initial = Program(run.initial_program(), options=once)
        if not resumed:
            self.initial.compile(threads)
        state = jax.tree.map(_kind, self.initial.out, run.shardings(at_rest=True))
        batch = self._batch_kinds(data.batch(0, own_rows(run, run.config.train.sequences)))
        has_held_out = next(held_out_batches(run, data), None) is not None
        self._eval = Program(eval_step(run), state["params"], batch).compile(threads) if has_held_out else None
        self.step = Program(train_step(run), state, batch).compile(threads)
        self._writing = prompt, write and Program(write, state["params"], *kinds).compile(threads)
        threads.shutdown(wait=False)

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
        if prompt is None or not isinstance(self._data, TextData):
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
