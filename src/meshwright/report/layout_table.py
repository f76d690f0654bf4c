"""The layout table: for every parameter, its letters and axes, one device's shard, and what moves its gradient."""

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.config import RunConfig
from meshwright.dims import ZERO_AXES
from meshwright.layout import Layout, Spec, letters_of, show
from meshwright.presets import parameter_names

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def rows(config: RunConfig) -> list[dict[str, Any]]:
    """One row a parameter: name, type, shape, shard_shape, bytes_per_device, gradient; V is padded as on devices."""
    layout = Layout(config.layout, config.model)
    dtype = config.train.param_dtype
    table = []
    for name in parameter_names(config.model):
        letters = letters_of(name)
        spec = layout.stored(letters)
        shard = layout.shard_shape(letters, spec)
        table.append(
            {
                "name": name,
                "type": show(dtype, letters, spec),
                "shape": list(layout.shape(letters)),
                "shard_shape": list(shard),
                "bytes_per_device": math.prod(shard) * DTYPE_BYTES[dtype],
                "gradient": gradient(layout, letters),
            }
        )
    return table


def stages(config: RunConfig) -> list[list[list[int]]]:
    """The layers of each pipeline stage and chunk; without a pipeline there are none to tell."""
    if config.layout.pipe == 1:
        return []
    return [[list(chunk) for chunk in own] for own in Layout(config.layout, config.model).stages.layers]


def gradient(layout: Layout, letters: str) -> str:
    """What is done with a parameter's gradient to make it whole, in words."""
    working = _axes(layout.working(letters))
    scattered = _axes(layout.updated(letters)) if layout.config.zero >= 2 else ()
    sums = layout.gradient_axes(letters)
    in_layer = [axis for axis in working if axis in ZERO_AXES]
    at_end = [axis for axis in sums if axis in scattered and axis not in working]
    whole = [axis for axis in sums if axis not in at_end]
    parts = [
        *([f"scatter-sum over {_names(in_layer)}, layer by layer"] if in_layer and "L" in letters else []),
        *([f"scatter-sum over {_names(in_layer)}"] if in_layer and "L" not in letters else []),
        *([f"scatter-sum over {_names(at_end)}"] if at_end else []),
        *([f"sum over {_names(whole)}"] if whole else []),
    ]
    return "; ".join(parts) or "already whole"


def _axes(spec: Spec) -> tuple[str, ...]:
    return tuple(axis for axes in spec for axis in axes)


def _names(axes: list[str]) -> str:
    return ", ".join(axes)


def draw(table: list[dict[str, Any]], layers: list[list[list[int]]] | None = None) -> RenderableType:
    """The table for the terminal: parameters by group, the bytes of all, what the gradients' marks mean, and `stages`."""
    marks = {moved: chr(ord("a") + i) for i, moved in enumerate(dict.fromkeys(row["gradient"] for row in table))}
    drawn = Table(box=None, pad_edge=False, header_style="bold", show_footer=True, footer_style="bold")
    total = sum(row["bytes_per_device"] for row in table)
    drawn.add_column("parameter", footer="all", no_wrap=True)
    drawn.add_column("layout", style="cyan", no_wrap=True)
    drawn.add_column("shape", justify="right", overflow="fold")
    drawn.add_column("shard", justify="right", overflow="fold")
    drawn.add_column("a device", justify="right", footer=bytes_text(total), no_wrap=True)
    drawn.add_column("grad", justify="center")
    group = None
    for row in table:
        above, _, name = row["name"].rpartition("/")
        if above != group:
            drawn.add_row(Text(above.rpartition("/")[2], style="bold"))
            group = above
        shapes = ("x".join(map(str, row[key])) for key in ("shape", "shard_shape"))
        drawn.add_row(
            f"  {name}", Text(row["type"]), *shapes, bytes_text(row["bytes_per_device"]), marks[row["gradient"]]
        )
    meaning = (Text(f"  gradient {mark}: {moved}") for moved, mark in marks.items())
    return Group(drawn, Text(), *meaning, *_drawn_stages(layers or []))


def _drawn_stages(layers: list[list[list[int]]]) -> list[Text]:
    """A line for each stage, and how many rows of every layer array a device has."""
    if not layers:
        return []
    counts = [sum(map(len, chunks)) for chunks in layers]
    rows = max(len(chunk) for chunks in layers for chunk in chunks) * len(layers[0])
    lines = [
        Text(f"  stage {stage}: {count} layer{'s' if count > 1 else ''}, {' and '.join(map(_span, chunks))}")
        for stage, (count, chunks) in enumerate(zip(counts, layers, strict=True))
    ]
    spare = ", some without a layer" if min(counts) < rows else ""
    return [Text(), *lines, Text(f"  a device holds {rows} rows of L{spare}")]


def _span(chunk: list[int]) -> str:
    return str(chunk[0]) if len(chunk) == 1 else f"{chunk[0]}-{chunk[-1]}"


def bytes_text(count: float) -> str:
    """A number of bytes in the largest unit that keeps it at 1 or more: 1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
