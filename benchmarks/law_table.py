"""The law over every legal layout of up to 8 devices, and over pipelines, written to docs/law_table.md.

    python benchmarks/law_table.py [--models "llama; gpt"] [--minutes 25] [--record FILE]

GPT and Llama with odd sizes (vocabulary 101, 6 heads with 2 key/value heads, 24 tokens, 3 layers; and 8 heads with 2,
so that tensor=4 and 8 share heads), float64 to 1e-9. Each layout of data x fsdp x tensor x ZeRO x sequence parallelism
runs with one microbatch and, where the batch allows it, with two; ZeRO-3 also with weights gathered once a step.
Pipelines: the covering set of `verify --layouts pipelines` for a Llama and a tied GPT with layers that no number of stages
divides; and every schedule on 2, 3, 4 and 8 stages with 1 to 24 microbatches, for a deep regression network.
Rows go to FILE (JSON lines) as they come; a second run goes on from there. The page keeps the rows that FILE has not.
"""

import argparse
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

from meshwright import mesh
from meshwright.config import LayoutConfig, ModelConfig, Refused, RunConfig, TrainConfig, parse_layout
from meshwright.layout import check
from meshwright.legal import every_schedule, legal_layouts, pipeline_layouts

TRAIN = TrainConfig(batch_sequences=16, sequence_length=24, z_loss=1e-3, label_smoothing=0.1)
LLAMA = ModelConfig(layers=3, d_model=48, d_ff=96, heads=6, kv_heads=2, head_size=8, vocab_size=101)
GPT = replace(LLAMA, family="gpt", kv_heads=6, positions=32, tied_embeddings=True)
RESIDUAL = ModelConfig(family="residual", layers=17, d_model=16, d_ff=16)
MODELS = {
    "llama": RunConfig(LLAMA, train=TRAIN),
    "llama, 8 heads of 2": RunConfig(replace(LLAMA, heads=8, tied_embeddings=True), train=TRAIN),
    "gpt": RunConfig(GPT, train=TRAIN),
}
TWELVE = replace(TRAIN, batch_sequences=12)
PIPELINES = {
    "llama, pipelines": RunConfig(replace(LLAMA, layers=7, d_model=24, d_ff=48, head_size=4), train=TWELVE),
    "gpt, pipelines": RunConfig(replace(GPT, layers=7, d_model=24, d_ff=48, head_size=4), train=TWELVE),
}
SCHEDULES = {"residual, every schedule": RunConfig(RESIDUAL, train=replace(TRAIN, batch_sequences=24))}
ALL = MODELS | PIPELINES | SCHEDULES
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


def on_eight(layouts_of: Callable[[RunConfig, int], list[LayoutConfig]]) -> Callable[[RunConfig], list[LayoutConfig]]:
    return lambda config: layouts_of(config, 8)


LAYOUTS: dict[str, Callable[[RunConfig], Iterable[LayoutConfig]]] = {
    **dict.fromkeys(MODELS, layouts),
    **dict.fromkeys(PIPELINES, on_eight(pipeline_layouts)),
    **dict.fromkeys(SCHEDULES, on_eight(every_schedule)),
}


def run(name: str, record: Path, until_s: float) -> None:
    """The rows of a model that are not on record yet, until a time of the clock."""
    from meshwright.verify.parity import Verifier

    done = {(row["model"], row["layout"]) for row in read(record)}
    left = [layout for layout in LAYOUTS[name](ALL[name]) if (name, str(layout)) not in done]
    if not left or perf_counter() > until_s:
        return
    verifier = Verifier(ALL[name], "float64")
    for number, layout in enumerate(left, 1):
        if perf_counter() > until_s:
            return
        result = verifier(layout)
        with record.open("a") as file:
            file.write(json.dumps({"model": name, **asdict(result)}) + "\n")
        print(f"{name} {number}/{len(left)} {result.layout}: {result.verdict} {result.reason}", flush=True)


def read(record: Path) -> list[dict]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def on_page() -> list[dict]:
    """The rows of the page as it is."""
    rows, name = [], ""
    for text in PAGE.read_text().splitlines() if PAGE.exists() else []:
        if text.startswith("## "):
            name = text[3:]
        cells = [cell.strip() for cell in text.strip("|").split("|")]
        if name and len(cells) == 6 and cells[1] in ("equal", "differs"):
            loss, gradient, weight = (float(cells[i]) if cells[i] else None for i in (2, 3, 5))
            errors = {"loss_rel_err": loss, "grad_rel_err_max": gradient, "param_rel_err_max": weight}
            rows.append({"model": name, "layout": cells[0], "verdict": cells[1], "grad_worst_leaf": cells[4], **errors})
    return rows


