"""A pipeline schedule as an SVG picture that stands alone: the timeline and, on the same time axis, what each stage holds.

Colours follow the reader's choice of light or dark. Every operation has a title, which viewers show under the mouse.
"""

import html
from dataclasses import dataclass
from importlib import resources
from typing import Any

from meshwright.report.schedule import bubble, heading, ink, kinds, memory, nice_times, shade, share, text

RIGHT = 92
LEGEND_HEIGHT = 22
LEAST_WIDTH, USUAL_WIDTH, MOST_WIDTH = 560, 1080, 6000
"""Of the time axis, in pixels."""
BOX_WIDTH, LEAST_BOX_WIDTH = 30, 15
"""Of the shortest operation, in pixels: where there is room, and where there is not."""
MANY_TRANSFERS = 400
DIGIT_WIDTHS = {"op": 6.6, "op small": 5.5}
CHARACTER_WIDTH = 6.4

Shown = dict[str, Any]


@dataclass(frozen=True)
class _Frame:
    """Where things stand, in pixels."""

    left: float
    """Of time 0."""
    top: float
    """Of the first stage's row."""
    per_unit: float
    box: float
    """The height of an operation."""
    pitch: float
    """From one stage's row to the next."""
    chart_top: float
    chart_pitch: float
    width: float
    height: float

    def x(self, time: float) -> float:
        return self.left + time * self.per_unit

    def y(self, stage: int) -> float:
        return self.top + stage * self.pitch

    def chart_y(self, stage: int) -> float:
        """The floor of a stage's step chart."""
        return self.chart_top + (stage + 1) * self.chart_pitch - 6


