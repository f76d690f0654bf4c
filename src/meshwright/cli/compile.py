"""Compile the step with a real TPU or GPU compiler, without the machine: memory and the compiled text."""

import argparse
from pathlib import Path

from rich.console import Console

from meshwright.audit import target as targets
from meshwright.audit.aot import compile_step
from meshwright.cli.common import add_config, add_json, print_json, read_config, writable_directory
from meshwright.config import require
from meshwright.layout import check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    examples = ", ".join(kind.example for kind in targets.KINDS.values())
    parser.add_argument("--target", metavar="TARGET", required=True, help=f"the machine: {examples}")
    parser.add_argument("--text", metavar="FILE", type=Path, help="write the compiled program's text to this file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Status 0: it compiles and fits; 1: it does not fit, or the compiler stopped."""
    target = targets.parse(args.target)
    config = read_config(args)
    check(config, target.device_count)
    if args.text:
        require(not args.text.is_dir(), f"--text {str(args.text)!r} is a directory; name a file")
        writable_directory(args.text.parent)
        args.text.parent.mkdir(parents=True, exist_ok=True)
    facts = compile_step(config, target, args.text)
    if args.json:
        print_json(facts)
    else:
        console = Console()
        for name, value in facts.items():
            console.print(f"{name:>16}  {_shown(name, value)}", markup=False, highlight=False)
    return 0 if facts["verdict"] == "fits" else 1


def _shown(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return f"{value / 2**30:.2f} GiB" if value >= 2**27 else f"{value / 2**20:.2f} MiB"
    return f"{value:.1f} s" if name.endswith("_s") and isinstance(value, float) else str(value)
