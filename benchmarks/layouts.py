"""CPU time of a training step on emulated layouts, as a ratio to one device with the same global batch.

    python benchmarks/layouts.py [--layouts "data=8; fsdp=8"] [--set model.layers=4] [--rounds 5] [--json]

The model is the tiny configuration of the comparisons (4 layers, D 256, F 1024, 8 heads of 32, V 1024, 8 x 256 tokens).
Layouts take turns, so that a noisy machine disturbs all alike; the figure is the median of the rounds.
"""

import argparse
import json
import resource
import statistics
from dataclasses import replace

from meshwright import mesh
from meshwright.config import ModelConfig, OptimConfig, RunConfig, TrainConfig, override, parse_layout

TINY = RunConfig(
    model=ModelConfig(layers=4, d_model=256, d_ff=1024, heads=8, kv_heads=8, head_size=32, vocab_size=1024),
    optim=OptimConfig(schedule="constant", lr=1e-3),
    train=TrainConfig(batch_sequences=8, sequence_length=256, loss_chunk_tokens=2048),
)
LAYOUTS = "data=1; data=8; fsdp=8; tensor=8; data=2 fsdp=2 tensor=2; fsdp=4 tensor=2"


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def batch_of(config: RunConfig, seed: int = 0) -> dict:
    import numpy as np

    b, t = config.train.sequences, config.train.sequence_length
    tokens = np.random.default_rng(seed).integers(0, config.model.vocab_size, (b, t + 1), np.int32)
    return {
        "tokens_BT": tokens[:, :-1],
        "targets_BT": tokens[:, 1:],
        "mask_BT": np.ones((b, t), bool),
        "segments_BT": np.ones((b, t), np.int32),
        "positions_BT": np.broadcast_to(np.arange(t, dtype=np.int32), (b, t)),
        "sample_B": np.arange(b, dtype=np.int32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    mesh.emulate(8)
    import jax

    from meshwright.layout import check
    from meshwright.train.state import Run
    from meshwright.train.step import objective_of, put_batch, train_step

    runs = {}
    for text in args.layouts.split(";"):
        config = override(replace(TINY, layout=parse_layout(text.strip())), args.set)
        layout = check(config)
        run = Run.of(config, layout, mesh.make(layout))
        batch = put_batch(run, batch_of(config), objective_of(run).batch_letters)
        start = cpu_s()
        state, metrics = train_step(run)(run.initial_state(), batch)
        jax.block_until_ready(metrics)
        runs[text.strip()] = {
            "step": train_step(run),
            "state": state,
            "batch": batch,
            "times": [],
            "first": cpu_s() - start,
        }
    for r in runs.values():
        r["state"], metrics = r["step"](r["state"], r["batch"])
        jax.block_until_ready(metrics)
    for _ in range(args.rounds):
        for r in runs.values():
            start = cpu_s()
            for _ in range(args.steps):
                r["state"], metrics = r["step"](r["state"], r["batch"])
                jax.block_until_ready(metrics)
            r["times"].append((cpu_s() - start) / args.steps)
    base = statistics.median(next(iter(runs.values()))["times"])
    rows = [
        {"layout": name, "cpu_s": statistics.median(r["times"]), "ratio": statistics.median(r["times"]) / base}
        for name, r in runs.items()
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['layout']:<28} {row['cpu_s']:.3f} CPU s a step   {row['ratio']:.2f}x of one device")


if __name__ == "__main__":
    main()
