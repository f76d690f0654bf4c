"""The configuration reference, docs/configuration.md, written from `config.py`: names, types, defaults, docstrings.

Run ``python -m meshwright.report.reference > docs/configuration.md``; a test keeps the file equal to the code.
"""

import ast
import dataclasses
import inspect
import typing
from itertools import pairwise
from typing import Any

from meshwright import config

SECTIONS = ("model", "data", "optim", "train", "layout")


def page() -> str:
    """The reference as Markdown."""
    kinds = typing.get_type_hints(config.RunConfig)
    parts = [
        "# Configuration",
        "A configuration is a TOML file of five sections. A key that is left out has its default; an unknown key is"
        " refused. `--set section.key=value` overrides any key, `meshwright show config NAME` prints a complete one.",
        *(_section(f"[{name}]", kinds[name]) for name in SECTIONS),
        _section("[model.rope_scaling]", config.RopeScaling),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, cls: type) -> str:
    notes = docstrings(cls)
    about = " ".join((inspect.getdoc(cls) or "").split())
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        note = notes.get(f.name, "").replace("|", "\\|")
        rows.append(f"| `{f.name}` | {_kind(hints[f.name])} | `{_value(f.default)}` | {note} |")
    return f"## `{title}`\n\n{about}\n\n" + "\n".join(rows)


def docstrings(cls: type) -> dict[str, str]:
    """The string that stands below each field of a class in its source."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, below in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _kind(kind: Any) -> str:
    words = {int: "integer", float: "number", bool: "boolean", str: "string"}
    if kind in words:
        return words[kind]
    return "list of strings" if typing.get_origin(kind) is tuple else "section"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    print(page(), end="")
