"""The law over every legal layout of up to 8 devices, written to docs/law_table.md.

    python benchmarks/law_table.py [--models "llama; gpt"] [--record FILE]

GPT and Llama with odd sizes (vocabulary 101, 6 heads with 2 key/value heads, 24 tokens, 3 layers; and 8 heads with 2,
so that tensor=4 and 8 share heads), float64 to 1e-9. Each layout of data x fsdp x tensor x ZeRO x sequence parallelism
runs with one microbatch and, where the batch allows it, with two; ZeRO-3 also with weights gathered once a step.
Rows go to FILE (JSON lines) as they come; a second run goes on from there.
"""

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from meshwright import mesh
from meshwright.config import LayoutConfig, ModelConfig, Refused, RunConfig, TrainConfig, parse_layout
from meshwright.layout import check
from meshwright.legal import legal_layouts

TRAIN = TrainConfig(batch_sequences=16, sequence_length=24, z_loss=1e-3, label_smoothing=0.1)
LLAMA = ModelConfig(layers=3, d_model=48, d_ff=96, heads=6, kv_heads=2, head_size=8, vocab_size=101)
GPT = replace(LLAMA, family="gpt", kv_heads=6, positions=32, tied_embeddings=True)
MODELS = {
    "llama": RunConfig(LLAMA, train=TRAIN),
    "llama, 8 heads of 2": RunConfig(replace(LLAMA, heads=8, tied_embeddings=True), train=TRAIN),
    "gpt": RunConfig(GPT, train=TRAIN),
}
PAGE = Path(__file__).parent.parent / "docs" / "law_table.md"


def layouts(config: RunConfig) -> Iterator[LayoutConfig]:
    """Every legal layout of up to 8 devices, with one and two microbatches, and both ways to gather weights."""
    for layout in legal_layouts(config, 8):
        gathers = ("use", "step") if layout.fsdp > 1 and layout.zero == 3 else ("use",)
        for microbatches in (1, 2):
            for gather in gathers:
                one = replace(layout, microbatches=microbatches, gather=gather)
                try:
                    check(replace(config, layout=one))
                except Refused:
                    continue
                yield one


def run(name: str, record: Path) -> None:
    from meshwright.verify.parity import Verifier

    done = {(row["model"], row["layout"]) for row in read(record)}
    left = [layout for layout in layouts(MODELS[name]) if (name, str(layout)) not in done]
    if not left:
        return
    verifier = Verifier(MODELS[name], "float64")
    for number, layout in enumerate(left, 1):
        result = verifier(layout)
        with record.open("a") as file:
            file.write(json.dumps({"model": name, **asdict(result)}) + "\n")
        print(f"{name} {number}/{len(left)} {result.layout}: {result.verdict} {result.reason}", flush=True)


def read(record: Path) -> list[dict]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def page(rows: list[dict], jax_version: str) -> str:
    """The table as Markdown."""
    lines = [
        "# The law over every legal layout",
        "",
        "Every layout of data x fsdp x tensor x ZeRO x sequence parallelism of up to 8 devices that the model allows, each",
        "with one and two microbatches and both ways to gather ZeRO-3 weights, held against one device in float64: loss,",
        "every gradient, the global norm, the weights after one SGD step and after five AdamW steps, evaluation; copies and",
        "initial weights bit-equal (see [verify.md](verify.md)). The bound is 1e-9. Made by `benchmarks/law_table.py`,",
        f"JAX {jax_version}, Python {platform.python_version()}, 8 emulated devices.",
        "",
        "| model | layouts | equal | differ | largest loss error | largest gradient error | largest weight error |",
        "|---|---|---|---|---|---|---|",
    ]
    largest = lambda own, key: f"{max(row[key] for row in own):.1e}"  # noqa: E731
    by_model = {name: [row for row in rows if row["model"] == name] for name in MODELS}
    for name, own in by_model.items():
        if own:
            equal = sum(row["verdict"] == "equal" for row in own)
            errors = [largest(own, key) for key in ("loss_rel_err", "grad_rel_err_max", "param_rel_err_max")]
            lines.append(f"| {name} | {len(own)} | {equal} | {len(own) - equal} | {' | '.join(errors)} |")
    for name, own in by_model.items():
        if own:
            model = MODELS[name].model
            sizes = " ".join(f"{letter}={model.sizes[letter]}" for letter in "LDFNKHV")
            lines += ["", f"## {name}", "", f"{sizes} T={TRAIN.sequence_length} B={TRAIN.sequences}", ""]
            lines += ["| layout | verdict | loss | gradients | worst leaf | weights |", "|---|---|---|---|---|---|"]
            lines += [
                f"| {row['layout']} | {row['verdict']} | {row['loss_rel_err']:.1e} | {row['grad_rel_err_max']:.1e} |"
                f" {row['grad_worst_leaf']} | {row['param_rel_err_max']:.1e} |"
                for row in sorted(own, key=lambda row: order(row["layout"]))
            ]
    return "\n".join(lines) + "\n"


def order(text: str) -> tuple:
    layout = parse_layout(text)
    return layout.device_count, -layout.data, -layout.fsdp, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="all", help="all, or names separated by semicolons")
    parser.add_argument("--record", type=Path, default=Path("law_table.jsonl"))
    args = parser.parse_args()
    mesh.emulate(8)
    import jax

    for name in MODELS if args.models == "all" else args.models.split("; "):
        run(name, args.record)
    rows = read(args.record)
    PAGE.write_text(page(rows, jax.__version__))
    raise SystemExit(any(row["verdict"] != "equal" for row in rows))


if __name__ == "__main__":
    main()
