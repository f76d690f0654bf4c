"""Schedules in CSV files: one line for each operation, with columns tick, stage, op, microbatch and chunk (0 if left out).

    tick,stage,op,microbatch,chunk
    0,0,F,0,0
    1,0,B,0,0

Everything else follows from the lines: how many stages, microbatches and chunks there are, whether the backward is split
(some op is W), and where the chunks stand (`straight`, unless only `v` makes a right schedule).
"""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.config import Refused, require
from meshwright.schedules.place import ticks
from meshwright.schedules.table import KINDS, PLACEMENTS, Op, Schedule
from meshwright.schedules.validate import Fault, faults

COLUMNS = ("tick", "stage", "op", "microbatch", "chunk")
TICKS_PER_OPERATION = 100
"""A table may be this much longer than its operations; more is a slip of the pen that would fill the memory."""


class _Line(NamedTuple):
    number: int
    tick: int
    stage: int
    op: Op


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write the table of `schedule`; `read_csv` gives it back."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for tick, row in enumerate(schedule.table):
            for stage, ops in enumerate(row):
                writer.writerows((tick, stage, *op) for op in ops)


def read_csv(path: str | Path, delay: int = 1) -> Schedule:
    """The schedule in a file, checked; its name is the file's. Refuses with file, line, tick, stage and operation.

    Args:
        delay: the ticks between making and using that the table must leave (`Schedule.delay`).
    """
    path = Path(path)
    require(path.is_file() or not path.exists(), f"schedule file {str(path)!r} is no file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise Refused(f"there is no schedule file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"schedule file {str(path)!r} cannot be read: {error}") from None
    lines = list(_parse(path, text))
    require(bool(lines), f"{path}: there are no operations, only a header")
    return _check(path, _schedule(path.stem, lines, delay), lines)


def _rows(path: Path, reader: Any) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise Refused(f"{path}, line {reader.line_num}: {error}") from None


def _parse(path: Path, text: str) -> Iterator[_Line]:
    reader = csv.reader(text.splitlines(), skipinitialspace=True)
    header = [name.strip() for name in next(_rows(path, reader), [])]
    require(
        len(set(header)) == len(header) and set(COLUMNS[:4]) <= set(header) <= set(COLUMNS),
        f"{path}, line 1: the columns are {', '.join(header) or 'none'}; they must be {', '.join(COLUMNS[:4])}"
        f" and may be {COLUMNS[4]}",
    )
    for cells in _rows(path, reader):
        place = f"{path}, line {reader.line_num}"
        if not any(cell.strip() for cell in cells):
            continue
        require(len(cells) == len(header), f"{place}: there are {len(cells)} cells for {len(header)} columns")
        row = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
        numbers = {name: row.get(name, "") for name in COLUMNS if name != "op"}
        numbers["chunk"] = numbers["chunk"] or "0"
        for name, cell in numbers.items():
            require(
                cell.isascii() and cell.isdigit() and len(cell) < 10,
                f"{place}: {name}={cell!r} must be a whole number from 0 to 999999999",
            )
        require(row["op"] in KINDS, f"{place}: op={row['op']!r} must be one of {', '.join(KINDS)}")
        value = {name: int(cell) for name, cell in numbers.items()}
        op = Op(row["op"], value["microbatch"], value["chunk"])
        yield _Line(reader.line_num, value["tick"], value["stage"], op)


def _schedule(name: str, lines: list[_Line], delay: int) -> Schedule:
    most = lambda values: max(values) + 1  # noqa: E731
    return Schedule(
        name,
        stages=most(line.stage for line in lines),
        microbatches=most(line.op.microbatch for line in lines),
        table=(),
        chunks=most(line.op.chunk for line in lines),
        splits_backward=any(line.op.kind == "W" for line in lines),
        delay=delay,
    )


def _check(path: Path, schedule: Schedule, lines: list[_Line]) -> Schedule:
    """The schedule with the lines' table and the placement that makes it right, or a refusal that names the line."""
    latest = max(lines, key=lambda line: line.tick)
    limit = TICKS_PER_OPERATION * len(lines)
    require(
        latest.tick < limit and schedule.stages <= len(lines),
        f"{path}, line {latest.number}: tick {latest.tick} and {schedule.stages} stages are too many for a file of"
        f" {len(lines)} operations; tick must be below {limit}, and each stage has operations",
    )
    at: dict[tuple[int, Op], _Line] = {}
    for line in lines:
        first = at.setdefault((line.stage, line.op), line)
        require(
            first is line,
            f"{path}, line {line.number}: tick {line.tick}, stage {line.stage}, {line.op}: is done a second time; the first"
            f" is in line {first.number}, tick {first.tick}",
        )
    schedule = _table(schedule, lines)
    first_fault = None
    for placement in PLACEMENTS if schedule.chunks > 1 else PLACEMENTS[:1]:
        placed = replace(schedule, placement=placement)
        fault = next(faults(placed), None)
        if fault is None:
            return placed
        first_fault = first_fault or fault
    assert first_fault
    raise Refused(_named(path, schedule, first_fault, at))


def _table(schedule: Schedule, lines: list[_Line]) -> Schedule:
    in_order = sorted(lines, key=lambda line: KINDS.index(line.op.kind))
    return ticks(schedule, {(line.stage, line.op): line.tick for line in in_order})


def _named(path: Path, schedule: Schedule, fault: Fault, at: dict[tuple[int, Op], _Line]) -> str:
    line = at.get((fault.stage, fault.op)) if fault.stage is not None and fault.op is not None else None
    both = " (with chunks placed straight; placed as a v it is wrong too)" if schedule.chunks > 1 else ""
    return f"{path}{f', line {line.number}' if line else ''}: {fault}{both}"
