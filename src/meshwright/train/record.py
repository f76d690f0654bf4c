"""What a run leaves behind and what it shows: the files of the run directory, and the lines on the screen.

Everything shown is written first: the report is drawn from these files alone.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from meshwright import __version__, hardware
from meshwright.config import to_toml
from meshwright.presets import flops_per_token, parameter_count
from meshwright.report import layout_table
from meshwright.report import mesh as mesh_drawing
from meshwright.report import run as report
from meshwright.report.records import finite
from meshwright.train import resume
from meshwright.train.state import Run


class Records:
    """The run directory: config.toml, metrics.jsonl, run.json, report.html. Written by process 0 alone."""

    def __init__(self, directory: Path, run: Run, data: dict[str, Any], resumed: bool):
        self.directory, self.run = directory, run
        self.writes = jax.process_index() == 0
        self._metrics = directory / "metrics.jsonl"
        self.facts: dict[str, Any] = {"samples": [], "resumed": []}
        if resumed:
            self.facts |= resume.recorded_facts(directory)
        self.facts |= {
            "layout": str(run.config.layout),
            "devices": run.mesh.size,
            "device_kind": self._device.device_kind,
            "emulated": self.is_emulated,
            "processes": jax.process_count(),
            "parameters": parameter_count(run.config.model),
            "layout_table": layout_table.rows(run.config),
            "mesh": mesh_drawing.to_json(self.grid),
            "versions": {
                "python": platform.python_version(),
                "meshwright": __version__,
                **{name: version(name) for name in ("jax", "jaxlib", "optax", "orbax-checkpoint")},
            },
            "data": data,
            "unigram_entropy": data.get("unigram_entropy_nats"),
        }
        if self.writes:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.toml").write_text(to_toml(run.config), encoding="utf-8")
            self._save()
        self._tensorboard = _tensorboard(directory) if run.config.train.tensorboard and self.writes else None

    @property
    def _device(self) -> Any:
        return self.run.mesh.devices.flat[0]

    @property
    def is_emulated(self) -> bool:
        return self._device.platform == "cpu" and self.run.mesh.size > 1

    @property
    def grid(self) -> Any:
        degrees = self.run.config.layout.degrees
        devices = list(self.run.mesh.devices.flat)
        numbers = {
            d: i for i, d in enumerate(sorted(devices, key=lambda d: d.id))
        }  # CPU ids of processes are far apart
        ids = [numbers[d] if self.is_emulated else d.id for d in devices]
        return mesh_drawing.grid(degrees, ids, emulated=self.is_emulated)

    def begin(self, done: int, say: Callable[[str], None]) -> None:
        """Go on after step `done`: rows of later steps are forgotten, for those are about to be done again."""
        if self.writes and self._metrics.exists():
            rows = (_parsed(line) for line in self._metrics.read_text(encoding="utf-8").splitlines())
            kept = [json.dumps(row) + "\n" for row in rows if row is not None and row["step"] <= done]
            _write_whole(self._metrics, "".join(kept))
        steps = self.run.config.train.steps
        if done:
            self.facts["resumed"].append({"step": done, "layout": str(self.run.config.layout)})
            all_done = f"all {steps} steps are done; raise train.steps to go on"
            say(all_done if done >= steps else f"going on after step {done}")
        self.note(finished=bool(self.facts.get("finished")) and done >= steps)

    def step(self, number: int, metrics: dict[str, float], seconds: float) -> dict[str, Any]:
        """Write one step's row and return it."""
        tokens = self.run.config.train.sequences * self.run.config.train.sequence_length
        if not self.run.config.model.is_language_model:
            tokens = self.run.config.train.sequences
        row = {
            "step": number,
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "clip_factor": metrics["clip_factor"],
            "lr": metrics["lr"],
            "tokens": tokens,
            "targets": int(metrics["targets"]),
            "tokens_per_s": tokens / seconds,
            "step_s": seconds,
            "skipped": bool(metrics["skipped"]),
        }
        flops = flops_per_token(self.run.config.model, self.run.config.train.sequence_length) * tokens
        mfu = hardware.mfu(flops, seconds, self._device.device_kind, self.run.mesh.size)
        self._append(row if mfu is None else row | {"mfu": mfu})
        return row

    def evaluation(self, number: int, loss: float | None) -> None:
        self._append({"step": number, "eval_loss": loss})

    def note(self, **facts: Any) -> None:
        """Add facts to run.json."""
        self.facts |= facts
        self._save()

    def sample(self, when: str, sample: dict[str, str] | None) -> None:
        if sample is not None:
            others = [one for one in self.facts["samples"] if one["when"] != when]
            self.note(samples=[*others, {"when": when, **sample}])

    def finish(self) -> None:
        """Everything is done and on disk: draw the report."""
        self.note(finished=True)
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self.writes:
            report.write(self.directory)

    def _append(self, row: dict[str, Any]) -> None:
        if not self.writes:
            return
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row), allow_nan=False) + "\n")
        if self._tensorboard is not None:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._tensorboard.add_scalar(name, value, row["step"])

    def _save(self) -> None:
        if self.writes:
            _write_whole(self.directory / "run.json", json.dumps(finite(self.facts), indent=1, allow_nan=False))


