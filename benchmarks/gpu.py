"""One GPU, one run: Meshwright's training step beside a plain JAX step of the same model, and the parts it is made of.

    python benchmarks/gpu.py [--budget-s 330] [--json FILE] [--lengths 4096,8192] [--tokens 32768]

Llama-3.2-1B by default, real vocabulary, bfloat16 compute on float32 weights, AdamW. Needs `jax[cuda12]` or `jax[cuda13]`
(0.11 to 0.12) and optax, nothing installed of this project: it reads src/ beside it. The steps take turns; times are
medians after warm-up. MFU is against the bfloat16 matmul rate of this run and against the chip's published peak, counting
the pairs that a causal query sees (and, as is usual, all pairs). Whatever fails is written down and the rest goes on;
after `--budget-s` it stops with what it has. `--tiny` runs all of it on CPU, to test the script.
"""

import argparse
import copy
import gc
import importlib.util
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
BEGAN = time.monotonic()

TINY = (
    "model.layers=2",
    "model.d_model=64",
    "model.d_ff=128",
    "model.heads=4",
    "model.kv_heads=2",
    "model.head_size=16",
    "model.vocab_size=1000",
)
TRIES = (
    # remat of ours, and of plain JAX its loss chunk (0: whole logits) and whether layers are made again
    ("none", {"loss_chunk_tokens": 0}),
    ("save:q,k,v,attention,attention_out,gate,up", {"loss_chunk_tokens": 8192}),
    ("full", {"loss_chunk_tokens": 8192, "remat": True}),
)
"""From the fastest to the one that needs the least memory; the first that fits is taken. Peaks of a step of Llama-3.2-1B
and 32,768 tokens, compiled ahead of time for H200 (JAX 0.12.0): ours 65, 54 and 29 GB, plain JAX 91, 66 and 31 GB."""


