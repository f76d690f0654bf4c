"""What the commands share: the arguments that name a configuration, and the devices that it needs."""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.config import Refused, RunConfig, override, parse_layout, require
from meshwright.mesh import emulate
from meshwright.presets import resolve
from meshwright.report.records import finite


def add_config(parser: argparse.ArgumentParser, *, optional: bool = False, layout: bool = True) -> None:
    """Add CONFIG, --layout, --set and --data to a command."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?" if optional else None,
        help="a preset's name (`meshwright show presets` lists them) or a TOML file",
    )
    if layout:
        parser.add_argument("--layout", metavar="TEXT", help='degrees and settings, as in "fsdp=4 tensor=2 zero=1"')
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="override, as in optim.lr=1e-3; repeatable"
    )
    parser.add_argument(
        "--data", metavar="PATH", action="append", default=[], help="file, directory or 'glob' to read; repeatable"
    )


def add_devices(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument("--devices", metavar="N", type=_device_count, help=help_text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print exactly one JSON document on standard output")


def _device_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 4096")
    return int(text)


def read_config(args: argparse.Namespace, default: RunConfig | None = None) -> RunConfig:
    """The configuration that the arguments name, with their overrides, in the order: file, --set, --layout, --data."""
    config = resolve(args.config) if args.config is not None else default or RunConfig()
    config = override(config, args.set)
    text = getattr(args, "layout", None)
    if text is not None:
        require(
            text != "auto",
            '--layout auto needs the planner, which does not exist yet; write degrees, as in --layout "fsdp=8"',
        )
        config = replace(config, layout=parse_layout(text, config.layout))
    if args.data:
        for path in args.data:
            require(bool(path), "--data is empty; it names a file, a directory or a glob")
        config = replace(config, data=replace(config.data, paths=tuple(args.data)))
    return config


def start_devices(needed: int) -> None:
    """Emulate `needed` CPU devices where there are fewer accelerators. Call it before anything imports JAX."""
    count, asked = accelerator_count(), os.environ.get("JAX_PLATFORMS", "").split(",")
    if count >= needed:
        return
    require(
        not asked[0] or "cpu" in asked,
        f"JAX_PLATFORMS={','.join(asked)} asks for {needed} accelerators, but there are {count} here;"
        " unset it, or set it to cpu, to emulate devices",
    )
    emulate(needed)


def accelerator_count() -> int:
    """Accelerators of this host that JAX can use, found without importing it: device files and installed plug-ins."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    if any(find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")):
        gpus = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
        if gpus:
            return len(gpus)
    if find_spec("libtpu"):
        return len(list(Path("/dev").glob("accel*"))) or len(
            [p for p in Path("/dev/vfio").glob("*") if p.name.isdecimal()]
        )
    return 0


def config_name(args: argparse.Namespace) -> str:
    """The name a run of this configuration gets: the preset's, or the file's without its ending."""
    return Path(args.config).stem if args.config.endswith(".toml") else Path(args.config).name


def print_json(document: Any) -> None:
    """Print one strict JSON document (numbers that JSON does not have become null)."""
    print(json.dumps(finite(document), indent=2, ensure_ascii=False), file=sys.stdout)


def writable_directory(path: Path) -> None:
    """Refuse a directory that cannot be made or written; nothing of it is left."""
    remedy = "name another with --run-directory"
    try:
        existing = next((p for p in (path, *path.absolute().parents) if p.exists()), Path("/"))
        if not existing.is_dir():
            raise Refused(f"{str(path)!r} cannot be made: {str(existing)!r} is a file; {remedy}")
        os.rmdir(tempfile.mkdtemp(dir=existing, prefix=".meshwright-"))
    except OSError as error:
        raise Refused(f"{str(path)[:200]!r} cannot be written: {error.strerror}; {remedy}") from None
