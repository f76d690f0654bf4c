"""What a resumed run must share with the run it goes on with, and what may change.

The layout, the number of steps and what is shown or kept may change. Everything that the loss curve is a function of
may not: a resumed run is the same run.
"""

import json
from pathlib import Path
from typing import Any

from meshwright.config import Refused, RunConfig, flat, require

FREE = {
    "data": {"paths", "tokenizer"},  # their content counts: `require_same_data`
    "optim": {"offload"},
    "train": {
        "steps",
        "batch_sequences",  # with `batch_tokens`: `train.sequences` counts
        "batch_tokens",
        "remat",
        "loss_chunk_tokens",
        "eval_every",
        "eval_sequences",
        "checkpoint_every",
        "keep_checkpoints",
        "sample_prompt",
        "sample_tokens",
        "tensorboard",
    },
}
"""Settings that a resume may change, by section, besides all of [layout]."""


def differences(recorded: RunConfig, config: RunConfig) -> list[str]:
    """Each setting that must not change and does, as ``optim.lr is 0.001 there and 0.002 here``."""
    there, here = (_settings(one) for one in (recorded, config))
    return [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _settings(config: RunConfig) -> dict[str, Any]:
    batch = {"batch in sequences (train.batch_sequences or train.batch_tokens)": config.train.sequences}
    return batch | {name: value for name, value in flat(config).items() if not _is_free(name)}


def _is_free(name: str) -> bool:
    section, key = name.split(".", 1)
    return section == "layout" or key in FREE.get(section, ())


def require_same_run(directory: Path, recorded: RunConfig, config: RunConfig) -> None:
    """Refuse to go on with the run in `directory` under settings that would make it another run."""
    found = differences(recorded, config)
    require(
        not found,
        f"--resume: the run in {str(directory)!r} has other settings: {'; '.join(found[:4])}"
        f"{f'; and {len(found) - 4} more' if len(found) > 4 else ''}."
        " Layout, steps and what is shown or kept may change; for anything else start a new run",
    )


def require_same_data(directory: Path, data: dict[str, Any]) -> None:
    """Refuse to go on with text or a tokenizer other than the recorded ones; `data` is what is read now."""
    facts = recorded_facts(directory)
    there, here = facts.get("data") or {}, data
    if there.get("fingerprint") == here.get("fingerprint"):
        return
    sizes = f"{there.get('tokens'):,} tokens there and {here.get('tokens'):,} here" if there.get("tokens") else ""
    raise Refused(
        f"--resume: the data of the run in {str(directory)!r} are not those that are read now (data.paths,"
        f" data.tokenizer): fingerprint {str(there.get('fingerprint'))[:12]} there and"
        f" {str(here.get('fingerprint'))[:12]} here{', ' + sizes if sizes else ''}."
        " Give the same text and tokenizer, or start a new run"
    )


def recorded_facts(directory: Path) -> dict[str, Any]:
    """run.json of a run that is resumed; refused where it is missing or damaged."""
    path = directory / "run.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"--resume: {str(path)!r}, which says what data the run had, cannot be read: {error}") from None
    require(isinstance(facts, dict), f"--resume: {str(path)!r} is damaged: it holds no object")
    return facts
