"""Llama training steps compiled for TPU v5p that is not there: memory, and the time that the compiler's own text implies.

    python benchmarks/aot.py                 every row below, one compile at a time (about 75 CPU seconds each)
    python benchmarks/aot.py 8b-fsdp --json  one row
    python benchmarks/aot.py --text FILE     read a compiled program that is already there

Needs libtpu, and JAX 0.12 to print the programs. The estimate walks the scheduled program. Every operation takes the
cycles that the compiler wrote beside it (`estimated_cycles`), at 1.75 GHz; a loop is its body times its trips, a
conditional its dearest branch every time (in a pipeline's idle ticks too). A blocking collective is exposed in full and
moves its bytes at 540 GB/s, all links of a chip together; one that a SparseCore carries out runs beside what is scheduled
until its done, one after another at the same rate (--sparsecore sets another); a permute runs beside what is scheduled
between its start and its done, at 90 GB/s a direction (Google Cloud, TPU v5p; the same figures for whatever is compared).
Pallas kernels carry no cycles: attention's own arithmetic is in no estimate.
"""

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

CLOCK_HZ = 1.75e9
SYNC_BYTES_PER_S = 540e9
PERMUTE_BYTES_PER_S = 90e9

COMMON = (
    "train.sequence_length=4096",
    "train.reduce_dtype=bfloat16",
    "train.remat=full",
    "optim.name=adamw",
    "train.compute_dtype=bfloat16",
    "train.param_dtype=float32",
)
PIPE = "pipe=8 fsdp=16 schedule=interleaved microbatches=16 split_vocabulary=true"
ROWS = {
    # name: preset, target, layout, sequences, then the goals: step in s, peak in GiB
    "8b-fsdp": ("llama3.1-8b", "tpu-v5p:2x2x4", "fsdp=16", 64, 2.7, 16),
    "8b-tensor": ("llama3.1-8b", "tpu-v5p:2x2x4", "fsdp=4 tensor=4", 64, 2.6, 15.5),
    "70b-fsdp": ("llama3-70b", "tpu-v5p:4x4x8", "fsdp=128", 256, 11.5, 22),
    "70b-tensor": ("llama3-70b", "tpu-v5p:4x4x8", "fsdp=32 tensor=4", 256, 11.8, 22),
    "70b-pipe": ("llama3-70b", "tpu-v5p:4x4x8", f"{PIPE} chunks=10", 256, 13, 20),
    "70b-pipe-5": ("llama3-70b", "tpu-v5p:4x4x8", f"{PIPE} chunks=5", 256, 13, 20),
    "70b-pipe-step": ("llama3-70b", "tpu-v5p:4x4x8", f"{PIPE} chunks=10 gather=step", 256, 13, 20),
}
MEMORY_ROWS = {
    # one sequence of a microbatch on each device, more and more microbatches
    f"memory-{schedule}-{count}": (
        "llama3.2-1b",
        "tpu-v5p:2x2x4",
        f"pipe=4 fsdp=4 schedule={schedule} microbatches={count}",
        4 * count,
        0,
        0,
    )
    for schedule in ("1f1b", "gpipe")
    for count in (8, 16, 32)
}
SPARSE_ROWS = {f"{name}-sparse": ROWS[name] for name in ("8b-fsdp", "70b-fsdp")}
"""The same with `train.sparse_cores`."""
ROWS |= MEMORY_ROWS | SPARSE_ROWS

# ---- the text of a compiled program ------------------------------------------------------------------

DTYPE_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
DTYPE_BYTES |= {"f64": 8, "s64": 8, "u64": 8}
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
IMPOSSIBLE_CYCLES = 10**12  # some operations carry a number near 2^63