class Report:
    """What is known so far; printed and written once, at the end or when the time is over."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.facts, self.lock, self.done = options, {"parts": {}}, threading.Lock(), False

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)

    def left_s(self) -> float:
        return self.options.budget_s - (time.monotonic() - BEGAN)

    def part(self, name: str, work: Callable[[dict[str, Any]], None], needs_s: float = 0.0) -> dict[str, Any]:
        """Do a part of the run. Its facts, its failure or the want of time are kept, and the next part follows."""
        facts: dict[str, Any] = {}
        self.facts["parts"][name] = facts
        began = time.monotonic()
        try:
            self.require_s(needs_s)
            self.say(f"{name} ...")
            work(facts)
        except TimeoutError as short:
            facts["skipped"] = str(short)
            self.say(f"{name}: left out, {short}")
        except Exception as error:
            facts["error"] = f"{type(error).__name__}: {str(error)[:2000]}"
            facts["at"] = [
                f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:]
            ]
            self.say(f"{name}: {facts['error'][:400]} at {' '.join(facts['at'])}")
        facts["part_s"] = round(time.monotonic() - began, 2)
        gc.collect()  # the steps and states of this part
        return facts

    def require_s(self, needs_s: float) -> None:
        if self.left_s() < needs_s:
            raise TimeoutError(f"{self.left_s():.0f} s are left and about {needs_s:.0f} s are needed")

    def finish(self, why: str) -> None:
        with self.lock:
            if self.done:
                return
            self.done = True
            self.facts |= {"ended": why, "total_s": round(time.monotonic() - BEGAN, 1)}
            text = json.dumps(self.settled(), indent=1, default=str)
        self.say(why)
        for line in summary(self.facts):
            print(line, flush=True)
        if self.options.json:
            Path(self.options.json).write_text(text + "\n", encoding="utf-8")
            print(f"written: {self.options.json}", flush=True)

    def status(self) -> int:
        """0 where a step was measured, else 1."""
        return 0 if any("meshwright" in part for part in self.facts["parts"].values()) else 1

    def settled(self) -> dict[str, Any]:
        """A copy of the facts, which the main thread may be changing."""
        for _ in range(100):
            try:
                self.facts = copy.deepcopy(self.facts)
                break
            except RuntimeError:
                time.sleep(0.01)
        return self.facts

    def stop_at_the_end_of_the_budget(self) -> None:
        def stop() -> None:
            self.finish(f"stopped: the budget of {self.options.budget_s:.0f} s is over")
            os._exit(self.status())

        timer = threading.Timer(self.left_s(), stop)
        timer.daemon = True
        timer.start()


def median_s(run: Callable[[], Any], rounds: int, warm: int = 2) -> float:
    """Median seconds of one run, each waited for; `warm` runs before them do not count."""
    import jax

    times = []
    for i in range(warm + rounds):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times += [time.perf_counter() - began] if i >= warm else []
    return statistics.median(times)


# ---- the parts -------------------------------------------------------------------------------------------


def matmul_rate(report: Report, facts: dict[str, Any]) -> None:
    """FLOP/s of square bfloat16 matmuls, several in a row so that the clock is what a step sees; the best size counts."""
    import jax
    import jax.numpy as jnp

    options = report.options
    rates = facts["flops_per_s_by_size"] = {}
    for n in (256,) if options.tiny else (4096, 8192, 16384):
        count = max(1, round(8192**3 * 40 / n**3)) if not options.tiny else 2

        @jax.jit
        def chain(a, b, count=count):
            return jax.lax.fori_loop(0, count, lambda _, x: (x @ b).astype(x.dtype), a)

        a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) * n**-0.5 for i in range(2))
        rates[n] = 2 * n**3 * count / median_s(lambda: chain(a, b), rounds=5)  # noqa: B023 (used at once)
        facts["flops_per_s"] = max(rates.values())
    report.say(f"  {facts['flops_per_s'] / 1e12:.1f} TFLOP/s")


def batch_of(vocab: int, b: int, t: int, documents: int = 1) -> dict[str, Any]:
    """Tokens as frequent as words are (Zipf), so that a look-up's gradient meets the same rows often; even documents."""
    import numpy as np

    random = np.random.default_rng(0)
    ranks = np.minimum(random.zipf(1.2, (b, t + 1)) - 1, vocab - 1)
    tokens = random.permutation(vocab).astype(np.int32)[ranks]
    place_BT = np.broadcast_to(np.arange(t, dtype=np.int32), (b, t))
    own = -(-t // documents)
    return {
        "tokens_BT": tokens[:, :-1],
        "targets_BT": tokens[:, 1:],
        "mask_BT": np.ones((b, t), bool),
        "segments_BT": place_BT // own + 1,
        "positions_BT": place_BT % own,
        "sample_B": np.arange(b, dtype=np.int32),
    }


class Peer:
    """A compiled step and its state, which is replaced by each step; it has taken three steps when it is made."""

    def __init__(self, facts: dict[str, Any], step: Any, state: Any, arguments: tuple[Any, ...], loss: Callable):
        self.facts, self.step, self.state, self.arguments, self.loss = facts, step, state, arguments, loss
        self.losses = [self() for _ in range(3)]

    def __call__(self) -> float:
        self.state, out = self.step(self.state, *self.arguments)
        return float(self.loss(out))  # waits for the step

    def two_steps(self) -> float:
        """Seconds of a step, of two handed over together, so that the host's work is hidden."""
        began = time.perf_counter()
        self.state, _ = self.step(self.state, *self.arguments)
        self()
        return (time.perf_counter() - began) / 2


def compiled(jitted: Any, *arguments: Any) -> tuple[Any, dict[str, Any]]:
    began = time.perf_counter()
    program = jitted.lower(*arguments).compile()
    memory = program.memory_analysis()
    peak = getattr(memory, "peak_memory_in_bytes", None) or memory.temp_size_in_bytes + memory.argument_size_in_bytes
    return program, {"compile_s": round(time.perf_counter() - began, 1), "peak_bytes": peak}


def configuration(options: argparse.Namespace, length: int, remat: str) -> Any:
    from meshwright.config import override
    from meshwright.presets import resolve

    settings = [
        f"train.batch_sequences={max(1, options.tokens // length)}",
        f"train.sequence_length={length}",
        f"train.remat={remat}",
        "train.compute_dtype=bfloat16",
        "train.loss_chunk_tokens=8192",
        "data.packing=false",
        "optim.schedule=constant",
        "optim.lr=1e-4",
        "optim.warmup_steps=0",
        *(TINY if options.tiny else ()),
        *options.set,
    ]
    return override(resolve(options.preset), settings)


def ours(options: argparse.Namespace, length: int, trial: int, weights: dict[str, Any] | None = None) -> Peer:
    """Meshwright's step; `weights` is given a copy of those that it begins with."""
    import jax
    import jax.numpy as jnp

    from meshwright import mesh
    from meshwright.layout import check
    from meshwright.train.state import Run
    from meshwright.train.step import objective_of, put_batch, train_step

    config = configuration(options, length, TRIES[trial][0])
    layout = check(config)
    run = Run.of(config, layout, mesh.make(layout))
    documents = 8 if config.data.packing else 1
    batch = batch_of(config.model.vocab_size, config.train.sequences, length, documents)
    batch = put_batch(run, batch, objective_of(run).batch_letters)
    shapes = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(run.initial_state),
        run.shardings(),
    )
    step, facts = compiled(train_step(run), shapes, batch)
    facts |= {"remat": run.remat, "attention": run.engine.kernel, "layers_in_a_loop": not run.engine.unroll_layers}
    require_room(facts, held_bytes=0)
    state = run.initial_state()
    if weights is not None:
        weights["params"] = jax.tree.map(jnp.copy, state["params"])
    return Peer(facts, step, state, (batch,), lambda metrics: metrics["loss"])


