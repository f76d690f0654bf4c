"""Check layouts: does each compute exactly what one device computes?"""

import argparse
import random
from dataclasses import asdict, fields, replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from meshwright.cli.common import add_config, add_devices, add_json, print_json, read_config, start_devices
from meshwright.config import LayoutConfig, Refused, RunConfig, parse_layout, require
from meshwright.layout import check
from meshwright.legal import legal_layouts, pipeline_layouts
from meshwright.verify.sizes import reduced, sizes_text

FORMS = ("cpu", "tpu", "gpu")
DTYPES = ("float64", "float32", "bfloat16")
VERDICTS = ("equal", "differs", "refused")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--layouts",
        metavar="WHICH",
        help='"A; B", layouts separated by semicolons; pipelines, a covering set of them; all, every layout without a'
        " pipeline and that set; or random:N of all (default: the layout of --layout or CONFIG)",
    )
    add_devices(
        parser, "how many devices there are; a layout may use fewer (default: 8, or as many as the largest needs)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, metavar="DTYPE", default="float64", help=f"one of {', '.join(DTYPES)}"
    )
    parser.add_argument(
        "--form",
        choices=FORMS,
        metavar="PLATFORM",
        default="",
        help=f"run the form of the program that {', '.join(FORMS)} would run, on any devices (default: that of the devices)",
    )
    parser.add_argument(
        "--plant",
        metavar="FAULT",
        default="",
        help="run with a planted fault, to see it found and named (a wrong name lists them)",
    )
    parser.add_argument(
        "--full-size",
        action="store_true",
        help="verify the sizes as configured; without it large sizes become small ones that the same degrees divide",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    if args.plant:
        from meshwright.verify import faults  # imports JAX

        fault = faults.named(args.plant)
        config = faults.configured(fault, config)
        args.layouts = args.layouts or fault.layout
    layouts, results = choose_layouts(config, args.layouts, args.devices)
    devices = args.devices or max((layout.device_count for layout in layouts), default=1)
    config = config if args.full_size else reduced(config, devices, layouts)
    console = Console(stderr=args.json)
    if layouts:
        start_devices(devices)
        results += _verify(config, layouts, args, console)
    counts = {verdict: sum(r["verdict"] == verdict for r in results) for verdict in VERDICTS}
    if args.json:
        print_json({"dtype": args.dtype, "sizes": sizes_text(config), "results": results, "counts": counts})
    else:
        console.print(table(results, with_leaf=console.width >= 100))
        console.print(f"verified in {args.dtype} at {sizes_text(config)}", style="dim")
        console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return exit_status(counts)


def _verify(
    config: RunConfig, layouts: list[LayoutConfig], args: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """The results of the layouts, with a line of progress while they run."""
    from meshwright.verify.run import verify  # imports JAX, whose devices are now set

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("verifying", total=len(layouts))
        names = iter([*(str(layout) for layout in layouts[1:]), ""])
        progress.update(task, description=f"verifying {layouts[0]}")

        def done(result: Any) -> None:
            progress.update(task, advance=1, description=f"verifying {next(names)}")
            if result.verdict == "differs":
                progress.console.print(f"[bold red]differs[/] {result.layout}")

        return [
            asdict(result) for result in verify(config, layouts, args.dtype, done, form=args.form, plant=args.plant)
        ]


def exit_status(counts: dict[str, int]) -> int:
    """1 if a layout differs; 2 if nothing ran; else 0: a refusal beside equal layouts is a right answer."""
    return 1 if counts["differs"] else 0 if counts["equal"] else 2


def choose_layouts(
    config: RunConfig, which: str | None, devices: int | None
) -> tuple[list[LayoutConfig], list[dict[str, Any]]]:
    """The layouts to run, and a result for each that is refused. A layout that cannot be read refuses the command."""
    if which is None:
        return _check_all(config, [str(config.layout)], devices)
    if which in ("all", "pipelines"):
        return _legal(config, which, devices or 8), []
    if which.startswith("random:"):
        text = which.removeprefix("random:")
        require(
            text.isdecimal() and int(text) > 0,
            f"--layouts {which}: write random:N with a whole number N, as in random:5",
        )
        legal = _legal(config, which, devices or 8)
        return random.Random(config.train.seed).sample(legal, min(int(text), len(legal))), []
    texts = [text.strip() for text in which.split(";") if text.strip()]
    require(
        bool(texts), '--layouts is empty; write all, pipelines, random:N, or layouts as in "fsdp=8; fsdp=4 tensor=2"'
    )
    return _check_all(config, texts, devices)


def _legal(config: RunConfig, which: str, devices: int) -> list[LayoutConfig]:
    """The pipelines, or those and every layout without one, on up to so many devices."""
    legal = [] if which == "pipelines" else legal_layouts(config, devices)
    legal += pipeline_layouts(config, devices)
    require(bool(legal), f"--layouts {which}: no pipeline fits {devices} devices and {config.model.layers} layers")
    return legal


def _check_all(
    config: RunConfig, texts: list[str], devices: int | None
) -> tuple[list[LayoutConfig], list[dict[str, Any]]]:
    layouts, refused = [], []
    known = {f.name for f in fields(LayoutConfig)}
    for text in texts:
        words = text.replace(",", " ").split()
        readable = all(word.partition("=")[0] in known or word.isdigit() for word in words)  # stage_layers=3,4
        try:
            layout = parse_layout(text, config.layout)
            check(replace(config, layout=layout))
            fits = devices is None or layout.device_count <= devices
            require(fits, f"layout '{layout}' needs {layout.device_count} devices, but --devices is {devices}")
            layouts.append(layout)
        except Refused as refusal:
            if not readable:
                raise
            refused.append({"layout": text, "verdict": "refused", "reason": str(refusal)})
    return layouts, refused


def table(results: list[dict[str, Any]], *, with_leaf: bool = True) -> RenderableType:
    """The verdicts as a table, and below it the reason of each layout that differs or is refused.

    `with_leaf` adds the leaf with the largest gradient error, where there is room for it.
    """
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    drawn.add_column("layout", overflow="fold")
    columns = ("verdict", "loss", "gradients", "parameters", "worst leaf")
    for column in columns if with_leaf else columns[:-1]:
        drawn.add_column(column, no_wrap=True, justify="left" if column in ("verdict", "worst leaf") else "right")
    styles = {"equal": "green", "differs": "bold red", "refused": "yellow"}
    for r in results:
        drawn.add_row(
            Text(str(r["layout"])),
            Text(r["verdict"], style=styles[r["verdict"]]),
            *(_error(r.get(key)) for key in ("loss_rel_err", "grad_rel_err_max", "param_rel_err_max")),
            *([Text(str(r.get("grad_worst_leaf") or ""))] if with_leaf else []),
        )
    return Group(drawn, *(line for r in results if r.get("reason") for line in _explained(r)))


def _explained(result: dict[str, Any]) -> list[Text]:
    """Why a layout differs or is refused: one paragraph, and where the difference begins."""
    lines = [Text(), Text(f"{result['layout']}: {result['reason']}", style="yellow")]
    return lines + ([Text(f"where: {result['where']}", style="bold")] if result.get("where") else [])


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
