"""Meshwright's own step as a peer of `cpu_step.py`: one device, float32, the same model and batch, clipping off.

python meshwright_step.py '{"layers": 4, "d_model": 256, ...}'
"""

import json
import sys
import time

from meshwright import mesh
from meshwright.config import LayoutConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig


def main() -> None:
    s = json.loads(sys.argv[1])
    mesh.emulate(1)
    import jax

    from layouts import batch_of
    from meshwright.layout import check
    from meshwright.train.state import Run
    from meshwright.train.step import objective_of, put_batch, train_step

    config = RunConfig(
        model=ModelConfig(
            layers=s["layers"],
            d_model=s["d_model"],
            d_ff=s["d_ff"],
            heads=s["heads"],
            kv_heads=s["heads"],
            head_size=s["head_size"],
            vocab_size=s["vocab_size"],
        ),
        optim=OptimConfig(schedule="constant", clip_norm=0),
        train=TrainConfig(batch_sequences=s["batch"], sequence_length=s["length"], loss_chunk_tokens=2048),
        layout=LayoutConfig(),
    )
    layout = check(config)
    run = Run.of(config, layout, mesh.make(layout))
    step, state = train_step(run), run.initial_state()
    batch = put_batch(run, batch_of(config), objective_of(run).batch_letters)
    for _ in range(2):
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
    print(json.dumps({"ready": True, "version": jax.__version__}), flush=True)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        state, metrics = step(state, batch)
        loss = float(metrics["loss"])
        jax.block_until_ready(state)
        used = {"cpu_s": time.process_time() - cpu, "step_s": time.perf_counter() - wall, "loss": loss}
        print(json.dumps(used), flush=True)


if __name__ == "__main__":
    main()