def plain(options: argparse.Namespace, length: int, trial: int, params: Any, held_bytes: float) -> Peer:
    """Plain JAX, begun from a copy of `params`."""
    import jax
    import jax.numpy as jnp

    import plain_gpu

    config = configuration(options, length, "none")
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    made = plain_gpu.Plain(config.model, config.optim.lr, attention=attention, **TRIES[trial][1])
    batch = batch_of(config.model.vocab_size, config.train.sequences, length)
    tokens, targets = jnp.asarray(batch["tokens_BT"]), jnp.asarray(batch["targets_BT"])
    place = tokens.sharding
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # noqa: E731
    shapes = jax.tree.map(shape, (params, jax.eval_shape(plain_gpu.optimizer(made).init, params)))
    step, facts = compiled(plain_gpu.make_step(made), shapes, tokens, targets)
    facts |= {"remat": made.remat, "loss_chunk_tokens": made.loss_chunk_tokens}
    require_room(facts, held_bytes)
    params = jax.tree.map(jnp.copy, params)
    moments = jax.jit(plain_gpu.optimizer(made).init)(params)
    return Peer(facts, step, (params, moments), (tokens, targets), lambda loss: loss)


class NoRoom(Exception):
    """The step needs more memory than the device has."""


def require_room(facts: dict[str, Any], held_bytes: float) -> None:
    import jax

    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit and facts["peak_bytes"] + held_bytes > limit:
        raise NoRoom(f"{facts['peak_bytes'] / 1e9:.1f} GB and {held_bytes / 1e9:.1f} GB held, of {limit / 1e9:.1f}")


def first_that_fits(report: Report, name: str, make: Callable[[int], Peer]) -> Peer:
    for trial in range(len(TRIES)):
        try:
            peer = make(trial)
            report.say(
                f"  {name}: compiled in {peer.facts['compile_s']} s, peak {peer.facts['peak_bytes'] / 1e9:.1f} GB"
            )
            return peer
        except Exception as error:
            short = isinstance(error, NoRoom) or "RESOURCE_EXHAUSTED" in str(error)
            if not short or trial == len(TRIES) - 1:
                raise
            report.say(f"  {name}: try {trial + 1} has no room ({str(error).splitlines()[0][:120]})")
    raise AssertionError