@dataclass(frozen=True)
class Operation:
    """One line of a computation: ``%name = type opcode(operands), attributes``."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    line: str
    root: bool

    def named(self, attribute: str) -> str | None:
        found = re.search(rf"\b{attribute}=%([\w.\-]+)", self.line)
        return found and found.group(1)

    @property
    def cycles(self) -> int:
        found = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        cycles = int(found.group(1)) if found else 0
        return cycles if cycles < IMPOSSIBLE_CYCLES else 0


Computation = dict[str, Operation]


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations by name, each its operations in the order of the schedule, and the entry's name."""
    computations: dict[str, Computation] = {}
    current, entry = None, ""
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{\s*$", line)
        if head:
            current = computations.setdefault(head.group(2), {})
            entry = head.group(2) if head.group(1) else entry
        elif line.startswith("}") and not after.strip():  # kernels' own texts have such lines too, but none empty after
            current = None
        elif current is not None:
            operation = _operation(line)
            if operation:
                current[operation.name] = operation
    return computations, entry


def _operation(line: str) -> Operation | None:
    start = re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line)
    if not start:
        return None
    rest = line[start.end() :]
    kind = rest[: _closing(rest) + 1] if rest.startswith("(") else rest.split(" ", 1)[0]
    call = re.match(r"\s*([a-z][\w\-]*)(\()", rest[len(kind) :])
    if not call:
        return None
    inside = rest[len(kind) + call.start(2) :]
    arguments = inside[1 : _closing(inside)]
    return Operation(
        start.group(2),
        kind,
        call.group(1),
        tuple(re.findall(r"%([\w.\-]+)", arguments)),
        arguments,
        line,
        bool(start.group(1)),
    )


def _closing(text: str) -> int:
    """Where the parenthesis that `text` begins with is closed."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i
    return len(text)


def type_bytes(type_text: str) -> int:
    """Bytes of all arrays in a type, tuples included."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]", type_text):
        count = DTYPE_BYTES.get(dtype, 0)
        for size in filter(None, dims.split(",")):
            count *= int(size)
        total += count
    return total


def trips(loop: Operation, around: Computation, computations: dict[str, Computation]) -> int:
    """How often a loop runs: its counter starts at a constant, steps by one and is compared with a constant."""
    condition = computations[loop.named("condition")]
    compare = next(op for op in condition.values() if op.root)
    limit = None
    if compare.opcode == "fusion":  # the comparison is inside; its parameters are the fusion's operands
        inner = computations[compare.named("calls")]
        outside = dict(enumerate(compare.operands))
        compare = next(op for op in inner.values() if op.root)
        places = [
            outside[int(inner[name].arguments)] if inner[name].opcode == "parameter" else name
            for name in compare.operands
        ]
        limit = _constant(inner, compare.operands[1]) if places[1] == compare.operands[1] else None
        counter, bound = places
    else:
        counter, bound = compare.operands
    limit = limit if limit is not None else _value(condition, bound, loop, around)
    first = _value(condition, counter, loop, around) or 0
    return limit - first if limit is not None else 1


def _value(condition: Computation, name: str, loop: Operation, around: Computation) -> int | None:
    """A constant in a loop's condition, or the constant that enters the loop in its place of the tuple."""
    own = _constant(condition, name)
    if own is not None or name not in condition or condition[name].opcode != "get-tuple-element":
        return own
    place = int(re.search(r"index=(\d+)", condition[name].line).group(1))
    start = around.get(loop.operands[0])
    return _constant(around, start.operands[place]) if start and start.opcode == "tuple" else None


def _constant(computation: Computation, name: str) -> int | None:
    operation = computation.get(name)
    while operation is not None and operation.opcode in ("copy", "bitcast", "convert", "reshape"):
        operation = computation.get(operation.operands[0])
    is_number = operation is not None and operation.opcode == "constant" and operation.arguments.lstrip("-").isdecimal()
    return int(operation.arguments) if is_number else None


def group_size(line: str) -> int:
    """The devices of one group of a collective, in the three ways in which they are written."""
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}", line):
        degrees = {axis: int(degree) for axis, degree in re.findall(r"'([^']+)'=(\d+)", mesh.group(1))}
        size = 1
        for axis, part in re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh.group(2)):
            size *= int(part) if part else degrees[axis]
        return size
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota.group(1))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(listed.group(1).split(",")) if listed else 1


