"""A pipeline schedule as a page of its own: one file that opens offline; the picture says more under the mouse."""

import html
from importlib import resources
from typing import Any

from meshwright.report.schedule import heading, sentences, share, text
from meshwright.report.schedule_svg import picture

MOST_CELLS = 20_000
"""A table with more cells is not written out."""

Shown = dict[str, Any]


def page(shown: Shown) -> str:
    """The whole page as text."""
    asset = resources.files("meshwright.report") / "page"
    style, own_style, script = (
        (asset / name).read_text(encoding="utf-8") for name in ("page.css", "schedule.css", "schedule.js")
    )
    name = html.escape(shown["schedule"])
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}, a pipeline schedule</title>",
            f"<style>{style}{own_style}</style></head><body><main>",
            f"<header><h1>{name}</h1><p>{html.escape(heading(shown))}</p></header>",
            _cards(shown),
            f"<p>{html.escape(sentences(shown)[0])}</p>",
            '<p class="hint">Point at an operation: what it waits for is outlined, and its microbatch stands out.'
            ' <label><input type="checkbox" id="fit"> fit the whole timeline into the window</label></p>',
            f'<div class="scroll picture">{picture(shown, titled=False, linked=True)}</div>',
            '<div id="tip" role="status" hidden></div>',
            "<section><h2>What it shows</h2>",
            *(f"<p>{html.escape(sentence)}</p>" for sentence in sentences(shown)[1:]),
            "</section>",
            f"<section><h2>Stages</h2>{_stages(shown)}</section>",
            f"<section><h2>The table</h2>{_table(shown)}</section>",
            f"</main><script>{script}</script></body></html>\n",
        ]
    )


def _cards(shown: Shown) -> str:
    run = shown["executor"]
    peak = max(shown["peak_in_flight"])
    most = f"{peak}" if shown["chunks"] == 1 else f"{peak} × 1/{shown['chunks']} stage"
    cards = [
        ("bubble", share(shown["bubble_fraction"])),
        ("time", text(shown["total_time"])),
        ("most in flight", most),
        ("bubble as one program runs it", share(run["bubble_fraction"])),
        ("time as one program runs it", text(run["total_time"])),
    ]
    return f'<dl class="cards">{"".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in cards)}</dl>'


def _stages(shown: Shown) -> str:
    rows = "".join(
        f"<tr><td>stage {stage}</td><td>{share(busy)}</td><td>{peak}</td></tr>"
        for stage, (busy, peak) in enumerate(zip(shown["busy_fraction"], shown["peak_in_flight"], strict=True))
    )
    head = "<tr><th>stage</th><th>busy</th><th>peak in flight</th></tr>"
    return f'<div class="scroll"><table class="stages"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _table(shown: Shown) -> str:
    """The schedule as text: a line for each tick, a column for each stage."""
    if shown["ticks"] * shown["stages"] > MOST_CELLS:
        return (
            f"<p>{shown['ticks']:,} ticks on {shown['stages']:,} stages: <code>--csv FILE</code> writes the table.</p>"
        )
    width = max((len(" ".join(ops)) for row in shown["table"] for ops in row), default=0) + 2
    width = max(width, len(f"stage {shown['stages'] - 1}") + 2)
    head = "tick".ljust(7) + "".join(f"stage {stage}".ljust(width) for stage in range(shown["stages"]))
    lines = [
        str(tick).ljust(7) + "".join((" ".join(ops) or "·").ljust(width) for ops in row)
        for tick, row in enumerate(shown["table"])
    ]
    text_ = "\n".join(line.rstrip() for line in (head, *lines))
    return f"<details><summary>tick by tick, as text</summary><pre>{text_}</pre></details>"