def steps(report: Report, length: int, facts: dict[str, Any]) -> None:
    """Both steps at one sequence length, in turns: seconds, tokens/s, MFU, and their losses side by side."""
    import jax

    from meshwright import hardware, presets

    options = report.options
    config = configuration(options, length, "none")
    tokens = config.train.sequences * length
    flops = presets.flops_per_token(config.model, length)
    all_pairs = flops + 6.0 * config.model.layers * config.model.heads * config.model.head_size * length
    facts |= {"sequences": config.train.sequences, "tokens": tokens, "flops_per_token": flops}

    weights: dict[str, Any] = {}
    peers = {"meshwright": first_that_fits(report, "meshwright", lambda trial: ours(options, length, trial, weights))}
    mine, params = peers["meshwright"], weights["params"]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((mine.state, params)))

    def note(name: str, times: list[float]) -> None:
        step_s = statistics.median(times)
        rate = tokens / step_s
        measured = report.facts["parts"].get("matmul", {}).get("flops_per_s")
        chip = hardware.chip(jax.devices()[0].device_kind)
        row = peers[name].facts | {
            "step_s": step_s,
            "step_s_least": min(times),
            "steps": len(times),
            "tokens_per_s": rate,
        }
        if measured:
            row |= {"mfu_of_matmul": rate * flops / measured, "mfu_of_matmul_all_pairs": rate * all_pairs / measured}
        if chip:
            row |= {"mfu_of_peak": rate * flops / chip.bf16_flops_per_s, "chip": chip.name}
            row |= {"mfu_of_peak_all_pairs": rate * all_pairs / chip.bf16_flops_per_s}
        facts[name] = row

    times = {"meshwright": [mine.two_steps() for _ in range(options.rounds)]}
    note("meshwright", times["meshwright"])  # so that it is known whatever becomes of the other
    report.say(f"  meshwright: {facts['meshwright']['step_s']:.3f} s a step, losses {mine.losses}")
    report.require_s(1.3 * mine.facts["compile_s"] + 5)
    peers["plain"] = first_that_fits(report, "plain JAX", lambda trial: plain(options, length, trial, params, held))
    report.say(f"  plain JAX: losses {peers['plain'].losses}")
    facts["losses"] = {name: peer.losses for name, peer in peers.items()}
    facts["loss_rel_difference_max"] = max(abs(a - b) / abs(b) for a, b in zip(*facts["losses"].values(), strict=True))
    times = {name: [] for name in peers}
    for _ in range(options.rounds):
        for name, peer in peers.items():
            times[name].append(peer.two_steps())
        if report.left_s() < 5:
            break
    for name in peers:
        note(name, times[name])
    facts["tokens_per_s_ratio"] = facts["meshwright"]["tokens_per_s"] / facts["plain"]["tokens_per_s"]


