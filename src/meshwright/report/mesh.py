"""The mesh, drawn: which device stands where, which axis joins it with which, and which links are fast.

The last live axis runs along a row, the one before it down the rows, and every further axis makes blocks. Axes are
listed slowest link first, so a row's neighbours share the fastest links.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.config import LayoutConfig, require
from meshwright.dims import AXES

COLORS = {"pipe": "magenta", "data": "yellow", "fsdp": "blue", "expert": "red", "context": "green", "tensor": "cyan"}
MAX_DEVICES = 256
"""More devices than this are described, not drawn."""
MOST_DEVICES = 2**17
"""More devices than this are refused: no machine has them."""


@dataclass(frozen=True)
class Block:
    """Devices that differ only in the last two live axes."""

    place: tuple[tuple[str, int], ...]
    """The block's index on every further axis."""
    ids: tuple[tuple[int, ...], ...]
    """Device ids, [row][column]."""
    first_column: int = 0
    """The index of the first column on the last live axis: above 0 in a piece of a wide block."""


@dataclass(frozen=True)
class Grid:
    """A mesh ready to draw."""

    degrees: tuple[tuple[str, int], ...]
    """The live axes, slowest link first."""
    blocks: tuple[Block, ...]
    emulated: bool

    @property
    def column_axis(self) -> str | None:
        return self.degrees[-1][0] if self.degrees else None

    @property
    def row_axis(self) -> str | None:
        return self.degrees[-2][0] if len(self.degrees) > 1 else None

    @property
    def device_count(self) -> int:
        return math.prod(degree for _, degree in self.degrees)


def grid(degrees: Mapping[str, int], ids: Sequence[int] | None = None, *, emulated: bool = True) -> Grid:
    """Lay out the mesh of `degrees`; `ids`: device ids in mesh order (default: 0, 1, 2, ..., as emulated ones have)."""
    live = tuple((axis, degrees[axis]) for axis in AXES if degrees[axis] > 1)
    count = math.prod(degree for _, degree in live)
    order = list(range(count) if ids is None else ids)
    assert len(order) == count
    rows, columns = (1, 1, *(degree for _, degree in live))[-2:]
    further = live[:-2]
    blocks = []
    for number, place in enumerate(itertools.product(*(range(degree) for _, degree in further))):
        start = number * rows * columns
        ids_of = tuple(tuple(order[start + r * columns : start + (r + 1) * columns]) for r in range(rows))
        names = tuple((axis, index) for (axis, _), index in zip(further, place, strict=True))
        blocks.append(Block(names, ids_of))
    return Grid(live, tuple(blocks), emulated)


def check_devices(layout: LayoutConfig, devices: int | None) -> None:
    """Refuse a device count that is not the layout's, where no model is given that could be checked as well."""
    require(
        layout.device_count <= MOST_DEVICES,
        f"layout '{layout}' needs {layout.device_count:,} devices; a mesh of at most {MOST_DEVICES:,} can be shown",
    )
    require(
        devices in (None, layout.device_count),
        f"layout '{layout}' needs {layout.device_count} devices, but --devices is {devices}",
    )


def links(grid: Grid) -> list[tuple[str, int, str]]:
    """For every live axis, fastest first: its name, its degree, and what its link is."""
    names = [axis for axis, _ in grid.degrees]
    described = []
    for axis, degree in reversed(grid.degrees):
        first, last = axis == names[-1], axis == names[0]
        where = "fastest: neighbouring devices" if first else "slowest: farthest apart" if last else "between"
        described.append((axis, degree, "the only axis" if len(names) == 1 else where))
    return described


def label(grid: Grid) -> str:
    """What kind of devices these are, in words that keep emulation visible."""
    count = f"{grid.device_count} {'device' if grid.device_count == 1 else 'devices'}"
    if grid.emulated:
        return f"{count}, emulated: they share this machine's cores and memory"
    return count


def to_json(grid: Grid) -> dict[str, Any]:
    """The grid as plain values: the same facts that the drawing shows."""
    return {
        "axes": dict(grid.degrees),
        "device_count": grid.device_count,
        "emulated": grid.emulated,
        "blocks": [{"place": dict(block.place), "ids": [list(row) for row in block.ids]} for block in grid.blocks],
        "links": [{"axis": axis, "degree": degree, "link": link} for axis, degree, link in links(grid)],
    }


def from_json(table: Mapping[str, Any]) -> Grid:
    """The inverse of `to_json`."""
    blocks = tuple(
        Block(tuple(block["place"].items()), tuple(tuple(row) for row in block["ids"])) for block in table["blocks"]
    )
    return Grid(tuple(table["axes"].items()), blocks, bool(table["emulated"]))


def draw(grid: Grid) -> RenderableType:
    """The mesh as a drawing for the terminal, at most 80 columns wide; blocks stand side by side where they fit."""
    title = Text("mesh  ", style="bold")
    title.append(" x ".join(f"{axis}={degree}" for axis, degree in grid.degrees) or "one device", style="bold")
    parts: list[RenderableType] = [title, Text(label(grid), style="dim"), Text()]
    if grid.device_count <= MAX_DEVICES:
        most = 60 // (5 + len(str(grid.device_count - 1)))
        for row_of_blocks in _rows([_block(grid, piece) for block in grid.blocks for piece in _pieces(block, most)]):
            parts.extend(row_of_blocks)
            parts.append(Text())
    parts.extend(_legend(grid))
    return Group(*parts)


