"""Show the mesh, the layout of every parameter, a pipeline schedule, the presets or a complete configuration."""

import argparse

from rich.console import Console
from rich.table import Table

from meshwright.cli import schedule
from meshwright.cli.common import add_config, add_devices, add_json, print_json, read_config
from meshwright.config import RunConfig, to_table, to_toml
from meshwright.layout import check
from meshwright.presets import PRESETS, parameter_count
from meshwright.report import layout_table, mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    things = parser.add_subparsers(dest="thing", metavar="THING", required=True, parser_class=type(parser))
    for name, (purpose, show, takes_config) in THINGS.items():
        thing = things.add_parser(name, help=purpose, description=f"Show {purpose}.", allow_abbrev=False)
        if takes_config:
            add_config(thing, optional=name in ("mesh", "schedule"))
            add_devices(thing, "check that the layout needs exactly this many devices")
        if name == "schedule":
            schedule.add_arguments(thing)
        add_json(thing)
        thing.set_defaults(show=show)


def run(args: argparse.Namespace) -> int:
    args.show(args)
    return 0


def _show_mesh(args: argparse.Namespace) -> None:
    config = read_config(args)
    check(config, args.devices) if args.config else mesh.check_devices(config.layout, args.devices)
    grid = mesh.grid(config.layout.degrees)
    if args.json:
        print_json({"layout": str(config.layout), **mesh.to_json(grid)})
    else:
        Console(highlight=False).print(mesh.draw(grid))


def _show_layout(args: argparse.Namespace) -> None:
    config = read_config(args)
    check(config, args.devices)
    rows, stages = layout_table.rows(config), layout_table.stages(config)
    if args.json:
        facts = {"layout": str(config.layout), "parameters": parameter_count(config.model)}
        print_json(facts | ({"stages": stages} if stages else {}) | {"rows": rows})
    else:
        Console(highlight=False).print(layout_table.draw(rows, stages))


def _show_config(args: argparse.Namespace) -> None:
    config = read_config(args)
    check(config, args.devices)
    print_json(to_table(config)) if args.json else print(to_toml(config), end="")


def _show_presets(args: argparse.Namespace) -> None:
    configs = {name: make() for name, make in PRESETS.items()}
    if args.json:
        print_json([_preset_row(name, config) for name, config in configs.items()])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("preset", "parameters", "layers", "d_model", "heads/kv", "vocab", "batch"):
        table.add_column(column, justify="left" if column == "preset" else "right", no_wrap=True)
    for name, config in configs.items():
        r = _preset_row(name, config)
        language = config.model.is_language_model
        heads, vocab = (f"{r['heads']}/{r['kv_heads']}", str(r["vocab_size"])) if language else ("", "")
        batch = f"{r['batch_sequences']}x{r['sequence_length']}" if language else str(r["batch_sequences"])
        table.add_row(name, f"{r['parameters']:,}", str(r["layers"]), str(r["d_model"]), heads, vocab, batch)
    Console(highlight=False).print(table)


def _preset_row(name: str, config: RunConfig) -> dict:
    model, train = config.model, config.train
    keys = ("family", "layers", "d_model", "d_ff", "heads", "kv_heads", "head_size", "vocab_size")
    return {
        "preset": name,
        "parameters": parameter_count(model),
        **{key: getattr(model, key) for key in keys},
        "batch_sequences": train.sequences,
        "sequence_length": train.sequence_length,
    }


THINGS = {
    "mesh": ("the mesh: devices, axes and links", _show_mesh, True),
    "layout": ("the layout of every parameter", _show_layout, True),
    "schedule": ("a pipeline schedule: its timeline, its bubble and what it holds", schedule.show, True),
    "presets": ("the presets", _show_presets, False),
    "config": ("the complete configuration", _show_config, True),
}
