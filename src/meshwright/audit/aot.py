"""Compile the very step of a run for devices that are not there, in a process of its own.

A compiler that aborts takes its process with it, and the TPU compiler reads its environment once: so each compile is a
child process (`audit.program`), and this one imports no JAX.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshwright.audit.target import Target, require_compiler
from meshwright.config import RunConfig, to_toml

COMMAND = (sys.executable, "-m", "meshwright.audit.program")
LINES_SHOWN = 12


def compile_step(config: RunConfig, target: Target, text: Path | None = None) -> dict[str, Any]:
    """Facts of the compiled step: bytes of one device, seconds, versions, and a verdict in `verdict`.

    `verdict` is "fits", "does not fit" (peak_bytes above hbm_bytes, or the compiler ran out of memory) or "failed" (the
    compiler stopped; its last lines are in `reason`). `text`: where the compiled program's text is written. The caller
    has checked the layout. Refuses where the target's compiler is not installed.
    """
    require_compiler(target)
    facts: dict[str, Any] = {"target": target.text, "layout": str(config.layout), "devices": target.device_count}
    if math.isfinite(target.kind.hbm_bytes):
        facts["hbm_bytes"] = int(target.kind.hbm_bytes)
    return facts | _run(config, target, text)


def _run(config: RunConfig, target: Target, text: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "facts.json"
        request = {"config": to_toml(config), "target": target.text, "text": str(text.absolute()) if text else None}
        child = subprocess.run(
            [*COMMAND, str(answer)],
            input=json.dumps(request),
            text=True,
            capture_output=True,
            env={**os.environ, **target.environment()},
            check=False,
        )
        if child.returncode == 0 and answer.exists():
            facts = json.loads(answer.read_text(encoding="utf-8"))
            return facts | {"verdict": _verdict(facts["peak_bytes"], target)}
    said = [line for line in (child.stderr + child.stdout).splitlines() if line.strip()]
    memory = next((line for line in said if "RESOURCE_EXHAUSTED" in line or "Ran out of memory" in line), None)
    if memory:
        return {"verdict": "does not fit", "reason": memory.strip()}
    died = f"the compiler's process ended with status {child.returncode}"
    return {"verdict": "failed", "reason": "\n".join([died, *said[-LINES_SHOWN:]])}


def _verdict(peak_bytes: int | None, target: Target) -> str:
    return "fits" if peak_bytes is None or peak_bytes <= target.kind.hbm_bytes else "does not fit"
