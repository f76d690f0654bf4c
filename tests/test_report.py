"""Drawings and the run page: drawn from records alone, equal to them, and safe with any text."""

import html.parser
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.config import LayoutConfig, Refused, parse_layout, to_toml
from meshwright.layout import Layout, letters_of
from meshwright.legal import legal_layouts
from meshwright.presets import parameter_count, resolve
from meshwright.report import charts, layout_table, mesh, records, reference, run

HOSTILE = "</script><script>alert(1)</script><b>&amp;\x00\u2028é"


@pytest.fixture
def config():
    return replace(resolve("llama-demo"), layout=parse_layout("data=2 fsdp=2 tensor=2"))


@pytest.fixture
def directory(tmp_path, config):
    """A run directory as the loop leaves it, with a hostile sample and a NaN step."""
    rows = [
        {
            "step": step,
            "loss": 3 + 4 * math.exp(-step / 20),
            "grad_norm": 1.5,
            "lr": 1e-3,
            "tokens": 4096,
            "tokens_per_s": 5000.0 + step,
            "step_s": 0.8,
            "skipped": step == 7,
        }
        for step in range(1, 41)
    ]
    rows[6]["loss"] = math.nan
    rows.insert(20, {"step": 20, "eval_loss": 5.0625})
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = {
        "layout": str(config.layout),
        "devices": 8,
        "emulated": True,
        "parameters": parameter_count(config.model),
        "unigram_entropy": 6.2125,
        "eval_loss_before": 7.7,
        "eval_loss": 3.75,
        "samples": [{"when": "before", "prompt": "def ", "text": HOSTILE}],
        "data": {"source": HOSTILE, "documents": 1234},
        "versions": {"jax": "0.10.2"},
        "layout_table": layout_table.rows(config),
        "mesh": mesh.to_json(mesh.grid(config.layout.degrees)),
    }
    (tmp_path / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return tmp_path


class Reader(html.parser.HTMLParser):
    """Collects a page's text, its elements and where they are not closed in order."""

    VOID = ("meta", "rect", "line")

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags, self.faults = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def read_page(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader, " ".join(" ".join(reader.text).split())


def test_page_shows_the_records(directory):
    reader, text = read_page(run.write(directory))
    assert not reader.faults and not reader.open
    for shown in (
        "2,410,176",
        "3.75",
        "7.7",
        "6.213",
        "data=2 fsdp=2 tensor=2",
        "8 emulated devices",
        "0.10.2",
        "1,234",
    ):
        assert shown in text, shown
    assert "steps skipped (not finite) 1" in text
    assert "d_model = 192" in text
    assert "f32[L,D@fsdp,N@tensor,H]" in text
    assert not list(directory.glob("*.tmp"))


def test_page_is_alone_and_safe(directory):
    """No element loads anything from outside, and text from the records never becomes markup."""
    reader, text = read_page(run.write(directory))
    for tag, attributes in reader.tags:
        assert tag not in ("link", "img", "iframe", "b") or "style" in attributes
        assert "src" not in attributes and "href" not in attributes
    assert sum(tag == "script" for tag, _ in reader.tags) == 3
    assert "<script>alert(1)</script>" in text


def test_charts_hold_the_recorded_numbers(directory):
    recorded = records.read(directory)
    drawn = {chart["id"]: chart for chart in charts.charts(recorded)}
    assert set(drawn) == {"loss", "lr", "grad_norm", "tokens_per_s"}  # no mfu: it was not recorded
    loss, evaluation = drawn["loss"]["traces"]
    assert loss["x"] == list(range(1, 41))
    assert loss["y"][0] == pytest.approx(3 + 4 * math.exp(-1 / 20)) and loss["y"][6] is None
    assert (evaluation["x"], evaluation["y"]) == ([0, 20, 40], [7.7, 5.0625, 3.75])
    assert drawn["loss"]["reference"]["value"] == 6.2125
    assert "emulated" in drawn["tokens_per_s"]["unit"]
    json.dumps(list(drawn.values()), allow_nan=False)


def test_what_is_not_recorded_is_not_shown(tmp_path, config):
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    page = run.write(tmp_path).read_text(encoding="utf-8")
    for absent in (
        "Samples",
        "Curves",
        "<h2>Mesh",
        "<h2>Data",
        "Software",
        "emulated",
        "unigram entropy",
        "loss, last step",
    ):
        assert absent not in page, absent
    assert (tmp_path / "report.html").stat().st_size < 20_000  # no chart, no plotly


def test_a_long_run_is_thinned_and_says_so(directory):
    recorded = records.read(directory)
    rows = tuple({"step": step, "loss": 1.0} for step in range(1, 3 * charts.MAX_POINTS))
    loss = charts.charts(replace(recorded, steps=rows))[0]
    assert len(loss["traces"][0]["x"]) <= charts.MAX_POINTS
    assert loss["note"] == "one step in 3 is drawn"


def test_killed_and_resumed_records(directory):
    """The last line may be unfinished; a step that ran twice counts once, as it ran last."""
    path = directory / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 30, "loss": 1.25}\n{"step": 31, "lo')
    recorded = records.read(directory)
    assert [row["step"] for row in recorded.steps] == list(range(1, 41))
    assert recorded.steps[29]["loss"] == 1.25
    path.write_text('{"step": 1, "lo\n{"step": 2, "loss": 1.0}\n')
    with pytest.raises(Refused, match="line 1"):
        records.read(directory)


def test_figures_that_are_not_finite(directory):
    facts = json.loads((directory / "run.json").read_text()) | {"eval_loss": math.nan, "unigram_entropy": math.inf}
    (directory / "run.json").write_text(json.dumps(facts))
    _, text = read_page(run.write(directory))
    assert "nan" not in text.lower().replace("unigram", "") and "held-out loss before 7.7" in text


def test_regression_runs_have_no_tokens(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(resolve("residual-demo")))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    assert charts.charts(records.read(tmp_path))[0]["unit"] == "mean squared error"
    read_page(run.write(tmp_path))


# ---- mesh ------------------------------------------------------------------------------------------------


def shown(renderable, width=100):
    console = Console(width=width, color_system=None, record=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


@pytest.mark.parametrize(
    "layout",
    [
        "data=1",
        "tensor=8",
        "data=2 fsdp=2 tensor=2",
        "data=4 tensor=2",
        "data=3 fsdp=5 tensor=4",
        "fsdp=256",
        "data=8 tensor=16",
    ],
)
@pytest.mark.parametrize("width", [80, 200])
def test_mesh_shows_every_device_once(layout, width):
    grid = mesh.grid(parse_layout(layout).degrees)
    ids = sorted(int(i) for i in re.findall(r"\[ *(\d+)\]", shown(mesh.draw(grid), width)))
    assert ids == list(range(grid.device_count))
    assert sorted(i for block in grid.blocks for row in block.ids for i in row) == ids
    svg = mesh.to_svg(grid)
    assert sorted(map(int, re.findall(r'class="device-id">(\d+)<', svg))) == ids


@pytest.mark.parametrize("layout", ["data=1", "tensor=8", "data=2 fsdp=2 tensor=2"])
def test_mesh_survives_its_record(layout):
    grid = mesh.grid(parse_layout(layout).degrees, emulated=False)
    assert mesh.from_json(json.loads(json.dumps(mesh.to_json(grid)))) == grid


def test_mesh_neighbours_differ_in_one_axis():
    """Along a row only the fastest axis changes, down the rows the next: ids step by 1 and by its degree."""
    grid = mesh.grid(parse_layout("data=2 fsdp=3 tensor=4").degrees)
    assert [block.place for block in grid.blocks] == [(("data", 0),), (("data", 1),)]
    assert grid.blocks[1].ids == ((12, 13, 14, 15), (16, 17, 18, 19), (20, 21, 22, 23))
    assert [axis for axis, _, _ in mesh.links(grid)] == ["tensor", "fsdp", "data"]


def test_mesh_shows_the_given_order_and_no_emulation():
    grid = mesh.grid(parse_layout("tensor=8").degrees, [0, 1, 2, 3, 6, 7, 4, 5], emulated=False)
    text = shown(mesh.draw(grid))
    assert re.findall(r"\d", text.split("[", 1)[1].split("\n")[0]) == list("01236745")
    assert "emulated" not in text
    assert "emulated" in shown(mesh.draw(mesh.grid(parse_layout("tensor=8").degrees)))


def test_a_large_mesh_is_described_not_drawn():
    text = shown(mesh.draw(mesh.grid(parse_layout("data=64 fsdp=64").degrees)))
    assert "4096 devices" in text and len(text.splitlines()) < 12


# ---- layout table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny", "residual-demo"])
def test_shards_together_are_the_parameters(name):
    """On every legal layout, a shard times the degrees that split it is the whole array (V padded)."""
    preset = resolve(name)
    for layout_config in legal_layouts(preset, 8):
        chosen = replace(preset, layout=layout_config)
        layout = Layout(layout_config, preset.model)
        for row in layout_table.rows(chosen):
            spec = layout.stored(letters_of(row["name"]))
            for size, shard, axes in zip(row["shape"], row["shard_shape"], spec, strict=True):
                assert size == shard * math.prod(layout_config.degrees[axis] for axis in axes)
            assert row["bytes_per_device"] == 4 * math.prod(row["shard_shape"])


def test_bytes_on_one_device_are_all_parameters(config):
    rows = layout_table.rows(replace(config, layout=LayoutConfig()))
    assert sum(row["bytes_per_device"] for row in rows) == 4 * parameter_count(config.model)
    assert {row["gradient"] for row in rows} == {"already whole"}


@pytest.mark.parametrize(
    ("layout", "matrix", "norm"),
    [
        ("data=8", "sum over data", "sum over data"),
        ("fsdp=8", "scatter-sum over fsdp, layer by layer", "sum over fsdp"),
        ("fsdp=8 gather=step", "scatter-sum over fsdp", "sum over fsdp"),
        ("fsdp=8 zero=2", "scatter-sum over fsdp", "sum over fsdp"),
        ("fsdp=8 zero=1", "sum over fsdp", "sum over fsdp"),
        ("fsdp=8 zero=0", "sum over fsdp", "sum over fsdp"),
        ("tensor=4", "already whole", "sum over tensor"),
        ("tensor=4 sequence_parallel=false", "already whole", "already whole"),
        (
            "data=2 fsdp=2 tensor=2",
            "scatter-sum over fsdp, layer by layer; sum over data",
            "sum over data, fsdp, tensor",
        ),
    ],
)
def test_gradients_are_described_as_the_layout_moves_them(config, layout, matrix, norm):
    rows = {row["name"]: row for row in layout_table.rows(replace(config, layout=parse_layout(layout)))}
    assert rows["layers/mlp/up_LDF"]["gradient"] == matrix
    assert rows["final_norm/scale_D"]["gradient"] == norm


def test_shared_heads_are_summed_over_tensor(config):
    rows = {row["name"]: row for row in layout_table.rows(replace(config, layout=parse_layout("tensor=8")))}
    assert rows["layers/attention/k_LDKH"]["gradient"] == "sum over tensor"
    assert rows["layers/attention/q_LDNH"]["gradient"] == "already whole"


def test_table_fits_a_terminal(config):
    text = shown(layout_table.draw(layout_table.rows(config)), width=80)
    assert "…" not in text
    assert "f32[L,N@tensor,H,D@fsdp]" in text
    assert "2.3 MiB" in text


def test_bytes_text():
    assert [layout_table.bytes_text(n) for n in (0, 1023, 1536, 2**20, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "5120.0 GiB",
    ]


# ---- reference -------------------------------------------------------------------------------------------


def test_configuration_reference_is_current():
    path = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert path.read_text(encoding="utf-8") == reference.page(), (
        "run: python -m meshwright.report.reference > " + path.name
    )
