"""The page of a run, report.html: one file, drawn from the run's records alone, that opens offline.

Everything shown is in config.toml, metrics.jsonl or run.json; what is not recorded is left out, never guessed.
"""

import html
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.report import charts, layout_table, mesh
from meshwright.report.records import Records, column, median, read


def write(run_directory: Path) -> Path:
    """Write report.html into `run_directory` from the records there, in place of an older one; return its path."""
    path = Path(run_directory) / "report.html"
    unfinished = path.with_suffix(".html.tmp")
    unfinished.write_text(page(read(run_directory), Path(run_directory).name), encoding="utf-8")
    os.replace(unfinished, path)
    return path


def page(records: Records, name: str) -> str:
    """The whole page as text."""
    drawn = charts.charts(records)
    asset = resources.files("meshwright.report") / "page"
    sections = [
        _header(records, name),
        _summary(records),
        _section("Curves", _chart_places(drawn)),
        _section("Samples", _samples(records.facts.get("samples", []))),
        _section("Mesh", _mesh(records)),
        _section("Layout of the parameters", _layout_table(records.facts.get("layout_table", []))),
        _section("Data", _facts(records.facts.get("data"))),
        _section("Software", _facts(records.facts.get("versions"))),
        _section("Configuration", f"<pre>{_text(records.config_text)}</pre>"),
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(name)}, a run of Meshwright</title>",
            f"<style>{(asset / 'page.css').read_text(encoding='utf-8')}</style></head><body><main>",
            *(section for section in sections if section),
            "</main>",
            f'<script type="application/json" id="charts">{_json(drawn)}</script>',
            f"<script>{_plotly()}</script>" if drawn else "",
            f"<script>{(asset / 'page.js').read_text(encoding='utf-8')}</script>",
            "</body></html>",
        ]
    )


def _plotly() -> str:
    """Plotly's own script, so that the page needs no network."""
    return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _text(value: Any) -> str:
    return html.escape(str(value))


def _json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _header(records: Records, name: str) -> str:
    facts = records.facts
    devices = facts.get("devices")
    kind = " emulated" if facts.get("emulated") else ""
    on = f" on {devices}{kind} {'device' if devices == 1 else 'devices'}" if devices else ""
    return f"<header><h1>{_text(name)}</h1><p>layout <code>{_text(records.config.layout)}</code>{on}</p></header>"


def _summary(records: Records) -> str:
    facts, steps = records.facts, records.steps
    evaluation = facts.get("eval_loss", records.evaluations[-1]["eval_loss"] if records.evaluations else None)
    skipped = sum(bool(row.get("skipped")) for row in steps)
    cards = [
        ("parameters", _count(facts.get("parameters"))),
        ("steps", f"{steps[-1]['step']:,}" if steps else None),
        ("tokens a step", _count(steps[-1].get("tokens")) if steps else None),
        ("loss, last step", _loss(steps[-1].get("loss")) if steps else None),
        ("held-out loss before", _loss(facts.get("eval_loss_before"))),
        ("held-out loss after", _loss(evaluation)),
        ("unigram entropy", _loss(facts.get("unigram_entropy"))),
        ("tokens a second, median", _count(median(column(steps, "tokens_per_s")))),
        ("seconds a step, median", _loss(median(column(steps, "step_s")))),
        ("MFU, median", _share(median(column(steps, "mfu")))),
        ("steps skipped (not finite)", f"{skipped}" if skipped else None),
    ]
    shown = [f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>" for name, value in cards if value is not None]
    return f'<dl class="cards">{"".join(shown)}</dl>' if shown else ""


def _count(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _loss(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _chart_places(drawn: list[dict[str, Any]]) -> str:
    places = []
    for chart in drawn:
        unit = _text(", ".join(filter(None, (chart["unit"], chart["note"]))))
        caption = f"<figcaption>{_text(chart['title'])} <small>{unit}</small></figcaption>"
        places.append(f'<figure>{caption}<div id="chart-{chart["id"]}"></div></figure>')
    return f'<div class="charts">{"".join(places)}</div>' if places else ""


def _samples(samples: list[dict[str, Any]]) -> str:
    blocks = []
    for sample in samples:
        prompt, text = str(sample.get("prompt", "")), str(sample.get("text", ""))
        blocks.append(
            f"<figure><figcaption>{_text(sample.get('when', ''))} training</figcaption>"
            f'<pre><span class="prompt">{_text(prompt)}</span>{_text(text)}</pre></figure>'
        )
    return f'<div class="samples">{"".join(blocks)}</div>' if blocks else ""


def _mesh(records: Records) -> str:
    if "mesh" not in records.facts:
        return ""
    grid = mesh.from_json(records.facts["mesh"])
    lines = "".join(
        f'<li><b style="color:var(--axis-{axis})">{axis}</b> {degree}, {_text(link)}</li>'
        for axis, degree, link in mesh.links(grid)
    )
    return f"<p>{_text(mesh.label(grid))}</p>{mesh.to_svg(grid)}<ul class='links'>{lines}</ul>"


def _layout_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    body = []
    for row in rows:
        shape, shard = ("×".join(map(str, row[key])) for key in ("shape", "shard_shape"))
        cells = (
            row["name"],
            row["type"],
            shape,
            shard,
            layout_table.bytes_text(row["bytes_per_device"]),
            row["gradient"],
        )
        body.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    total = layout_table.bytes_text(sum(row["bytes_per_device"] for row in rows))
    heads = ("parameter", "layout", "shape", "shard", "bytes a device", "its gradient")
    head = "".join(f"<th>{name}</th>" for name in heads)
    foot = f"<tr><td>all parameters</td><td></td><td></td><td></td><td>{total}</td><td></td></tr>"
    return (
        f'<div class="scroll"><table class="layout"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody><tfoot>{foot}</tfoot></table></div>"
    )


def _facts(table: dict[str, Any] | None) -> str:
    if not table:
        return ""
    rows = "".join(f"<tr><th>{_text(key)}</th><td>{_text(_plain(value))}</td></tr>" for key, value in table.items())
    return f'<div class="scroll"><table class="facts">{rows}</table></div>'


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
