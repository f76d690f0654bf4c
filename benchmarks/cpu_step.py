"""CPU time of one training step: the best plain JAX step, PyTorch and the machine's own matmul rate, in one run.

Every peer is a process of its own that says `{"ready": true, ...}` once it has compiled and warmed up, then takes one
step for each line it reads and answers `{"cpu_s": ..., "step_s": ..., "loss": ...}`. The peers take turns, so that
what else the machine does falls on all of them; the figures are medians. CPU seconds count all threads. OpenMP's
threads (PyTorch) wait passively: spinning would count as CPU time, 2 to 7 times the step's own on a busy machine.

    python benchmarks/cpu_step.py --torch-python PATH    an interpreter that has torch and transformers
    python benchmarks/cpu_step.py --size 90m --heap default --json

`--heap kept` (default) has glibc keep freed memory, for every peer alike; `default` leaves it to hand 100s of MB back
to the system and fault them in again, every step. README.md says what that costs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SIZES = {
    "5m": dict(layers=4, d_model=256, d_ff=1024, heads=8, head_size=32, vocab_size=1024, batch=8, length=256),
    "90m": dict(layers=12, d_model=640, d_ff=2560, heads=10, head_size=64, vocab_size=8192, batch=8, length=256),
}
KEPT_HEAP = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in dict(mmap_max=0, trim_threshold=2**40, arena_max=1, hugetlb=1).items()
)
"""glibc's manual, "Memory Allocation Tunables"; in a program of ours the same is done by `mallopt` (mallopt(3))."""


def step_flops(s: dict[str, int]) -> dict[str, float]:
    """Multiplications and additions of one step by hand: 6 for each weight and token, 12 H N for each visible pair.

    `causal` counts the pairs that a query may see, T (T + 1) / 2; `square` counts T squared, as is usual for MFU
    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    width = s["heads"] * s["head_size"]
    weights = s["layers"] * (4 * s["d_model"] * width + 3 * s["d_model"] * s["d_ff"]) + s["d_model"] * s["vocab_size"]
    matmuls = 6 * s["batch"] * s["length"] * weights
    pair = 12 * s["layers"] * s["batch"] * width
    return {
        "causal": matmuls + pair * s["length"] * (s["length"] + 1) / 2,
        "square": matmuls + pair * s["length"] ** 2,
    }


class Peer:
    """A process that takes steps on request."""

    def __init__(self, command: list[str], heap: str):
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_WAIT_POLICY": "passive"}
        environment["GLIBC_TUNABLES"] = KEPT_HEAP if heap == "kept" else ""
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.about = self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[1]} ended with status {self.process.wait()}; its message is above")
        return json.loads(line)

    def ask(self, request: str) -> dict:
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self.read()


def start(size: dict[str, int], torch_python: str | None, heap: str) -> dict[str, Peer]:
    """Start the peers, one after another. A new peer is one more entry here."""
    commands = {"plain JAX": [sys.executable, str(HERE / "plain_jax.py"), json.dumps(size)]}
    commands["Meshwright"] = [sys.executable, str(HERE / "meshwright_step.py"), json.dumps(size)]
    if torch_python:
        with_kv = json.dumps(size | {"kv_heads": size["heads"]})
        commands["PyTorch"] = [torch_python, str(HERE / "pytorch_llama.py"), with_kv]
    return {name: Peer(command, heap) for name, command in commands.items()}


def measure(name: str, torch_python: str | None, heap: str, rounds: int) -> dict:
    """One size, all peers in turn: medians, ratios to plain JAX and shares of the matmul rate."""
    size = SIZES[name]
    peers = start(size, torch_python, heap)
    answers = {peer: [] for peer in peers}
    rates = []
    for _ in range(rounds):
        rates.append(peers["plain JAX"].ask("matmul")["flops_per_cpu_s"])
        for peer, process in peers.items():
            answers[peer].append(process.ask("step"))
    rate, flops = statistics.median(rates), step_flops(size)
    rows = {}
    for peer, process in peers.items():
        process.process.stdin.close()
        cpu_s = statistics.median(a["cpu_s"] for a in answers[peer])
        rows[peer] = process.about | {
            "cpu_s": cpu_s,
            "cpu_s_min": min(a["cpu_s"] for a in answers[peer]),
            "step_s": statistics.median(a["step_s"] for a in answers[peer]),
            "matmul_share_causal": flops["causal"] / rate / cpu_s,
            "matmul_share_square": flops["square"] / rate / cpu_s,
        }
    for row in rows.values():
        row["times_plain_jax"] = row["cpu_s"] / rows["plain JAX"]["cpu_s"]
    return {
        "size": name,
        **size,
        "heap": heap,
        "rounds": rounds,
        "flops": flops,
        "flops_per_cpu_s": rate,
        "peers": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all")
    parser.add_argument("--heap", choices=("kept", "default"), default="kept")
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    results = [
        measure(size, options.torch_python, options.heap, options.rounds) for size in options.size or list(SIZES)
    ]
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        rate, gflop = result["flops_per_cpu_s"] / 1e9, result["flops"]["causal"] / 1e9
        print(f"{result['size']}: {gflop:.1f} GFLOP a step, matmul {rate:.0f} GFLOP per CPU s, heap {result['heap']}")
        for peer, row in result["peers"].items():
            print(
                f"  {peer:10} {row['cpu_s']:.3f} CPU s (least {row['cpu_s_min']:.3f}), {row['step_s']:.3f} s,"
                f" {row['times_plain_jax']:.2f}x plain JAX, {row['matmul_share_causal']:.0%} of the matmul rate"
                f" ({row['matmul_share_square']:.0%} counting all T squared pairs)"
            )


if __name__ == "__main__":
    main()
