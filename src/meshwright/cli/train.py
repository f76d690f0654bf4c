"""Train a model: on emulated CPU devices, one accelerator or many."""

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from meshwright.cli.common import (
    add_config,
    add_devices,
    add_json,
    config_name,
    print_json,
    read_config,
    start_devices,
    writable_directory,
)
from meshwright.config import RunConfig, load, require
from meshwright.layout import check
from meshwright.presets import PRESETS, resolve
from meshwright.train import sources
from meshwright.train.resume import require_same_run

RUNS = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, optional=True)
    add_devices(parser, "devices to use; CPU devices are emulated where there are not enough real ones")
    parser.add_argument(
        "--run-directory", metavar="DIR", type=Path, help=f"where the run is written (default: {RUNS}/NAME)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint, on the same or another layout"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    directory = choose_directory(args)
    config = resumed_config(args, directory) if args.resume else read_config(args)
    writable_directory(directory)
    check(config, args.devices)
    require_data(config)
    start_devices(config.layout.device_count)
    from meshwright.train.loop import train  # imports JAX, whose devices are now set

    facts = train(config, directory, Console(stderr=args.json), args.resume)
    if args.json:
        print_json({"run_directory": str(directory), **facts})
    return 0


def resumed_config(args: argparse.Namespace, directory: Path) -> RunConfig:
    """The configuration of a resumed run: the recorded one, or CONFIG's where that is a file; then the overrides.

    The layout is the recorded one unless the arguments name another. Refused where it would be another run.
    """
    recorded = load(directory / "config.toml")
    if args.config is not None and args.config not in PRESETS:
        recorded_layout = recorded.layout
        args.config, base = None, replace(resolve(args.config), layout=recorded_layout)
    else:
        args.config, base = None, recorded
    config = read_config(args, default=base)
    require_same_run(directory, recorded, config)
    return config


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
        not (given / "config.toml").exists(),
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
