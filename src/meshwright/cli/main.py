"""The command `meshwright`: reads the arguments and turns every refusal into one message and a status.

Status: 0 done and good; 1 ran and the verdict is bad; 2 the request was refused; 130 interrupted.
"""

import argparse
import difflib
import io
import os
import sys
from collections.abc import Sequence

from meshwright import __version__
from meshwright.cli import compile, show, train, verify
from meshwright.config import Refused

COMMANDS = {"train": train, "verify": verify, "compile": compile, "show": show}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and the command's usage."""

    def error(self, message: str) -> None:
        raise Refused(f"{message}\ntry: {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: str) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            name = action.metavar if isinstance(action.metavar, str) else action.dest
            raise argparse.ArgumentError(
                None, f"{name.lower()} {value!r} is not known; allowed: {', '.join(known)}{hint}"
            )


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = Parser(
        prog="meshwright",
        description="Train language models in parallel with JAX: the same answer on any layout.",
        epilog="Begin with: meshwright train llama-demo --layout 'data=2 fsdp=2 tensor=2'",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"meshwright {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, module in COMMANDS.items():
        purpose = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no arrows gets question marks
    try:
        args = parser().parse_args(arguments)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except Refused as refusal:
        print(f"meshwright: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"\nmeshwright: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def command() -> None:
    """The program `meshwright`: what was refused or interrupted does not wait for compilations in the background."""
    status = main()
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    command()
