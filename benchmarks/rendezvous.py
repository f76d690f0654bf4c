"""When do emulated CPU devices starve a collective? Many runs in child processes, with few or many calls in flight.

XLA:CPU runs every device's program on shared pools of NPROC threads. A device that waits in a collective holds its thread;
where the last device finds none, nobody ever arrives and XLA ends the process. Each cell of the table below is the number
of runs that ended so. On 2 cores with jaxlib 0.10.2: all of them with more than 32 unfinished calls and fewer than two
threads for each device, none otherwise (`meshwright.mesh.emulate`).

    python benchmarks/rendezvous.py --devices 8 --threads 0,12,15,16,18 --in-flight 1,8,32,33,0 --runs 3
"""

import argparse
import json
import os
import subprocess
import sys
import time

LIMIT_S = 12
"""After how long XLA gives a collective up in these runs (by default 40 s)."""
FLAGS = (
    f"--xla_cpu_collective_call_terminate_timeout_seconds={LIMIT_S}"
    f" --xla_cpu_collective_call_warn_stuck_timeout_seconds={LIMIT_S - 2}"
    f" --xla_cpu_collective_timeout_seconds={LIMIT_S}"
)


def child(devices: int, calls: int, in_flight: int, program: str) -> None:
    """`calls` calls of a small step with gathers, matmuls and sums over several groups; at most `in_flight` unfinished."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    inner = 2 if devices % 2 == 0 else 1
    mesh = jax.make_mesh((devices // inner, inner), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
    spec = PartitionSpec(("a", "b"))

    def step(w_DF, x_BD):
        for _ in range(4):
            whole_DF = lax.all_gather(w_DF, ("a", "b"), tiled=True)
            y_BF = x_BD @ whole_DF
            x_BD = lax.psum(jnp.tanh(y_BF) / devices, "b") + lax.psum_scatter(
                lax.all_gather(x_BD, "a", tiled=True), "a", tiled=True
            )
            w_DF = w_DF + lax.psum_scatter(whole_DF / devices, ("a", "b"), tiled=True)
        return w_DF / (1 + jnp.abs(w_DF)), x_BD / (1 + jnp.abs(x_BD)), lax.psum(x_BD.sum(), ("a", "b"))

    inside = jax.shard_map(
        step, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec, PartitionSpec()), check_vma=False
    )
    jitted = jax.jit(inside, donate_argnums=(0, 1) if program == "donated" else ())
    put = lambda shape: jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))  # noqa: E731
    w_DF, x_BD = put((256, 256)), put((64 * devices, 256))
    jitted.lower(w_DF, x_BD).compile()
    waiting = []
    for _ in range(calls):
        w_new, x_new, total = jitted(w_DF, x_BD)
        if program != "independent":
            w_DF, x_BD = w_new, x_new
        waiting.append(total)
        if in_flight and len(waiting) >= in_flight:
            waiting.pop(0).block_until_ready()
    jax.block_until_ready((waiting, w_DF))
    print("done")


def run(devices: int, threads: int | None, in_flight: int, program: str, calls: int) -> tuple[bool, float]:
    """Whether one child came to its end, and how long it took in s."""
    environment = os.environ | {"XLA_FLAGS": FLAGS, "TF_CPP_MIN_LOG_LEVEL": "4"}
    environment.pop("NPROC", None)
    if threads:
        environment["NPROC"] = str(threads)
    words = [sys.executable, __file__, "--child", json.dumps([devices, calls, in_flight, program])]
    start = time.monotonic()
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180)
        good = done.stdout == "done\n"
        assert good or "endezvous" in done.stderr or done.returncode < 0, done.stderr[-2000:]
    except subprocess.TimeoutExpired:
        good = False
    return good, time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--child")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--threads", type=numbers, default=[0, 8, 9, 12, 16, 18, 24], help="NPROC; 0: not set")
    parser.add_argument(
        "--in-flight", type=numbers, default=[1, 2, 4, 0], help="unfinished calls allowed; 0: any number"
    )
    parser.add_argument("--programs", default="donated,chained,independent")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if args.child:
        return child(*json.loads(args.child))
    print(f"{args.devices} devices, {os.cpu_count()} cores, {args.calls} calls; runs of {args.runs} that starved")
    for program in args.programs.split(","):
        print(f"\n{program:>12}  " + "".join(f"in flight {n or 'any':>4}  " for n in args.in_flight))
        for threads in args.threads:
            print(f"{f'NPROC={threads}' if threads else 'not set':>12}  ", end="", flush=True)
            for in_flight in args.in_flight:
                runs = [run(args.devices, threads, in_flight, program, args.calls) for _ in range(args.runs)]
                print(f"{sum(not good for good, _ in runs):>8} {max(s for _, s in runs):4.0f} s ", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