def sent_bytes(kind: str, operation: Operation, computation: Computation) -> float:
    """Bytes that one device sends: ring algorithms (Thakur, Rabenseifner and Gropp 2005)."""
    held = sum(type_bytes(computation[name].type) for name in operation.operands if name in computation)
    n = group_size(operation.line)
    sends = {"collective-permute": 1, "all-gather": n - 1, "all-reduce": 2 * (n - 1) / n}
    return held * sends.get(kind, (n - 1) / n)


# ---- the estimate ------------------------------------------------------------------------------------


@dataclass
class Estimate:
    """Seconds and bytes of one device in one step."""

    step_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    sent_bytes: float = 0.0
    kernels: int = 0
    """Pallas kernels without an estimate."""
    arriving: dict[str, float] = field(default_factory=dict)
    """When each transfer under way is there."""

    def add(self, other: "Estimate", times: int) -> None:
        for name in ("step_s", "compute_s", "exposed_s", "sent_bytes", "kernels"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))

    def compute(self, seconds: float) -> None:
        self.step_s += seconds
        self.compute_s += seconds

    def block(self, seconds: float, count: float) -> None:
        self.step_s += seconds
        self.exposed_s += seconds
        self.sent_bytes += count


def estimate(text: str, sparsecore_bytes_per_s: float = SYNC_BYTES_PER_S) -> Estimate:
    """The time of one step from a scheduled program's text."""
    computations, entry = parse(text)
    return _walk(entry, computations, sparsecore_bytes_per_s)


def _walk(name: str, computations: dict[str, Computation], sparsecore_bytes_per_s: float) -> Estimate:
    computation, total, links_free_s = computations[name], Estimate(), 0.0
    for operation in computation.values():
        kind = next((k for k in KINDS if operation.opcode in (k, f"{k}-start")), None)
        inner = operation.named("calls") or operation.named("to_apply")
        if operation.opcode == "while":
            turn = _walk(operation.named("body"), computations, sparsecore_bytes_per_s)
            total.add(turn, trips(operation, computation, computations))
        elif operation.opcode == "conditional":
            listed = re.search(r"branch_computations=\{(.*?)\}", operation.line)
            names = re.findall(r"%([\w.\-]+)", listed.group(1)) if listed else ()
            branches = (_walk(name, computations, sparsecore_bytes_per_s) for name in names)
            total.add(max(branches, key=lambda e: e.step_s, default=Estimate()), 1)
        elif kind == "collective-permute" and operation.opcode.endswith("-start"):
            count = sent_bytes(kind, operation, computation)
            total.sent_bytes += count
            total.arriving[operation.name] = total.step_s + count / PERMUTE_BYTES_PER_S
        elif operation.opcode == "collective-permute-done":
            wait = max(0.0, total.arriving.pop(operation.operands[0], 0.0) - total.step_s)
            total.block(wait, 0)
        elif operation.opcode == "custom-call-update":  # a SparseCore's work is given its operands
            called = re.search(r"called_computations=\{%([\w.\-]+)", computation[operation.operands[0]].line).group(1)
            count = sum(_fused_collectives(called, computations))
            total.sent_bytes += count
            links_free_s = max(total.step_s, links_free_s) + count / sparsecore_bytes_per_s
            total.arriving[operation.name] = links_free_s
        elif operation.opcode == "custom-call-done":
            total.block(max(0.0, total.arriving.pop(operation.operands[0], 0.0) - total.step_s), 0)
        elif kind:
            count = sent_bytes(kind, operation, computation)
            rate = PERMUTE_BYTES_PER_S if kind == "collective-permute" else SYNC_BYTES_PER_S
            total.block(count / rate, count)
        else:
            total.compute(operation.cycles / CLOCK_HZ)
            if operation.opcode == "fusion" and inner in computations:
                for count in _fused_collectives(inner, computations):
                    total.block(count / SYNC_BYTES_PER_S, count)
            total.kernels += operation.opcode == "custom-call" and "tpu_custom_call" in operation.line
    return total


