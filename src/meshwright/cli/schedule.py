"""`meshwright show schedule`: a pipeline schedule by its name, from a file, or as a configuration has it."""

import argparse
import difflib
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.cli.common import print_json, read_config
from meshwright.config import LayoutConfig, Refused, require
from meshwright.layout import check
from meshwright.report import schedule as report
from meshwright.report import schedule_page, schedule_svg, schedule_text, schedule_trace
from meshwright.schedules.files import read_csv, write_csv
from meshwright.schedules.generate import NAMES, make
from meshwright.schedules.table import Schedule
from meshwright.schedules.times import Times
from meshwright.stages import schedule_of

SIZES = ("stages", "microbatches", "chunks")
MOST_STAGES, MOST_FORWARDS = 256, 2**14
"""A schedule with more stages, or forward passes of a microbatch through a chunk, is refused: no picture could show it."""
LAYOUT = '"pipe=4 schedule=1f1b microbatches=8"'
EXAMPLE = "--schedule zb-h1 --stages 4 --microbatches 8"
TIMES = "F=1,B=1,W=1,send=0.1"
NUMBER = re.compile(r"-?(\d{1,12}(\.\d{0,12})?|\.\d{1,12})(e[+-]?\d{1,2})?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, NAMES))
    known = "\n".join(f"  {name.ljust(width)}  {what}" for name, what in NAMES.items())
    parser.epilog = f"schedules (R is the number of stages; docs/schedules.md shows each):\n{known}"
    parser.add_argument("--schedule", metavar="NAME", help="one of the names below, or a CSV file")
    for name, what in zip(SIZES, ("pipeline stages", "microbatches", "chunks per stage"), strict=True):
        parser.add_argument(f"--{name}", metavar="N", type=_count, help=f"how many {what}")
    parser.add_argument(
        "--times",
        metavar="TEXT",
        type=_times,
        default={},
        help=f"time of each kind of operation, on one chunk, in any unit, as in {TIMES}; where the backward is not split, B is"
        " the whole of it unless W is given too; default F=1,B=1,W=1,send=0, where the whole backward takes 2",
    )
    parser.add_argument(
        "--memory-limit", metavar="N", type=_count, help="zb-auto: the most microbatches that a stage may hold"
    )
    parser.add_argument(
        "--as-run", action="store_true", help="draw the form and the time of the program that trains, tick by tick"
    )
    parser.add_argument("--svg", metavar="FILE", type=Path, help="write the picture")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page of its own that says more under the mouse"
    )
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a trace for ui.perfetto.dev or chrome://tracing"
    )
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write the table, which --schedule FILE reads")


def show(args: argparse.Namespace) -> None:
    schedule, what, times = _chosen(args)
    shown = report.record(schedule, times, what, as_run=args.as_run)
    wrote = [
        _write(args.svg, "--svg", lambda path: path.write_text(schedule_svg.picture(shown), encoding="utf-8")),
        _write(args.html, "--html", lambda path: path.write_text(schedule_page.page(shown), encoding="utf-8")),
        _write(args.trace, "--trace", lambda path: path.write_text(schedule_trace.trace(shown), encoding="utf-8")),
        _write(args.csv, "--csv", lambda path: write_csv(schedule, path)),
    ]
    if args.json:
        print_json(shown)
        return
    console = Console(highlight=False)
    colors = console.color_system is not None and not console.no_color
    console.print(schedule_text.draw(shown, console.width, colors=colors))
    for path in filter(None, wrote):
        console.print(f"wrote {path}", soft_wrap=True, markup=False)


# ---- which schedule ----


def _chosen(args: argparse.Namespace) -> tuple[Schedule, str, Times]:
    """The schedule that the arguments name, one phrase about it, and its times."""
    configured = args.config is not None or args.layout is not None or bool(args.set)
    given = [
        f"--{key.replace('_', '-')}" for key in (*SIZES, "schedule", "memory_limit") if vars(args)[key] is not None
    ]
    require(
        not (configured and given),
        f"a configuration says what to show, and so {', '.join(given)} cannot; write it in --layout, as in {LAYOUT}",
    )
    if configured:
        layout = read_layout(args)
        _within_bounds(layout.pipe, layout.microbatches * layout.chunks)
        schedule, name = schedule_of(layout), layout.schedule
    else:
        require(
            args.schedule is not None,
            f"name a schedule, as in {EXAMPLE}, or a configuration, as in llama-tiny --layout {LAYOUT}; known schedules:"
            f" {', '.join(NAMES)}",
        )
        schedule, name = _named(args), args.schedule
    _within_bounds(schedule.stages, schedule.microbatches * schedule.chunks)
    return schedule, NAMES.get(name, f"read from {name}"), _with_defaults(args.times, schedule.splits_backward)