def packed_steps(report: Report, length: int, facts: dict[str, Any]) -> None:
    """Our step with several documents in a row, which on GPU become a mask."""
    options = copy.copy(report.options)
    options.set = [*options.set, "data.packing=true"]
    peer = first_that_fits(report, "meshwright", lambda trial: ours(options, length, trial))
    step_s = statistics.median(peer.two_steps() for _ in range(options.rounds))
    facts |= peer.facts | {"step_s": step_s, "tokens_per_s": max(1, options.tokens // length) * length / step_s}


def attention_forms(options: argparse.Namespace, answers: dict[str, Any]) -> None:
    """Attention alone, forward and backward: rows of one document, and of several in every exact way there is.

    The error is the largest difference of output and gradients from float32, as a share of the largest value.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshwright.model.attention import attend

    b, t, n, k, h = (1, 128, 4, 2, 16) if options.tiny else (4, 4096, 32, 8, 64)
    kernel = "cudnn" if jax.default_backend() == "gpu" else "blockwise"
    q, key, v, weigh = (
        jax.random.normal(jax.random.key(i), (b, t, heads, h), jnp.bfloat16) for i, heads in enumerate((n, k, k, n))
    )
    random = np.random.default_rng(0)
    cuts = np.sort(random.choice(np.arange(1, t), (b, 7), replace=True), axis=1)
    several = jnp.asarray((np.arange(t)[None, :, None] >= cuts[:, None]).sum(-1) + 1, jnp.int32)
    single = jnp.ones_like(several)
    forms = {
        "one document": (lambda *a: attend(*a, single, kernel=kernel, packed=False), single),
        "mask": (lambda *a: attend(*a, several, kernel=kernel, packed=True), several),
        "blockwise": (lambda *a: attend(*a, several), several),
    }
    if kernel == "cudnn":
        forms["cuDNN's packed layout"] = (lambda *a: packed_layout(*a, several), several)
    for name, (form, segments) in forms.items():
        try:
            slopes = jax.jit(
                jax.value_and_grad(lambda *a, form=form: (form(*a).astype(jnp.float32) * weigh).sum(), (0, 1, 2))
            )
            _, got = slopes(q, key, v)
            exact = jax.jit(jax.grad(lambda *a, s=segments: (attend(*a, s) * weigh).sum(), (0, 1, 2)))
            wide = exact(*(x.astype(jnp.float32) for x in (q, key, v)))
            error = max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in zip(got, wide, strict=True))
            step_s = median_s(lambda: slopes(q, key, v), rounds=5)  # noqa: B023 (used at once)
            answers[name] = {"step_ms": step_s * 1e3, "gradient_error": error}
        except Exception as failure:
            answers[name] = {"error": f"{type(failure).__name__}: {str(failure)[:300]}"}


def documents(segments_BT, most: int):
    """Lengths i32[B,most] of each row's documents in order, and where they begin, i32[B,most+1], the last's end included.

    What is not used is -1 and stands at the end. Documents are numbered from 1, in order; 0 is padding, at the end.
    """
    import jax.numpy as jnp

    lengths_BM = (segments_BT[:, :, None] == jnp.arange(1, most + 1, dtype=segments_BT.dtype)).sum(1).astype(jnp.int32)
    lengths_BM = jnp.take_along_axis(lengths_BM, jnp.argsort(lengths_BM == 0, axis=1, stable=True), axis=1)
    ends_BM = jnp.cumsum(lengths_BM, axis=1).astype(jnp.int32)
    offsets = jnp.concatenate([jnp.zeros_like(ends_BM[:, :1]), jnp.where(lengths_BM > 0, ends_BM, -1)], axis=1)
    return jnp.where(lengths_BM > 0, lengths_BM, -1), offsets


def packed_layout(q, k, v, segments):
    """cuDNN's layout for packed sequences by JAX's private name: offsets and lengths of each row's documents."""
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    if tuple(map(int, jax.__version__.split(".")[:3])) < (0, 11, 1):  # jax-ml/jax#39521: wrong where K < N
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    lengths, offsets = documents(segments, most=8)
    return dot_product_attention(
        q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
        scale=q.shape[-1] ** -0.5, mask_type=MaskType.PADDING_CAUSAL,
    )  # fmt: skip


def look_up_forms(options: argparse.Namespace, answers: dict[str, Any]) -> None:
    """Milliseconds of a look-up's gradient in both forms of `meshwright.rows`, by how often rows recur."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshwright import rows

    m, d, v = (512, 8, 100) if options.tiny else (options.tokens, 2048, 128_256)
    x = jax.random.normal(jax.random.key(0), (m, d), jnp.bfloat16)
    random = np.random.default_rng(0)
    uses = {
        "random": random.integers(0, v, m),
        "as words": np.minimum(random.zipf(1.2, m) - 1, v - 1),
        "one row": np.zeros(m),
    }
    for name, used in uses.items():
        row = jnp.asarray(used, jnp.int32)
        forms = {form.__name__: jax.jit(form, static_argnums=2) for form in (rows.add_by_sort, rows.add_by_scatter)}
        sums = {form: add(row, x, v) for form, add in forms.items()}
        a, b = sums.values()
        answers[name] = {"difference": float(jnp.abs(a - b).max() / jnp.abs(b).max())}
        answers[name] |= {
            f"{form}_ms": median_s(lambda: add(row, x, v), rounds=3, warm=1) * 1e3  # noqa: B023 (used at once)
            for form, add in forms.items()
        }


# ---- the run ---------------------------------------------------------------------------------------------


def summary(facts: dict[str, Any]) -> Iterator[str]:
    parts = facts["parts"]
    device = parts.get("device", {})
    yield f"\n{device.get('kind', '?')}, JAX {device.get('jax', '?')}"
    if rate := parts.get("matmul", {}).get("flops_per_s"):
        yield f"bfloat16 matmuls: {rate / 1e12:.0f} TFLOP/s"
    for name, part in parts.items():
        if not name.startswith("steps of"):
            continue
        for peer in ("meshwright", "plain"):
            if row := part.get(peer):
                percent = lambda key, row=row: f"{row[key]:.1%}" if key in row else "?"  # noqa: E731
                yield (
                    f"{name[9:]:>6} {peer:<11} {row['step_s'] * 1e3:8.1f} ms  {row['tokens_per_s']:9.0f} tokens/s"
                    f"  MFU {percent('mfu_of_matmul')} of the matmul rate, {percent('mfu_of_peak')} of the peak"
                    f" (all pairs: {percent('mfu_of_matmul_all_pairs')}, {percent('mfu_of_peak_all_pairs')})"
                    f"  peak {row['peak_bytes'] / 1e9:.1f} GB, compiled in {row['compile_s']} s"
                )
        if "tokens_per_s_ratio" in part:
            yield (
                f"{name[9:]:>6} meshwright / plain JAX {part['tokens_per_s_ratio']:.3f} of its tokens/s;"
                f" first losses differ by {part['loss_rel_difference_max']:.1e}"
            )
    for name, part in parts.items():
        if name.startswith("documents") and "step_s" in part:
            yield f"{name}: {part['step_s'] * 1e3:.1f} ms, {part['tokens_per_s']:.0f} tokens/s"
    for name in ("attention", "look-up"):
        for form, row in parts.get(name, {}).items():
            if isinstance(row, dict):
                values = (
                    f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
                )
                yield f"{name}, {form}: {', '.join(values)}"
    for name, part in parts.items():
        if trouble := part.get("error") or part.get("skipped"):
            yield f"{name}: {trouble[:300]}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=330)
    parser.add_argument("--json", help="write all figures here (default: gpu.json in $OUT, where that is set)")
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--lengths", default="4096,8192")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=6, help="turns of two steps each")
    parser.add_argument("--tiny", action="store_true", help="a small model on CPU, to test the script")
    options = parser.parse_args()
    options.lengths = [int(length) for length in options.lengths.split(",")]
    if options.tiny:
        options.lengths, options.tokens, options.rounds = [64, 128], 512, 2
    if options.json is None and os.environ.get("OUT"):
        options.json = str(Path(os.environ["OUT"]) / "gpu.json")
    return options


def main() -> None:
    options = arguments()
    for package in ("jax", "optax"):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"benchmarks/gpu.py needs {package}: pip install 'jax[cuda13]' optax")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")  # a step's temporaries are one piece of memory
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if options.tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
    report = Report(options)
    report.stop_at_the_end_of_the_budget()
    run(report)
    report.finish("done")
    raise SystemExit(report.status())


def device(report: Report, facts: dict[str, Any]) -> None:
    import jax

    first = jax.devices()[0]
    facts |= {"kind": first.device_kind, "platform": first.platform, "jax": jax.__version__}
    facts |= {"memory": first.memory_stats(), "budget_s": report.options.budget_s}
    report.say(f"  {first.device_kind}, JAX {jax.__version__}")


def run(report: Report) -> None:
    options = report.options
    found = report.part("device", lambda facts: device(report, facts))
    if found.get("platform") != ("cpu" if options.tiny else "gpu"):
        report.say("there is no GPU that JAX can use; --tiny tests this script on CPU")
        return
    report.part("matmul", lambda facts: matmul_rate(report, facts))
    for length in options.lengths:
        report.part(f"steps of {length}", lambda facts, length=length: steps(report, length, facts), needs_s=30)
    report.part("attention", lambda facts: attention_forms(options, facts), needs_s=20)
    report.part("look-up", lambda facts: look_up_forms(options, facts), needs_s=10)
    report.part(
        f"documents in rows of {options.lengths[0]}",
        lambda facts: packed_steps(report, options.lengths[0], facts),
        needs_s=60,
    )


if __name__ == "__main__":
    main()
