"""A pipeline schedule in time, as plain data: what `meshwright show schedule --json` prints and every picture is drawn from.

The drawings are in `schedule_text` (terminal), `schedule_svg`, `schedule_page` (HTML) and `schedule_trace` (Perfetto).
"""

import math
from fractions import Fraction
from typing import Any

from meshwright.schedules.pack import segments
from meshwright.schedules.simulate import Timeline, Times, Transfer, asynchronous, executor, executor_form
from meshwright.schedules.table import Op, Schedule

COLORS = {"F": ("#2f6fd0", "#a9c9f7"), "B": ("#e08a1e", "#f8d49b"), "W": ("#1f8f6f", "#a3ddc8")}
"""For each kind of operation, the colour of a stage's first chunk and of its last."""


def record(schedule: Schedule, times: Times, what: str, *, as_run: bool = False) -> dict[str, Any]:
    """Everything that is shown of `schedule`, as values that JSON has.

    Args:
        what: one phrase that says what the schedule is.
        as_run: show the form that the program runs, in the program's time, in place of the table with free-running stages.
    """
    form = executor_form(schedule, times)
    program = executor(form, times)
    timeline = program if as_run else asynchronous(schedule, times)
    shown = timeline.schedule
    whole = 0 if schedule.splits_backward else times.W
    return {
        "schedule": schedule.name,
        "what": what,
        "timeline": "executor" if as_run else "asynchronous",
        "stages": shown.stages,
        "microbatches": shown.microbatches,
        "chunks": shown.chunks,
        "placement": shown.placement,
        "splits_backward": shown.splits_backward,
        "times": {
            "F": number(times.F),
            "B": number(times.B + whole),
            "W": number(times.W) if shown.splits_backward else 0,
            "send": number(times.send),
        },
        "ticks": len(shown.table),
        "total_time": number(timeline.total),
        "bubble_fraction": number(timeline.bubble_fraction),
        "stage_bubble_fraction": number(timeline.stage_bubble_fraction),
        "busy_fraction": [number(busy / timeline.total) for busy in timeline.busy],
        "executor": {
            "ticks": len(form.table),
            "delay": form.delay,
            "operations_in_a_tick": max(len(ops) for row in form.table for ops in row),
            "loops": [{"first": s.first, "last": s.last, "kinds": list(s.kinds)} for s in segments(form)],
            "total_time": number(program.total),
            "bubble_fraction": number(program.bubble_fraction),
        },
        "peak_in_flight": list(timeline.peaks),
        "in_flight": [[[number(time), held] for time, held in steps] for steps in timeline.in_flight],
        "table": [[[str(op) for op in ops] for ops in row] for row in shown.table],
        "events": _events(timeline),
        "transfers": [
            {
                "op": str(transfer.op),
                "source": transfer.source,
                "target": transfer.target,
                "used_by": str(_user(shown, transfer)),
                "leave": number(transfer.leave),
                "arrive": number(transfer.arrive),
            }
            for transfer in timeline.transfers
        ],
    }


def _events(timeline: Timeline) -> list[dict[str, Any]]:
    """The operations of all stages, with what each waits for and when that is there."""
    schedule = timeline.schedule
    there_at = {(span.stage, span.stage, span.op): span.end for spans in timeline.spans for span in spans}
    there_at |= {(t.target, t.source, t.op): t.arrive for t in timeline.transfers}
    return [
        {
            "stage": stage,
            "op": str(op),
            "kind": op.kind,
            "microbatch": op.microbatch,
            "chunk": op.chunk,
            "start": number(start),
            "end": number(end),
            "waits_for": [
                {"stage": source, "op": str(need), "there_at": number(there_at[stage, source, need])}
                for source, need in schedule.needs(stage, op)
            ],
        }
        for spans in timeline.spans
        for stage, op, start, end in spans
    ]


def _user(schedule: Schedule, transfer: Transfer) -> Op:
    """The operation on the target that uses what is sent."""
    kind, microbatch, chunk = transfer.op
    place = schedule.position(transfer.source, chunk) + (1 if kind == "F" else -1)
    return Op(kind, microbatch, schedule.at(place)[1])


# ---- what the drawings share ----


def number(value: float | Fraction) -> int | float:
    """A number that JSON has: whole ones without a point."""
    return int(value) if value == int(value) else float(value)


def text(value: float) -> str:
    """A time for people: thousands apart, at most three places."""
    if value and abs(value) < 0.01:
        return f"{value:.3g}"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value:,}"


def share(value: float) -> str:
    return f"{value:.1%}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 'es' if word.endswith('ch') else 's'}"