def read_layout(args: argparse.Namespace) -> LayoutConfig:
    """The layout of the configuration that the arguments name, which has a pipeline."""
    config = read_config(args)
    require(
        config.layout.pipe > 1,
        f"layout '{config.layout}' has one stage (layout.pipe=1), so there is no pipeline; try --layout {LAYOUT}",
    )
    check(config, args.devices)
    return config.layout


def _named(args: argparse.Namespace) -> Schedule:
    name = args.schedule
    if Path(name).suffix.lower() == ".csv":
        require(args.memory_limit is None, "--memory-limit is for zb-auto; a file's table is as it is")
        schedule = read_csv(name)
        for key in SIZES:
            has, wanted = getattr(schedule, key), vars(args)[key]
            require(wanted in (None, has), f"{name} is for {key}={has}, not --{key} {wanted}; leave it out")
        return schedule
    require(
        name in NAMES,
        f"--schedule {name!r} is not known; known: {', '.join(NAMES)}, or a file that ends in .csv{_nearest(name)}",
    )
    missing = [f"--{key}" for key in SIZES[:2] if vars(args)[key] is None]
    require(not missing, f"--schedule {name} needs {' and '.join(missing)}, as in {EXAMPLE}")
    require(
        args.memory_limit is None or name == "zb-auto",
        f"--memory-limit is for zb-auto; {name} holds what it holds",
    )
    _within_bounds(args.stages, args.microbatches * (args.chunks or 1))
    chunks = args.chunks or (2 if name == "interleaved" else 1)
    searched = (
        {"times": _with_defaults(args.times, True), "memory_limit": args.memory_limit} if name == "zb-auto" else {}
    )
    return make(name, args.stages, args.microbatches, chunks, **searched)


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
    return f". Did you mean {close[0]!r}?" if close else ""


def _within_bounds(stages: int, per_stage: int) -> None:
    require(stages <= MOST_STAGES, f"{stages:,} stages are too many to show; at most {MOST_STAGES:,}")
    require(
        stages * per_stage <= MOST_FORWARDS,
        f"{stages:,} stages with {per_stage:,} forward passes each are too much to show; at most {MOST_FORWARDS:,} in all",
    )


# ---- what arguments may be ----


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return int(text)


def _times(text: str) -> dict[str, Any]:
    """The times that ``F=1,B=1,W=1,send=0.1`` names; decimals stay exact."""
    times: dict[str, Any] = {}
    for part in text.replace(" ", "").split(","):
        kind, equals, value = part.partition("=")
        if not equals or kind not in ("F", "B", "W", "send") or not NUMBER.fullmatch(value):
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r} is not a time; write some of {TIMES}")
        if kind in times:
            raise argparse.ArgumentTypeError(f"{text!r} names {kind} twice")
        exact = Fraction(value)
        if exact < 0 or (exact == 0 and kind != "send"):
            raise argparse.ArgumentTypeError(f"{part!r} must be above 0; only send may be 0")
        times[kind] = exact.numerator if exact.denominator == 1 else exact
    return times


def _with_defaults(given: dict[str, Any], splits_backward: bool) -> Times:
    """All times. Where the backward is not split, a B alone is the whole of it."""
    whole = not splits_backward and "B" in given and "W" not in given
    return Times(given.get("F", 1), given.get("B", 1), given.get("W", 0 if whole else 1), given.get("send", 0))


def _write(path: Path | None, flag: str, write: Callable[[Path], Any]) -> Path | None:
    if path is not None:
        try:
            write(path)
        except OSError as error:
            raise Refused(f"{flag} {str(path)!r} cannot be written: {error.strerror or error}") from None
    return path
