"""Compile the step with a real TPU or GPU compiler, without the machine: memory and the compiled text."""

import argparse
from pathlib import Path

from rich.console import Console

from meshwright.cli.common import add_config, add_json, print_json, read_config, writable_directory
from meshwright.config import require
from meshwright.layout import check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--target",
        metavar="TARGET",
        required=True,
        help="cpu:8, tpu-v5p:2x2x4 (topology), h100-sxm:2x8 (hosts x devices)",
    )
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the compiled program's text to this file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    kind, colon, shape = args.target.partition(":")
    require(
        bool(kind and colon) and all(part.isdecimal() and int(part) for part in shape.split("x")),
        f"--target {args.target!r} is not KIND:SHAPE; write it as cpu:8, tpu-v5p:2x2x4 or h100-sxm:2x8",
    )
    check(config, _product(shape))
    if args.save:
        writable_directory(args.save.parent)
    from meshwright.audit.aot import compile_step  # imports JAX

    facts = compile_step(config, args.target, args.save)
    if args.json:
        print_json(facts)
    else:
        console = Console()
        for name, value in facts.items():
            console.print(f"{name:>24}  {_shown(name, value)}", markup=False, highlight=False)
    return 0


def _product(shape: str) -> int:
    count = 1
    for part in shape.split("x"):
        count *= int(part)
    return count


def _shown(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return f"{value / 2**30:.2f} GiB"
    return f"{value:.1f} s" if name.endswith("_s") and isinstance(value, float) else str(value)
