"""A pipeline schedule in the terminal: a row for each stage, time from left to right, and below it what each stage holds.

With colours an operation is a box in the colour of its kind with its microbatch's number. Without them (in a pipe or a file)
its letter, microbatch and chunk are written out, so that nothing is lost.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from meshwright.report.schedule import heading, ink, kinds, nice_times, sentences, shade, share, text

MOST_LINES = 54
"""With colours, a timeline that needs more lines is drawn with less detail: three panels of 16 stages."""
MOST_PLAIN_PANELS = 12
"""Without colours, a timeline that needs more is not drawn to scale."""
BARS = " ▁▂▃▄▅▆▇█"

Shown = dict[str, Any]


@dataclass(frozen=True)
class _Box:
    """An operation on the screen: its first column, the one after its last, and what stands in it."""

    first: int
    last: int
    label: str
    kind: str
    chunk: int


@dataclass(frozen=True)
class _Lines:
    """The boxes of each stage, and the times that stand above columns."""

    boxes: list[list[_Box]]
    marks: list[tuple[int, str]]
    width: int
    note: str = ""


def draw(shown: Shown, width: int, *, colors: bool) -> RenderableType:
    """The whole drawing, `width` columns wide."""
    title = Text(shown["schedule"], style="bold")
    title.append(f"  {heading(shown)}", style="dim" if colors else "")
    return Group(
        title,
        Text(),
        *(_timeline(shown, width) if colors else _plain(shown, width)),
        _legend(shown, colors),
        Text(),
        _stages(shown, width, colors),
        Text(),
        *(_sentence(sentence) for sentence in sentences(shown)),
    )


def _sentence(sentence: str) -> Text:
    """A sentence with what it is about in bold."""
    about, colon, rest = sentence.partition(":")
    return Text.assemble((about, "bold"), colon, rest)


# ---- where operations stand ----


def _to_scale(shown: Shown, label: Callable[[dict[str, Any]], str]) -> _Lines:
    """Columns in proportion to time, so many that each label and a space fit into its operation."""
    columns = _per_unit(shown, label)
    return _lines(shown, label, lambda time: time * columns)


def _per_unit(shown: Shown, label: Callable[[dict[str, Any]], str]) -> float:
    """Columns for a unit of time; a third more than needed where that gives every time whole columns."""
    shortest = min(e["end"] - e["start"] for e in shown["events"])
    least = max((len(label(e)) + 1) / (e["end"] - e["start"]) for e in shown["events"])
    times = {e["end"] - e["start"] for e in shown["events"]} | {shown["times"]["send"]}
    for count in range(math.ceil(least * shortest - 1e-9), int(least * shortest * 4 / 3) + 1):
        if all(abs(time * count / shortest - round(time * count / shortest)) < 1e-6 for time in times):
            return count / shortest
    return least


def _tight(shown: Shown, label: Callable[[dict[str, Any]], str]) -> _Lines:
    """As few columns as let the labels fit, in the order of time but not in proportion to it."""
    times = sorted({e[end] for e in shown["events"] for end in ("start", "end")})
    ending: dict[float, list[dict[str, Any]]] = {}
    for event in shown["events"]:
        ending.setdefault(event["end"], []).append(event)
    column: dict[float, float] = {}
    now = 0
    for time in times:
        now = max([now, *(column[e["start"]] + len(label(e)) + 1 for e in ending.get(time, ()))])
        column[time] = now
    note = "The columns are in the order of time, not to scale."
    return _lines(shown, label, lambda time: column[time], times, note)


def _lines(
    shown: Shown,
    label: Callable[[dict[str, Any]], str],
    column: Callable[[float], float],
    marked: list[float] | None = None,
    note: str = "",
) -> _Lines:
    boxes: list[list[_Box]] = [[] for _ in range(shown["stages"])]
    for e in shown["events"]:
        box = _Box(round(column(e["start"])), round(column(e["end"])), label(e), e["kind"], e["chunk"])
        boxes[e["stage"]].append(box)
    width = max(box.last for row in boxes for box in row)
    return _Lines(boxes, _marks(column, marked or nice_times(shown, max(1, width // 9))), width, note)


def _marks(column: Callable[[float], float], times: list[float]) -> list[tuple[int, str]]:
    return [(round(column(time)), text(time)) for time in times]


# ---- the timeline ----


def _margin(shown: Shown) -> int:
    return len(f"stage {shown['stages'] - 1}  ")


def _plain(shown: Shown, width: int) -> list[Text]:
    """Every operation by its name: ``F3`` and, on chunk 1, ``F3.1``."""
    room = max(width - _margin(shown), 20)
    lines = _to_scale(shown, lambda e: e["op"])
    if lines.width > MOST_PLAIN_PANELS * room:
        lines = _tight(shown, lambda e: e["op"])
    return _panels(shown, lines, room, colors=False)


def _timeline(shown: Shown, width: int) -> list[Text]:
    """The most detail that fits: names on one panel, microbatches on a few, colours alone."""
    room = max(width - _margin(shown), 20)
    names = _to_scale(shown, lambda e: e["op"])
    if names.width <= room:
        return _panels(shown, names, room, colors=True)
    numbers = _to_scale(shown, lambda e: str(e["microbatch"]))
    if math.ceil(numbers.width / room) * (shown["stages"] + 2) <= MOST_LINES:
        return _panels(shown, numbers, room, colors=True)
    return _halves(shown, room)


def _panels(shown: Shown, lines: _Lines, room: int, *, colors: bool) -> list[Text]:
    drawn = [Text(lines.note), Text()] if lines.note else []
    for first, last in _cuts(lines, room):
        drawn.append(_ruler(shown, lines, first, last))
        for stage, boxes in enumerate(lines.boxes):
            line = Text(_stage_name(shown, stage), style="")
            at = first
            begun = bisect.bisect_right(boxes, first, key=lambda box: box.last)
            for box in boxes[begun : bisect.bisect_left(boxes, last, key=lambda box: box.first)]:
                start, end = max(box.first, first), min(box.last, last)
                line.append("·" * (start - at), style="dim")
                line.append(*_cells(box, start, end, colors, shown["chunks"]))
                at = end
            line.append("·" * (last - at), style="dim")
            drawn.append(line)
        drawn.append(Text())
    return drawn


def _stage_name(shown: Shown, stage: int) -> str:
    return f"stage {stage}".ljust(_margin(shown))


def _cells(box: _Box, start: int, end: int, colors: bool, chunks: int) -> tuple[str, Style]:
    """The part of an operation from column `start` to `end`: its label where it fits first, and what fills the rest."""
    fill = " " if colors else "─"
    label = box.label
    fits_before = min(end, box.last) - box.first >= len(label) if start == box.first else False
    if start > box.first and _fits(box, start):
        label = ""  # it stands in the panel before
    elif start == box.first and not fits_before:
        label = ""
    cells = label.ljust(end - start, fill)
    if not colors and end == box.last and len(cells) > len(label):
        cells = cells[:-1] + " "
    if not colors:
        return cells, Style()
    color = shade(box.kind, box.chunk, chunks)
    return cells, Style(color=ink(color), bgcolor=color)


def _fits(box: _Box, cut: int) -> bool:
    """Whether the label stands before column `cut`."""
    return cut - box.first >= len(box.label)


def _cuts(lines: _Lines, room: int) -> list[tuple[int, int]]:
    """Panels of at most `room` columns, nearly equal, cut between operations or where every label still stands in one piece."""
    cuts, first = [], 0
    room = min(room, _evenly(lines.width, room) + 4)
    while first < lines.width:
        last = min(first + room, lines.width)
        if last < lines.width:
            near = range(last, max(first, last - room // 2), -1)
            free = (cut for cut in near[:8] if not _crossed(lines, cut))
            whole = (cut for cut in near if all(_stands(box, cut) for box in _crossed(lines, cut)))
            last = next(free, None) or next(whole, None) or last
        cuts.append((first, last))
        first = last
    return cuts


def _crossed(lines: _Lines, cut: int) -> list[_Box]:
    crossed = []
    for boxes in lines.boxes:
        before = bisect.bisect_left(boxes, cut, key=lambda box: box.first) - 1
        crossed += [box for box in boxes[max(before, 0) : before + 1] if box.last > cut]
    return crossed


def _stands(box: _Box, cut: int) -> bool:
    """Whether the label has room before the cut or after it."""
    return _fits(box, cut) or box.last - cut >= len(box.label)


def _evenly(width: int, room: int) -> int:
    """The columns of a panel when as few panels as can be share `width`."""
    return math.ceil(width / math.ceil(width / room))


def _ruler(shown: Shown, lines: _Lines, first: int, last: int) -> Text:
    """Times above their columns, as many as can be read."""
    line, free = "time".ljust(_margin(shown)), first
    for column, mark in lines.marks[bisect.bisect_left(lines.marks, (first, "")) :]:
        if column > last - len(mark):
            break
        if column >= free:
            line = line.ljust(_margin(shown) + column - first) + mark
            free = column + len(mark) + 3
    return Text(line.rstrip(), style="dim")


# ---- many operations: colours alone, two to a column ----


def _halves(shown: Shown, room: int) -> list[Text]:
    """Colours alone, two halves to a column: to scale if a few panels hold the shortest operation, else what fills each half."""
    shortest = min(e["end"] - e["start"] for e in shown["events"])
    halves = round(shown["total_time"] / shortest)
    exact = halves <= 2 * room * max(1, MOST_LINES // (shown["stages"] + 2))
    if not exact:
        halves = 2 * room
    rows = _fill(shown, halves)
    note = f"One column is {text(float(2 * shown['total_time'] / halves))} units of time"
    note += "; what takes less is not seen." if not exact else "."
    drawn = [Text(note + " For microbatches: --html FILE or --svg FILE.", style="dim"), Text()]
    width = math.ceil(halves / 2)
    column = lambda time: time / shown["total_time"] * halves / 2  # noqa: E731
    scale = _Lines([], _marks(column, nice_times(shown, max(1, width // 9))), width)
    panel = 2 * _evenly(scale.width, room)
    for first in range(0, halves, panel):
        last = min(first + panel, halves)
        drawn.append(_ruler(shown, scale, first // 2, math.ceil(last / 2)))
        for stage, row in enumerate(rows):
            line = Text(_stage_name(shown, stage))
            for at in range(first, last, 2):
                line.append(*_halved(row[at], row[at + 1] if at + 1 < last else ""))
            drawn.append(line)
        drawn.append(Text())
    return drawn


def _fill(shown: Shown, halves: int) -> list[list[str]]:
    """For each stage and half of a column, the colour of what takes most of it ("": idle)."""
    width = shown["total_time"] / halves
    parts: list[list[dict[str, float]]] = [[{"": width} for _ in range(halves)] for _ in range(shown["stages"])]
    for e in shown["events"]:
        color = shade(e["kind"], e["chunk"], shown["chunks"])
        for at in range(int(e["start"] / width + 1e-9), min(halves, math.ceil(e["end"] / width - 1e-9))):
            part = min(e["end"], (at + 1) * width) - max(e["start"], at * width)
            times = parts[e["stage"]][at]
            times[color] = times.get(color, 0) + part
            times[""] -= part
    return [[max(times, key=lambda color: (times[color], color)) for times in row] for row in parts]


def _halved(left: str, right: str) -> tuple[str, Style]:
    if left == right:
        return ("█", Style(color=left)) if left else ("·", Style(dim=True))
    if left and right:
        return "▌", Style(color=left, bgcolor=right)
    return ("▌", Style(color=left)) if left else ("▐", Style(color=right))


# ---- beneath it ----


def _legend(shown: Shown, colors: bool) -> Text:
    line = Text()
    for kind, meaning in kinds(shown).items():
        for chunk in range(shown["chunks"]) if colors else ():
            color = shade(kind, chunk, shown["chunks"])
            line.append(f" {kind} ", style=Style(color=ink(color), bgcolor=color))
        line.append(f" {meaning}   " if colors else f"{kind} {meaning}; ")
    line.append("·" if colors else "· idle")
    line.append(" idle" if colors else "")
    if shown["chunks"] > 1:
        chunks = ", ".join(str(chunk) for chunk in range(shown["chunks"]))
        line.append(f"   shades: chunk {chunks}" if colors else "; F3.1: microbatch 3 on chunk 1, F3: on chunk 0")
    return line


def _stages(shown: Shown, width: int, colors: bool) -> Table:
    """For each stage: how busy it is, and what it holds."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage", no_wrap=True)
    table.add_column("busy", justify="right", no_wrap=True)
    table.add_column("peak in flight", justify="right", no_wrap=True)
    table.add_column(f"in flight over time, 0 to {max(shown['peak_in_flight'])}", no_wrap=True)
    room = max(10, min(72, width - 36))
    for stage, (busy, peak) in enumerate(zip(shown["busy_fraction"], shown["peak_in_flight"], strict=True)):
        spark = Text(sparkline(shown, stage, room), style="magenta" if colors else "")
        table.add_row(f"stage {stage}", share(busy), str(peak), spark)
    return table


def sparkline(shown: Shown, stage: int, columns: int) -> str:
    """The most that a stage holds in each of `columns` equal parts of the time, against the most of all stages."""
    highest, width = max(shown["peak_in_flight"]), shown["total_time"] / columns
    most = [0] * columns
    steps = shown["in_flight"][stage]
    for (time, held), (until, _) in zip(steps, [*steps[1:], (shown["total_time"], 0)], strict=True):
        first, last = int(time / width + 1e-9), math.ceil(until / width - 1e-9)
        for at in range(first, min(last, columns)):
            most[at] = max(most[at], held)
    return "".join(BARS[math.ceil(held * (len(BARS) - 1) / highest)] for held in most)
