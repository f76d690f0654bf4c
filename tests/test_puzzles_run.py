"""The puzzles' eight schedules (test_puzzles.py replays them in the simulator) on real arrays: each equals one device."""

import json
import subprocess
import sys

import pytest

PUZZLES = {
    "standard training": "data=1",
    "gradient accumulation": "data=1 microbatches=4",
    "DDP": "data=4",
    "weight-sharded data parallelism": "fsdp=4 zero=1",
    "FSDP": "fsdp=4",
    "pipeline": "pipe=4",
    "GPipe": "pipe=4 microbatches=4 schedule=gpipe",
    "pipeline and FSDP": "pipe=4 fsdp=4 schedule=gpipe",
    "1F1B": "pipe=4 microbatches=8",
}
"""The layout that does what each puzzle does: as many ranks, and (but for 8 layers, here as in most) as many batches."""


@pytest.mark.slow
@pytest.mark.ci
def test_the_puzzles_schedules_compute_what_one_device_computes():
    command = [sys.executable, "-m", "meshwright.cli.main", "verify", "llama-tiny", "--devices", "16", "--json"]
    done = subprocess.run(
        [*command, "--layouts", "; ".join(PUZZLES.values())], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {result["layout"]: result["verdict"] for result in json.loads(done.stdout)["results"]}
    assert found == dict.fromkeys(PUZZLES.values(), "equal")
