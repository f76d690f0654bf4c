"""Train a model: on emulated CPU devices, one accelerator or many."""

import argparse
import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright import __version__, processes
from meshwright.cli.common import (
    accelerator_count,
    add_config,
    add_devices,
    add_json,
    config_name,
    print_json,
    read_config,
    start_devices,
    writable_directory,
)
from meshwright.config import Refused, RunConfig, flat, load, override, require
from meshwright.layout import check
from meshwright.mesh import join_processes, keep_compiled, require_groups
from meshwright.presets import PRESETS, resolve
from meshwright.train import sources
from meshwright.train.cache import cache_directory
from meshwright.train.resume import differences, require_same_run

RUNS = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, optional=True)
    add_devices(parser, "devices to use; CPU devices are emulated where there are not enough real ones")
    parser.add_argument(
        "--run-directory", metavar="DIR", type=_directory, help=f"where the run is written (default: {RUNS}/NAME)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint, on the same or another layout"
    )
    several = parser.add_argument_group("several processes (--devices counts those of all)")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 can be called by the others")
    several.add_argument("--processes", metavar="N", type=int, help="how many processes there are")
    several.add_argument("--process-id", metavar="I", type=int, help="which one this is: 0 to N-1")
    several.add_argument(
        "--wait",
        metavar="SECONDS",
        type=_seconds,
        default=processes.COME_S,
        help="how long processes wait for each other to come (default: %(default)g)",
    )
    add_json(parser)


def _directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a directory, as in runs/mine")
    return Path(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return seconds


def run(args: argparse.Namespace) -> int:
    place = place_of(args)
    directory = choose_directory(args)
    config = resumed_config(args, directory) if args.resume else read_config(args)
    writable_directory(directory)
    layout = check(config, args.devices)
    count = 1 if place is None else place.count
    if accelerator_count() * count < config.layout.device_count:
        require_groups(layout, count)
    require_data(config)
    if place is None:
        return _train(args, config, directory, lambda: start_devices(config.layout.device_count))
    crew = processes.join(place, asked_of(args, config), told(place, directory), args.wait)

    def start() -> None:
        start_devices(config.layout.device_count // count)
        join_processes(crew.told["runtime"], place.count, place.index)

    try:
        status = _train(args, config, Path(crew.told["directory"]), start, crew)
    except Refused as refusal:
        crew.abandon(str(refusal), 2)
    except KeyboardInterrupt as interrupt:
        crew.abandon(str(interrupt) or "interrupted", 130)
    except Exception as error:
        crew.abandon(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", 1)
    crew.leave()
    return status


def _train(
    args: argparse.Namespace,
    config: RunConfig,
    directory: Path,
    start: Callable[[], None],
    crew: processes.Crew | None = None,
) -> int:
    """Read the data while JAX is imported and its devices start; then train."""
    from meshwright.train.data import prepare  # imports numpy and the tokenizers

    writes = crew is None or crew.place.index == 0
    console = Console(stderr=args.json, quiet=not writes)
    with ThreadPoolExecutor(1) as thread:
        loop = thread.submit(_loop, start)
        data = prepare(config, lambda line: console.print(line, highlight=False, markup=False))
    agree = {} if crew is None else {"agree": crew.agree}
    facts = loop.result().train(config, directory, console, args.resume, data=data, **agree)
    if args.json and writes:
        print_json({"run_directory": str(directory), **facts})
    return 0


def _loop(start: Callable[[], None]) -> Any:
    """The training loop's module, which imports JAX; before that, `start` sets the devices."""
    start()
    keep_compiled(cache_directory() / "compiled")
    return importlib.import_module("meshwright.train.loop")


def place_of(args: argparse.Namespace) -> processes.Place | None:
    """This process's place among several; None where there is one only."""
    given = (args.coordinator, args.processes, args.process_id)
    if all(one is None for one in given):
        return None
    names = ("--coordinator", "--processes", "--process-id")
    missing = [name for name, one in zip(names, given, strict=True) if one is None]
    require(not missing, f"a run of several processes needs {', '.join(names)}; {' and '.join(missing)} missing")
    return processes.Place(*given)


def asked_of(args: argparse.Namespace, config: RunConfig) -> dict[str, str]:
    """What must be equal on all processes: the whole configuration, and the software."""
    software = {f"{name} version": version(name) for name in ("jax", "jaxlib")} | {"meshwright version": __version__}
    return {name: repr(value) for name, value in flat(config).items()} | software | {"--resume": str(args.resume)}


def told(place: processes.Place, directory: Path) -> dict[str, str]:
    """What process 0 decides: the run's directory, and where JAX's own service is."""
    if place.index:
        return {}
    host, _ = place.address
    return {"directory": str(directory.absolute()), "runtime": f"{host}:{processes.free_port(host)}"}


def resumed_config(args: argparse.Namespace, directory: Path) -> RunConfig:
    """The configuration of a resumed run: the recorded one, or CONFIG's where that is a file; then the overrides.

    The layout is the recorded one unless the arguments name another. Refused where it would be another run.
    """
    recorded = load(directory / "config.toml")
    if args.config is not None and args.config not in PRESETS:
        recorded_layout = recorded.layout
        args.config, base = None, replace(resolve(args.config), layout=recorded_layout)
    else:
        if args.config is not None and args.run_directory is not None:
            same_model(args, directory, recorded)
        args.config, base = None, recorded
    config = read_config(args, default=base)
    require_same_run(directory, recorded, config)
    return config


def same_model(args: argparse.Namespace, directory: Path, recorded: RunConfig) -> None:
    """Refuse a preset whose model is not that of the run in `directory`."""
    named = override(resolve(args.config), args.set)
    found = differences(recorded, replace(recorded, model=named.model))
    require(
        not found,
        f"--resume: the run in {str(directory)!r} is not of {args.config}: {'; '.join(found[:3])};"
        " leave CONFIG out to go on with the run as it is recorded",
    )


def require_data(config: RunConfig) -> None:
    """Refuse, before anything starts, data and a tokenizer that are not there."""
    if not config.model.is_language_model:
        return
    sources.find(config.data.paths)
    tokenizer = config.data.tokenizer
    require(
        not tokenizer or Path(tokenizer).expanduser().is_file(), f"data.tokenizer={tokenizer!r}: there is no such file"
    )


def choose_directory(args: argparse.Namespace) -> Path:
    """The run's directory; a new run never gets one that holds a run, a resumed one always does."""
    require(
        args.config is not None or args.resume,
        "train needs a CONFIG: a preset's name (`meshwright show presets` lists them) or a TOML file",
    )
    given = args.run_directory
    if args.resume:
        require(
            given is not None or args.config is not None,
            "--resume needs to know which run: give --run-directory DIR, or the CONFIG whose latest run is meant",
        )
        directory = given or latest(RUNS, config_name(args))
        require((directory / "config.toml").is_file(), f"{str(directory)!r} holds no run to resume (no config.toml)")
        return directory
    if given is None:
        return unused(RUNS, config_name(args))
    require(
        not os.path.exists(given / "config.toml"),
        f"{str(given)!r} already holds a run; add --resume to go on with it, or name another --run-directory",
    )
    return given


def unused(runs: Path, name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, ... that does not exist."""
    number = 1
    while (directory := runs / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return directory


def latest(runs: Path, name: str) -> Path:
    """The newest run of this name in `runs`, by its number."""
    number, found = 1, runs / name
    while (runs / f"{name}-{number + 1}").exists():
        number += 1
        found = runs / f"{name}-{number}"
    return found