def picture(shown: Shown, *, titled: bool = True, linked: bool = False) -> str:
    """The picture as text.

    Args:
        titled: with the schedule's name and sizes above it.
        linked: with the names of operations and what they need in the elements, for the page's script.
    """
    words = _wrapped([bubble(shown), memory(shown)], shown) if titled else []
    frame = _frame(shown, 66 + 17 * len(words) if titled else 8)
    many = ' class="many"' if len(shown["transfers"]) > MANY_TRANSFERS else ""
    label = html.escape(f"Timeline of the pipeline schedule {shown['schedule']}: {heading(shown)}. {bubble(shown)}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="schedule" role="img" aria-label="{label}"'
        f' viewBox="0 0 {_n(frame.width)} {_n(frame.height)}" width="{_n(frame.width)}" height="{_n(frame.height)}">',
        f"<style>\n{_style()}\n{_colors(shown)}\n</style>",
        f"<defs>{_tip('F')}{_tip('B')}</defs>",
        f'<rect width="{_n(frame.width)}" height="{_n(frame.height)}" class="paper"/>',
        *(_title(shown, words) if titled else ()),
        *_legend(shown, frame.top - 40),
        *_axis(shown, frame),
        *(_track(shown, frame, stage) for stage in range(shown["stages"])),
        f"<g{many}>",
        *_transfers(shown, frame, linked, bool(many)),
        "</g>",
        *(_operation(shown, frame, event, linked) for event in shown["events"]),
        *_charts(shown, frame),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _frame(shown: Shown, above: float) -> _Frame:
    stages, total = shown["stages"], shown["total_time"]
    shortest = min(e["end"] - e["start"] for e in shown["events"])
    digits = len(str(shown["microbatches"] - 1))
    least = max(LEAST_BOX_WIDTH, DIGIT_WIDTHS["op"] * digits + 3)
    per_unit = max(min(BOX_WIDTH / shortest, USUAL_WIDTH / total), least / shortest)
    per_unit = max(min(per_unit, MOST_WIDTH / total), min(LEAST_WIDTH, 160 * len(shown["events"])) / total)
    box, pitch = (26, 44) if stages <= 8 else (20, 34)
    chart_pitch = 46 if stages <= 8 else 30
    top = above + LEGEND_HEIGHT + 40
    chart_top = top + stages * pitch - (pitch - box) + 52
    left = 22 + CHARACTER_WIDTH * len(f"stage {stages - 1}")
    width = left + max(total * per_unit, LEAST_WIDTH) + RIGHT
    return _Frame(left, top, per_unit, box, pitch, chart_top, chart_pitch, width, chart_top + stages * chart_pitch + 28)


def _tip(kind: str) -> str:
    """The head of an arrow."""
    place = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5.5" markerHeight="5.5" orient="auto"'
    return f'<marker id="tip{kind}" {place}><path d="M0 0.8L8 4L0 7.2z" class="tip{kind}"/></marker>'


def _wrapped(sentences: list[str], shown: Shown) -> list[str]:
    """Sentences in lines that are no wider than the picture."""
    frame = _frame(shown, 0)
    room, lines = int((min(frame.width, 1200) - 24) / CHARACTER_WIDTH), []
    for sentence in sentences:
        line = ""
        for word in sentence.split():
            if line and len(line) + 1 + len(word) > room:
                lines.append(line)
                line = ""
            line += (" " if line else "") + word
        lines.append(line)
    return lines


def _n(value: float) -> str:
    """A coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text(x: float, y: float, words: str, classes: str = "") -> str:
    kind = f' class="{classes}"' if classes else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{kind}>{html.escape(words)}</text>'


def _style() -> str:
    return (resources.files("meshwright.report") / "page" / "schedule_picture.css").read_text(encoding="utf-8").strip()


def _colors(shown: Shown) -> str:
    """A rule for each kind and chunk: the box and its number."""
    rules = []
    for kind in kinds(shown):
        for chunk in range(shown["chunks"]):
            color = shade(kind, chunk, shown["chunks"])
            rules.append(
                f".schedule .{kind}{chunk} rect {{ fill: {color}; }} .schedule .{kind}{chunk} text {{ fill: {ink(color)}; }}"
            )
    return "\n".join(rules)


def _title(shown: Shown, words: list[str]) -> list[str]:
    lines = [_text(12, 62 + 17 * number, line, "soft") for number, line in enumerate(words)]
    return [_text(12, 26, shown["schedule"], "title"), _text(12, 44, heading(shown)), *lines]


def _legend(shown: Shown, y: float) -> list[str]:
    parts, x = [], 12.0
    for kind, meaning in kinds(shown).items():
        for chunk in range(shown["chunks"]):
            box = f'<rect x="{_n(x)}" y="{_n(y - 12)}" width="22" height="16" rx="3"/>'
            parts.append(
                f'<g class="{kind}{chunk}">{box}<text x="{_n(x + 11)}" y="{_n(y)}" class="op">{kind}</text></g>'
            )
            x += 24
        parts.append(_text(x + 5, y, meaning))
        x += 5 + len(meaning) * CHARACTER_WIDTH + 16
    parts += [
        f'<rect x="{_n(x)}" y="{_n(y - 12)}" width="22" height="16" rx="3" class="idle"/>',
        _text(x + 28, y, "idle"),
    ]
    x += 28 + 40
    if shown["transfers"]:
        for kind in ("F", "B"):
            parts.append(f'<path d="M{_n(x)} {_n(y - 4)}h18" class="send send{kind}" marker-end="url(#tip{kind})"/>')
            x += 23
        parts.append(_text(x + 3, y, "transfer"))
        x += 3 + 66
    if shown["chunks"] > 1:
        parts.append(
            _text(x, y, "lighter: the stage's later chunk" if shown["chunks"] == 2 else "lighter: later chunks", "soft")
        )
    return parts


def _axis(shown: Shown, frame: _Frame) -> list[str]:
    """Lines at round times through timeline and charts, with the time above and below."""
    bottom, parts = frame.height - 28, []
    for time in nice_times(shown, max(1, int(shown["total_time"] * frame.per_unit / 70))):
        x = frame.x(time)
        parts.append(f'<path d="M{_n(x)} {_n(frame.top - 6)}V{_n(bottom)}" class="grid"/>')
        parts += [_text(x, y, text(time), "soft mid") for y in (frame.top - 11, bottom + 16)]
    return [_text(12, frame.top - 11, "time", "soft"), _text(12, bottom + 16, "time", "soft"), *parts]


def _track(shown: Shown, frame: _Frame, stage: int) -> str:
    """A stage's name, its idle time as one long box below its operations, and how busy it is."""
    y, end = frame.y(stage), frame.x(shown["total_time"])
    middle = y + frame.box / 2 + 4
    return (
        _name(frame, stage, y - (frame.pitch - frame.box) / 2, frame.pitch, middle)
        + f'<rect x="{_n(frame.left)}" y="{_n(y)}" width="{_n(end - frame.left)}" height="{_n(frame.box)}" rx="3" class="idle"/>'
        + _text(end + 10, middle, f"busy {share(shown['busy_fraction'][stage])}", "soft")
    )


def _name(frame: _Frame, stage: int, y: float, height: float, base: float) -> str:
    """A stage's name on paper, which the page keeps in view where the timeline is moved."""
    paper = f'<rect y="{_n(y)}" width="{_n(frame.left - 2)}" height="{_n(height)}" class="paper"/>'
    return f'<g class="name">{paper}{_text(12, base, f"stage {stage}")}</g>'


def _transfers(shown: Shown, frame: _Frame, linked: bool, many: bool) -> list[str]:
    """An arrow for each transfer, from the source when it leaves to the target when it arrives, a little into the boxes."""
    arrows = []
    made = {(e["stage"], e["op"]): (e["end"] - e["start"]) * frame.per_unit for e in shown["events"]}
    for t in shown["transfers"]:
        kind, aside = t["op"][0], min(4, made[t["source"], t["op"]] / 4)
        down = t["target"] > t["source"]
        y0 = frame.y(t["source"]) + (frame.box if down else 0)
        y1 = frame.y(t["target"]) + (0 if down else frame.box)
        names = f' data-from="{t["source"]}:{t["op"]}" data-to="{t["target"]}:{t["used_by"]}"' if linked else ""
        tip = "" if many else f' marker-end="url(#tip{kind})"'
        line = f"M{_n(frame.x(t['leave']) - aside)} {_n(y0)}L{_n(frame.x(t['arrive']) + aside)} {_n(y1)}"
        arrows.append(f'<path d="{line}" class="send send{kind}"{tip}{names}/>')
    return arrows


def _operation(shown: Shown, frame: _Frame, event: dict[str, Any], linked: bool) -> str:
    x, width = frame.x(event["start"]), (event["end"] - event["start"]) * frame.per_unit
    y, label = frame.y(event["stage"]), str(event["microbatch"])
    letters = next((letters for letters, digit in DIGIT_WIDTHS.items() if width >= digit * len(label) + 1), "")
    place = f'x="{_n(x + width / 2)}" y="{_n(y + frame.box / 2 + 4)}"'
    digits = f'<text {place} class="{letters}">{label}</text>' if letters else ""
    needs = " ".join(f"{need['stage']}:{need['op']}" for need in event["waits_for"])
    names = f' data-op="{event["stage"]}:{event["op"]}" data-needs="{needs}"' if linked else ""
    gap = min(1.0, width / 6)
    size, corner = f'width="{_n(width - gap)}" height="{_n(frame.box)}"', _n(min(3, width / 6))
    box = f'<rect x="{_n(x + gap / 2)}" y="{_n(y)}" {size} rx="{corner}"/>'
    return f'<g class="{event["kind"]}{event["chunk"]}"{names}><title>{title(shown, event)}</title>{box}{digits}</g>'


def title(shown: Shown, event: dict[str, Any]) -> str:
    """What stands under the mouse: the operation, its time, and what it waits for."""
    chunk = f", chunk {event['chunk']}" if shown["chunks"] > 1 else ""
    waits = [
        f"{need['op']} of {'the same stage' if need['stage'] == event['stage'] else 'stage ' + str(need['stage'])},"
        f" there at {text(need['there_at'])}"
        for need in event["waits_for"]
    ]
    return (
        f"{event['op']}: {kinds(shown)[event['kind']]}, microbatch {event['microbatch']}{chunk}\nstage {event['stage']}, from"
        f" {text(event['start'])} to {text(event['end'])}\nwaits for {'; '.join(waits) or 'nothing'}"
    )


def _charts(shown: Shown, frame: _Frame) -> list[str]:
    """For each stage, how many it holds over time: one step chart below the other, all to one scale."""
    most = max(shown["peak_in_flight"])
    unit = "chunks of microbatches" if shown["chunks"] > 1 else "microbatches"
    parts = [
        _text(12, frame.chart_top - 10, "In flight", "head"),
        _text(76, frame.chart_top - 10, f"{unit} whose activations a stage holds", "soft"),
    ]
    rise = (frame.chart_pitch - 12) / most
    for stage, steps in enumerate(shown["in_flight"]):
        floor, end = frame.chart_y(stage), frame.x(shown["total_time"])
        line = "".join(f"H{_n(frame.x(time))}V{_n(floor - held * rise)}" for time, held in steps)
        peak = floor - shown["peak_in_flight"][stage] * rise
        parts += [
            f'<path d="M{_n(frame.left)} {_n(floor)}H{_n(end)}" class="grid"/>',
            f'<path d="M{_n(frame.left)} {_n(floor)}{line}" class="held"/>',
            f'<path d="M{_n(frame.left)} {_n(peak)}H{_n(end)}" class="peak"/>',
            _name(frame, stage, floor + 6 - frame.chart_pitch, frame.chart_pitch, floor - 2),
            _text(end + 10, peak + 4, f"peak {shown['peak_in_flight'][stage]}", "soft"),
        ]
    return parts