def _fused_collectives(name: str, computations: dict[str, Computation]) -> list[float]:
    """Bytes sent by the collectives inside a fusion; an all-reduce of which a slice is kept is a reduce-scatter."""
    computation = computations[name]
    sliced = any(operation.opcode == "dynamic-slice" for operation in computation.values())
    found = []
    for operation in computation.values():
        kind = next((k for k in KINDS if operation.opcode == k), None)
        if kind:
            found.append(sent_bytes(kind, operation, computation) * (0.5 if kind == "all-reduce" and sliced else 1))
        if operation.opcode == "fusion" and operation.named("calls") in computations:
            found += _fused_collectives(operation.named("calls"), computations)
    return found


# ---- rows --------------------------------------------------------------------------------------------


def run(name: str, sparsecore_bytes_per_s: float = SYNC_BYTES_PER_S) -> dict:
    """Compile one row and estimate it."""
    preset, target, layout, sequences, step_goal_s, peak_goal_gib = ROWS[name]
    own = (f"train.batch_sequences={sequences}", f"train.sparse_cores={str(name in SPARSE_ROWS).lower()}")
    settings = [part for setting in (*COMMON, *own) for part in ("--set", setting)]
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "step.hlo"
        command = [
            sys.executable,
            "-m",
            "meshwright.cli.main",
            "compile",
            preset,
            "--target",
            target,
            "--layout",
            layout,
        ]
        done = subprocess.run(
            [*command, *settings, "--json", "--text", str(text)], capture_output=True, text=True, check=False
        )
        if not done.stdout:
            sys.exit(done.stderr)
        facts = json.loads(done.stdout)
        if not text.exists():
            sys.exit(facts.get("reason") or facts.get("text_error"))
        return (
            facts
            | figures(text, sparsecore_bytes_per_s)
            | {"row": name, "step_goal_s": step_goal_s, "peak_goal_gib": peak_goal_gib}
        )


def figures(path: Path, sparsecore_bytes_per_s: float = SYNC_BYTES_PER_S) -> dict:
    data = path.read_bytes()
    e = estimate((gzip.decompress(data) if path.suffix == ".gz" else data).decode(), sparsecore_bytes_per_s)
    return {
        "step_s": e.step_s,
        "compute_s": e.compute_s,
        "exposed_s": e.exposed_s,
        "sent_bytes": e.sent_bytes,
        "kernels_without_estimate": e.kernels,
    }


def shown(row: dict) -> str:
    peak = f"{row['peak_bytes'] / 2**30:.2f}" if row.get("peak_bytes") else "-"
    if row.get("row") in MEMORY_ROWS:
        peak += f" ({(row['peak_bytes'] - row['argument_bytes']) / 2**30:.3f} besides the arguments)"
    compiled = f"{row['compile_cpu_s']:.0f} CPU s" if row.get("compile_cpu_s") else "-"
    figures = f"{row['step_s']:.3f} | {row['compute_s']:.3f} | {row['exposed_s']:.3f} | {row['sent_bytes'] / 1e9:.1f}"
    return f"| {row.get('row', row.get('text'))} | {figures} | {peak} | {compiled} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; none: all but memory-*")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="estimate these programs; compile nothing")
    parser.add_argument(
        "--sparsecore", type=float, default=SYNC_BYTES_PER_S, help="bytes/s of a SparseCore's collective"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    unknown = set(args.rows) - set(ROWS)
    if unknown:
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if not args.json:
        print("| row | step s | compute s | exposed s | GB sent | peak GiB | compile |\n|---|---|---|---|---|---|---|")
    rows = []
    for name in args.text or args.rows or [row for row in ROWS if row not in MEMORY_ROWS]:
        rows.append({"text": str(name)} | figures(name, args.sparsecore) if args.text else run(name, args.sparsecore))
        if not args.json:
            print(shown(rows[-1]), flush=True)
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
