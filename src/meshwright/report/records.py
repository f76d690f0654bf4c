"""The records of a run, read back: its configuration, its metrics and its facts. Every drawing starts here."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config import Refused, RunConfig, load


@dataclass(frozen=True)
class Records:
    """What a run directory holds."""

    config: RunConfig
    config_text: str
    steps: tuple[dict[str, Any], ...]
    """One row a training step, by step; where a step ran twice (after a resume), the later row."""
    evaluations: tuple[dict[str, Any], ...]
    """The rows that have an `eval_loss`."""
    facts: dict[str, Any]
    """run.json, or nothing where the run has not written it."""


def read(run_directory: Path) -> Records:
    """Read `run_directory`; a metrics line that a killed run left unfinished is passed over if it is the last."""
    directory = Path(run_directory)
    config_path, metrics_path, facts_path = (directory / name for name in ("config.toml", "metrics.jsonl", "run.json"))
    config = load(config_path)
    rows = _rows(metrics_path) if metrics_path.exists() else []
    steps = {row["step"]: row for row in rows if "loss" in row}
    evaluations = {row["step"]: row for row in rows if "eval_loss" in row}
    return Records(
        config=config,
        config_text=config_path.read_text(encoding="utf-8"),
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        facts=_loads(facts_path.read_text(encoding="utf-8")) if facts_path.exists() else {},
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _loads(line)
            row["step"]  # every row has one
            rows.append(row)
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise Refused(f"{str(path)!r}, line {number}, is not a metrics row: {line[:80]!r}") from None
    return rows


def _loads(text: str) -> Any:
    """Parse JSON; NaN and infinities, which Python writes and JSON does not have, become None."""
    return json.loads(text, parse_constant=lambda _: None)


def finite(value: Any) -> Any:
    """`value` with NaN and infinities replaced by None and keys by strings: what strict JSON can hold."""
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def column(rows: tuple[dict[str, Any], ...], key: str) -> list[float | None]:
    """The values of `key`, None where a row lacks it or its value is not finite."""
    return [value if _is_number(value := row.get(key)) else None for row in rows]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def median(values: list[float | None]) -> float | None:
    """The median of the values that are known, None where none is."""
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None