def page(rows: list[dict], jax_version: str) -> str:
    """The table as Markdown."""
    lines = [
        "# The law over every legal layout",
        "",
        "Every layout of data x fsdp x tensor x ZeRO x sequence parallelism of up to 8 devices that the model allows, each",
        "with one and two microbatches and both ways to gather ZeRO-3 weights, held against one device in float64: loss,",
        "every gradient, the global norm, the weights after one SGD step and after five AdamW steps, evaluation; copies and",
        "initial weights bit-equal (see [verify.md](verify.md)). The bound is 1e-9. Made by `benchmarks/law_table.py`,",
        f"JAX {jax_version}, Python {platform.python_version()}, 8 emulated devices. Rows are of several runs, some commits",
        "apart: a run of the script goes on from its record, and keeps the rows of this page that it has not run itself.",
        "",
        *HEAD,
    ]
    lines += summary(rows, MODELS)
    lines += [
        "",
        "Pipelines, the same checks: the covering set of `meshwright verify --layouts pipelines`, in which any two values of",
        "two settings meet (stages, schedule, microbatches, layers, data, fsdp with ZeRO, tensor, sequence parallelism, stash,",
        "split vocabulary, uniform ticks); and every schedule on 2, 3, 4 and 8 stages with every number of microbatches up to",
        "three for each stage that divides the batch.",
        "",
        *HEAD,
        *summary(rows, PIPELINES | SCHEDULES),
    ]
    for name, config in ALL.items():
        own = [row for row in rows if row["model"] == name]
        if own:
            model = config.model
            letters = "LDFNKHV" if model.is_language_model else "LDF"
            sizes = [f"{letter}={model.sizes[letter]}" for letter in letters]
            sizes += [f"T={config.train.sequence_length}"] * model.is_language_model + [f"B={config.train.sequences}"]
            lines += ["", f"## {name}", "", " ".join(sizes), ""]
            lines += ["| layout | verdict | loss | gradients | worst leaf | weights |", "|---|---|---|---|---|---|"]
            lines += [line(row) for row in sorted(own, key=lambda row: order(row["layout"]))]
    return "\n".join(lines) + "\n"


HEAD = (
    "| model | layouts | of | equal | differ | largest loss error | largest gradient error | largest weight error |",
    "|---|---|---|---|---|---|---|---|",
)


def summary(rows: list[dict], models: Iterable[str]) -> Iterator[str]:
    """A line for each model that has rows."""
    for name in models:
        own = [row for row in rows if row["model"] == name]
        if own:
            equal = [row for row in own if row["verdict"] == "equal"]
            keys = ("loss_rel_err", "grad_rel_err_max", "param_rel_err_max")
            errors = [f"{max(row[key] for row in equal):.1e}" if equal else "" for key in keys]
            counts = len(own), len(list(LAYOUTS[name](ALL[name]))), len(equal), len(own) - len(equal)
            yield f"| {name} | {' | '.join(map(str, counts))} | {' | '.join(errors)} |"


def line(row: dict) -> str:
    error = lambda key: "" if row[key] is None else f"{row[key]:.1e}"  # noqa: E731
    return (
        f"| {row['layout']} | {row['verdict']} | {error('loss_rel_err')} | {error('grad_rel_err_max')} |"
        f" {row['grad_worst_leaf']} | {error('param_rel_err_max')} |"
    )


def order(text: str) -> tuple:
    layout = parse_layout(text)
    return layout.device_count if layout.pipe == 1 else 0, layout.pipe, -layout.data, -layout.fsdp, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="all", help="all, or names separated by semicolons")
    parser.add_argument("--minutes", type=float, default=600, help="start no row after so long")
    parser.add_argument("--record", type=Path, default=Path("law_table.jsonl"))
    args = parser.parse_args()
    mesh.emulate(8)
    import jax

    until_s = perf_counter() + 60 * args.minutes
    for name in ALL if args.models == "all" else args.models.split("; "):
        run(name, args.record, until_s)
    rows = [*on_page(), *read(args.record)]
    rows = list({(row["model"], row["layout"]): row for row in rows}.values())  # the newest of each
    PAGE.write_text(page(rows, jax.__version__))
    raise SystemExit(any(row["verdict"] != "equal" for row in rows))


if __name__ == "__main__":
    main()
