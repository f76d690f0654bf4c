"""A pipeline schedule as a trace for ui.perfetto.dev or chrome://tracing: a thread for each stage.

Source: Google, "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Complete
events X, flow events s and f, counters C, metadata M; `ts` and `dur` are in microseconds.
"""

import json
from collections.abc import Iterator
from typing import Any

from meshwright.report.schedule import heading, kinds, sentences

UNIT_US = 1000
"""One unit of time is shown as a millisecond."""
PROCESS = 1


def trace(shown: dict[str, Any]) -> str:
    """The trace as JSON text."""
    events = [*_names(shown), *_operations(shown), *_arrows(shown), *_held(shown)]
    about = {"schedule": heading(shown), "about": sentences(shown), "unit": "one unit of time is shown as 1 ms"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}) + "\n"


def _names(shown: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield _event("M", "process_name", 0, args={"name": f"{shown['schedule']}: {heading(shown)}"})
    for stage in range(shown["stages"]):
        yield _event("M", "thread_name", stage, args={"name": f"stage {stage}"})
        yield _event("M", "thread_sort_index", stage, args={"sort_index": stage})


def _operations(shown: dict[str, Any]) -> Iterator[dict[str, Any]]:
    meaning = kinds(shown)
    for e in shown["events"]:
        waits = ", ".join(f"{need['op']} of stage {need['stage']}" for need in e["waits_for"])
        args = {"microbatch": e["microbatch"], "chunk": e["chunk"], "waits for": waits or "nothing"}
        yield _event(
            "X", e["op"], e["stage"], e["start"], cat=meaning[e["kind"]], dur=_us(e["end"] - e["start"]), args=args
        )


def _arrows(shown: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """From the end of what makes a result to the start of what uses it, just inside both: an arrow binds to what runs there."""
    at = {(e["stage"], e["op"]): e for e in shown["events"]}
    for number, t in enumerate(shown["transfers"]):
        made, used = at[t["source"], t["op"]], at[t["target"], t["used_by"]]
        end = made["end"] - (made["end"] - made["start"]) / 1000
        start = used["start"] + (used["end"] - used["start"]) / 1000
        args = {"leaves": t["leave"], "arrives": t["arrive"]}
        yield _event("s", t["op"], t["source"], end, cat="transfer", id=number, args=args)
        yield _event("f", t["op"], t["target"], start, cat="transfer", id=number, bp="e")


def _held(shown: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for stage, steps in enumerate(shown["in_flight"]):
        for time, held in steps:
            yield _event("C", f"in flight, stage {stage}", stage, time, args={"held": held})


def _event(phase: str, name: str, stage: int, time: float = 0, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": PROCESS, "tid": stage, "ts": _us(time), **more}


def _us(time: float) -> float:
    return time * UNIT_US