def _parsed(line: str) -> dict[str, Any] | None:
    """A row of metrics.jsonl; None for a line that a killed run left unfinished."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _write_whole(path: Path, text: str) -> None:
    """Replace a file at once: a reader, or a run killed here, finds the old text or the new."""
    unfinished = path.with_suffix(path.suffix + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _tensorboard(directory: Path) -> Any:
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(directory / "tensorboard"))


SKIPS_SHOWN = 3
"""Skipped steps that get a line each; they are counted at the end."""


class Screen:
    """The run as text on a console (a quiet one on every process but the first)."""

    def __init__(self, console: Console):
        self.console = console
        self._is_text, self.skipped = True, 0

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def begin(self, run: Run, records: Records) -> None:
        """The mesh and the layout of every parameter, as drawings."""
        self._is_text = run.config.model.is_language_model
        self._speed = "/s, emulated" if records.is_emulated else "/s"
        self.console.print()
        self.console.print(mesh_drawing.draw(records.grid), highlight=False)
        self.console.print()
        self.console.print(layout_table.draw(records.facts["layout_table"]), highlight=False)
        self.console.print()
        train, model = run.config.train, run.config.model
        what = f"sequences of {train.sequence_length} tokens" if model.is_language_model else "examples"
        self.say(
            f"{records.facts['parameters']:,} parameters, {train.sequences} {what} a step,"
            f" {run.engine.compute_dtype} on {records.facts['device_kind']}"
        )

    @contextmanager
    def progress(self, first: int, last: int) -> Iterator[Callable[[dict[str, Any]], None]]:
        """A bar with loss and tokens per second; where the console is no terminal, a line now and then."""
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        every = max((last - first) // 10, 1)
        unit = "tokens" if self._is_text else "examples"
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            task = bar.add_task("compiling", total=last, completed=first)

            def advance(row: dict[str, Any]) -> None:
                text = describe(row, unit + self._speed)
                bar.update(task, completed=row["step"], description=text)
                self.skipped += row["skipped"]
                plain = not self.console.is_terminal and (row["step"] % every == 0 or row["step"] in (first + 1, last))
                if plain or (row["skipped"] and self.skipped <= SKIPS_SHOWN):
                    self.say(f"step {row['step']:>5}/{last}  {text}")

            yield advance

    def show_sample(self, records: Records) -> None:
        """The newest sample, its prompt set apart from what the model wrote."""
        if records.facts["samples"]:
            sample = records.facts["samples"][-1]
            text = Text.assemble((sample["prompt"], "dim"), (sample["text"], "bold"))
            self.console.print(Panel(text, title=f"sample {sample['when']} training", title_align="left"))

    def end(self, records: Records) -> None:
        """The sample after training, the figures, and where everything is."""
        self.show_sample(records)
        facts = records.facts
        if self.skipped:
            self.say(
                f"{self.skipped} steps were skipped: the loss or the gradient norm was not finite; try a lower optim.lr"
            )
        what, unit = ("loss", " nats") if self._is_text else ("squared error", "")
        for text, name in (
            (f"held-out {what} before training", "eval_loss_before"),
            (f"held-out {what} after training", "eval_loss"),
            ("unigram entropy of the text", "unigram_entropy"),
        ):
            if facts.get(name) is not None:
                self.say(f"{text:<38} {facts[name]:.3f}{unit}")
        self.say(f"{'run directory':<38} {records.directory} (report.html, metrics.jsonl, checkpoints/)")


def describe(row: dict[str, Any], unit: str = "tokens/s") -> str:
    """A step's figures in one line."""
    text = f"loss {row['loss']:.3f}  norm {row['grad_norm']:.2f}  {row['tokens_per_s']:,.0f} {unit}"
    return text + ("  skipped: not finite" if row["skipped"] else "")