def _pieces(block: Block, most: int) -> list[Block]:
    """`block` cut into pieces of at most `most` columns."""
    columns = len(block.ids[0])
    return [
        Block(block.place, tuple(row[start : start + most] for row in block.ids), start)
        for start in range(0, columns, most)
    ]


def _block(grid: Grid, block: Block) -> list[Text]:
    """One block as lines of text of equal length."""
    width = max(2, len(str(grid.device_count - 1)))
    row_name = f"{grid.row_axis} " if grid.row_axis else ""
    margin = len(row_name) + len(str(len(block.ids))) + 1 if grid.row_axis else 0
    column, row = (COLORS.get(a or "", "") for a in (grid.column_axis, grid.row_axis))
    lines = [Text(" ".join(f"{axis} {index}" for axis, index in block.place))] if block.place else []
    if lines:
        lines[0].stylize(COLORS[block.place[-1][0]])
    if grid.column_axis:
        head = Text(" " * margin)
        head.append(f"{grid.column_axis} ".ljust(0), style=column)
        head = Text(" " * margin) + Text(
            (" " * 3).join(str(block.first_column + c).center(width + 2) for c in range(len(block.ids[0]))),
            style=column,
        )
        lines += [Text(" " * margin + f" {grid.column_axis}", style=column), head]
    for r, ids in enumerate(block.ids):
        line = Text(f"{row_name}{r}".ljust(margin) if grid.row_axis else "", style=row)
        for c, device in enumerate(ids):
            line.append("═══" if c else "", style=column)
            line.append(f"[{device:>{width}}]", style="bold")
        lines.append(line)
        if r + 1 < len(block.ids):
            bars = (" " * 3).join("│".center(width + 2) for _ in ids)
            lines.append(Text(" " * margin + bars, style=row))
    length = max(line.cell_len for line in lines)
    for line in lines:
        line.pad_right(length - line.cell_len)
    return lines


def _rows(blocks: list[list[Text]], columns: int = 78, gap: int = 5) -> list[list[Text]]:
    """Put blocks side by side, as many as fit into `columns`."""
    width = blocks[0][0].cell_len
    beside = max(1, (columns + gap) // (width + gap))
    rows = []
    for start in range(0, len(blocks), beside):
        group = blocks[start : start + beside]
        lines = []
        for pieces in zip(*group, strict=True):
            line = Text("  ")
            for number, piece in enumerate(pieces):
                line.append(" " * gap if number else "")
                line.append_text(piece)
            lines.append(line)
        rows.append(lines)
    return rows


def _legend(grid: Grid) -> list[Text]:
    marks = {grid.column_axis: "═══", grid.row_axis: " │ "}
    lines = []
    for axis, degree, link in links(grid):
        line = Text("  ")
        line.append(marks.get(axis, "   ") + " ", style=COLORS[axis])
        line.append(f"{axis:<8}", style=COLORS[axis])
        line.append(f"{degree:>4}  {link}")
        lines.append(line)
    if grid.emulated and len(grid.degrees) > 1:
        lines.append(
            Text("  (emulated, all links are equal; on a cluster they are laid out in this order)", style="dim")
        )
    return lines


def to_svg(grid: Grid) -> str:
    """The mesh as an SVG picture for the report; its colours are the page's variables --axis-NAME."""
    if grid.device_count > MAX_DEVICES:
        return ""
    cell, step, top, left = 34, 62, 46, 74
    pieces = [piece for block in grid.blocks for piece in _pieces(block, 12)]
    rows, most = len(pieces[0].ids), len(pieces[0].ids[0])
    width, height = left + most * step, top + rows * step
    beside = min(len(pieces), max(1, 900 // width))
    parts = []
    for number, block in enumerate(pieces):
        x0, y0, columns = number % beside * width, number // beside * height, len(block.ids[0])
        if block.place:
            parts.append(_svg_text(x0 + 4, y0 + 14, " ".join(f"{a} {i}" for a, i in block.place), grid.degrees[0][0]))
        for r, c in itertools.product(range(rows), range(columns)):
            x, y = x0 + left + c * step, y0 + top + r * step
            middle_x, middle_y = x + cell / 2, y + cell / 2
            if c + 1 < columns:
                parts.append(_svg_line(x + cell, middle_y, x + step, middle_y, grid.column_axis, 4))
            if r + 1 < rows:
                parts.append(_svg_line(middle_x, y + cell, middle_x, y + step, grid.row_axis, 2))
            if r == 0 and grid.column_axis:
                parts.append(_svg_text(x, y - 8, f"{grid.column_axis} {block.first_column + c}", grid.column_axis))
            if c == 0 and grid.row_axis:
                parts.append(_svg_text(x0 + 4, middle_y + 4, f"{grid.row_axis} {r}", grid.row_axis))
            parts.append(f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" rx="6" class="device"/>')
            parts.append(f'<text x="{middle_x}" y="{middle_y + 5}" class="device-id">{block.ids[r][c]}</text>')
    size = f'viewBox="0 0 {beside * width} {-(-len(pieces) // beside) * height}" width="{beside * width}"'
    return f'<svg {size} class="mesh" role="img" aria-label="mesh of devices">{"".join(parts)}</svg>'


def _svg_line(x1: float, y1: float, x2: float, y2: float, axis: str | None, thickness: int) -> str:
    style = f"stroke:var(--axis-{axis});stroke-width:{thickness}"
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" style="{style}"/>'


def _svg_text(x: float, y: float, text: str, axis: str | None) -> str:
    return f'<text x="{x}" y="{y}" style="fill:var(--axis-{axis})">{text}</text>'
