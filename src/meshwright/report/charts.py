"""The charts of a run: plotly figures as plain data, one per quantity that the records hold."""

from typing import Any

from meshwright.report.records import Records, column

MAX_POINTS = 3000
"""A curve with more points is thinned evenly; the chart then says so."""


def charts(records: Records) -> list[dict[str, Any]]:
    """The charts in reading order: id, title, unit, note, traces, and a line of reference where there is one."""
    language = records.config.model.is_language_model
    unit = "nats per token" if language else "mean squared error"
    drawn = [_chart(records, "loss", "Loss", unit, "a step of training")]
    evaluations = _evaluations(records)
    if evaluations:
        trace = _trace([step for step, _ in evaluations], [loss for _, loss in evaluations], "held out", 1)
        drawn[0]["traces"].append(trace | {"mode": "lines+markers"})
    entropy = records.facts.get("unigram_entropy")
    if entropy is not None:
        drawn[0]["reference"] = {"value": entropy, "text": f"unigram entropy of the text, {entropy:.3f}"}
    emulated = "emulated: no cluster's speed" if records.facts.get("emulated") else ""
    drawn += [
        _chart(records, "lr", "Learning rate", "", "learning rate"),
        _chart(records, "grad_norm", "Gradient norm", "global, before clipping", "gradient norm"),
        _chart(records, "tokens_per_s", "Tokens a second", emulated, "tokens a second"),
        _chart(records, "mfu", "Model FLOPs utilisation", "share of the chips' peak", "MFU"),
    ]
    return [chart for chart in drawn if any(v is not None for trace in chart["traces"] for v in trace["y"])]


def _evaluations(records: Records) -> list[tuple[int, float | None]]:
    """Every evaluation as (step, loss): the one before training at step 0, those of metrics.jsonl, and the last."""
    recorded = zip((row["step"] for row in records.evaluations), column(records.evaluations, "eval_loss"), strict=True)
    before, after = records.facts.get("eval_loss_before"), records.facts.get("eval_loss")
    points = ({} if before is None else {0: before}) | dict(recorded)
    if after is not None and records.steps:
        points.setdefault(records.steps[-1]["step"], after)
    return sorted(points.items())


def _chart(records: Records, key: str, title: str, unit: str, name: str) -> dict[str, Any]:
    every = -(-len(records.steps) // MAX_POINTS) or 1
    rows = records.steps[::every]
    return {
        "id": key,
        "title": title,
        "unit": unit,
        "note": f"one step in {every} is drawn" if every > 1 else "",
        "traces": [_trace([row["step"] for row in rows], column(rows, key), name, 0)],
    }


def _trace(steps: list[int], values: list[float | None], name: str, color: int) -> dict[str, Any]:
    mode = "lines" if len(steps) > 1 else "markers"
    return {"type": "scatter", "mode": mode, "x": steps, "y": values, "name": name, "color": color}