def shade(kind: str, chunk: int, chunks: int) -> str:
    """The colour of an operation: the later the chunk, the lighter."""
    first, last = COLORS[kind]
    part = chunk / (chunks - 1) if chunks > 1 else 0
    mixed = (round(int(first[i : i + 2], 16) * (1 - part) + int(last[i : i + 2], 16) * part) for i in (1, 3, 5))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def ink(color: str) -> str:
    """Black or white, whichever is read better on `color` (its luminance by Rec. 709)."""
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#10151c" if 0.2126 * r + 0.7152 * g + 0.0722 * b > 128 else "#ffffff"


def nice_times(shown: dict[str, Any], most: int) -> list[float]:
    """At most about `most` times from 0 to the end, in steps of 1, 2 or 5 times a power of ten."""
    total = shown["total_time"]
    power = 10.0 ** math.floor(math.log10(total / most))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= total / most * (1 - 1e-9))
    times = (float(f"{i * step:.12g}") for i in range(int(total / step * (1 + 1e-9)) + 1))
    return [int(time) if time == int(time) else time for time in times]


# ---- in words ----


def kinds(shown: dict[str, Any]) -> dict[str, str]:
    """What each kind of operation is, in this schedule."""
    if shown["splits_backward"]:
        return {"F": "forward", "B": "backward (of the input)", "W": "backward (of the weights)"}
    return {"F": "forward", "B": "backward"}


def heading(shown: dict[str, Any]) -> str:
    """The sizes and the time of each operation."""
    chunks = f" of {plural(shown['chunks'], 'chunk')}" if shown["chunks"] > 1 else ""
    placed = ", placed as a V" if shown["placement"] == "v" else ""
    times = ", ".join(f"{kind} {text(shown['times'][kind])}" for kind in (*kinds(shown), "send"))
    of = " (of one chunk)" if shown["chunks"] > 1 else ""
    sizes = f"{plural(shown['stages'], 'stage')}{chunks}{placed}, {plural(shown['microbatches'], 'microbatch')}"
    run = f"; as one program runs it, in {plural(shown['ticks'], 'tick')}" if shown["timeline"] == "executor" else ""
    return f"{sizes}; times{of}: {times}{run}"


def sentences(shown: dict[str, Any]) -> list[str]:
    """What the picture shows, in words: the same in the terminal, beside the picture and on the page."""
    return [about(shown), bubble(shown), memory(shown), program(shown)]


def about(shown: dict[str, Any]) -> str:
    return f"{shown['schedule']}: {shown['what']}."


def bubble(shown: dict[str, Any]) -> str:
    total, lost = shown["total_time"], shown["bubble_fraction"]
    if not lost:
        return "Bubble 0.0%: no stage ever waits."
    inside = shown["stage_bubble_fraction"]
    papers = (
        f" From a stage's first operation to its last it is {share(inside)}, which zero-bubble papers count: there the next step"
        " begins on a stage as soon as it is done."
        if abs(inside - lost) > 0.0005
        else ""
    )
    why = "what it needs next is still on other stages"
    if shown["timeline"] == "executor":
        why += ", or its neighbours' tick takes longer"
    return (
        f"Bubble {share(lost)}: of {text(total)} units of time a stage stands idle for {text(float(total * lost))} on average,"
        f" because {why}; more microbatches make the share smaller.{papers}"
    )


def memory(shown: dict[str, Any]) -> str:
    peaks, chunks = shown["peak_in_flight"], shown["chunks"]
    most = max(peaks)
    part = f"chunks of microbatches, each 1/{chunks} of what a stage keeps of one" if chunks > 1 else "microbatches"
    stages = [stage for stage, peak in enumerate(peaks) if peak == most]
    where = "every stage" if len(stages) == len(peaks) else "stage " + ", ".join(map(str, stages[:4]))
    where += " and others" if len(peaks) > len(stages) > 4 else ""
    return (
        f"In flight at most {most} ({where}): {part}, whose forward pass is begun and whose backward pass is not done, so that"
        " their activations are in memory."
    )


def program(shown: dict[str, Any]) -> str:
    run = shown["executor"]
    several = run["operations_in_a_tick"]
    per_tick = "one operation" if several == 1 else f"up to {several} operations"
    slack = "; what is sent travels beside the next tick" if run["delay"] > 1 else ""
    own = "as drawn" if shown["timeline"] == "executor" else "not drawn"
    coupled = "; neighbours wait for each other in every tick, so it" if shown["stages"] > 1 else "; it"
    return (
        f"As one program runs it ({own}): {plural(run['ticks'], 'tick')} of {per_tick} a stage{slack}{coupled}"
        f" takes {text(run['total_time'])}, bubble {share(run['bubble_fraction'])}."
    )
