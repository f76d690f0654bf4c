"""`meshwright show schedule`: pictures, page, trace and text are the record's, whole and in the right place."""

import html.parser
import io
import json
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from meshwright.cli.main import main
from meshwright.report import schedule as report
from meshwright.report import schedule_page, schedule_svg, schedule_text, schedule_trace
from meshwright.schedules.files import write_csv
from meshwright.schedules.generate import NAMES, make
from meshwright.schedules.simulate import Times, asynchronous, executor, executor_form

SVG = "{http://www.w3.org/2000/svg}"
UNIT = Times(1, 1, 1)
UNEVEN = Times(Fraction(1), Fraction("1.3"), Fraction("0.4"), Fraction("0.15"))
SIZES = [("1f1b", 1, 1, 1), ("gpipe", 2, 3, 1), ("interleaved", 3, 5, 3), ("zb-h1", 4, 8, 1), ("zb-v", 4, 9, 1)]
SIZES += [("dualpipe-v", 3, 12, 1), ("eager-1f1b", 12, 14, 1), ("zb-h2", 5, 11, 1)]
CASES = [(*size, times) for size in SIZES for times in (UNIT, UNEVEN)]


def record(name, R, M, chunks=1, times=UNIT, **more):
    return report.record(make(name, R, M, chunks), times, NAMES[name], **more)


def show(*arguments):
    return main(["show", "schedule", *map(str, arguments)])


def spoken(shown, width, colors=False):
    """The terminal's drawing as lines."""
    console = Console(
        width=width, file=io.StringIO(), color_system="truecolor" if colors else None, force_terminal=colors
    )
    with console.capture() as captured:
        console.print(schedule_text.draw(shown, width, colors=colors))
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()


# ---- the record ----

KEYS = """schedule what timeline stages microbatches chunks placement splits_backward times ticks total_time bubble_fraction
stage_bubble_fraction busy_fraction executor peak_in_flight in_flight table events transfers"""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("as_run", [False, True])
def test_the_record_is_the_timeline(case, as_run):
    name, R, M, chunks, times = case
    schedule = make(name, R, M, chunks)
    shown = report.record(schedule, times, "", as_run=as_run)
    form = executor_form(schedule, times)
    timeline = executor(form, times) if as_run else asynchronous(schedule, times)
    assert list(shown) == KEYS.split()
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert (shown["total_time"], shown["bubble_fraction"]) == (float(timeline.total), float(timeline.bubble_fraction))
    assert (
        shown["executor"]["total_time"]
        == float(executor(form, times).total)
        >= float(asynchronous(schedule, times).total)
    )
    assert shown["table"] == [[[str(op) for op in ops] for ops in row] for row in timeline.schedule.table]
    assert shown["peak_in_flight"] == [max(held for _, held in steps) for steps in shown["in_flight"]]
    ends = {(e["stage"], e["op"]): e["end"] for e in shown["events"]}
    assert len(ends) == len(shown["events"]) == R * M * shown["chunks"] * len(schedule.kinds)
    for e in shown["events"]:
        for need in e["waits_for"]:
            assert ends[need["stage"], need["op"]] <= need["there_at"] <= e["start"]


def test_times_are_exact_and_a_lone_b_is_the_whole_backward(capsys):
    assert (
        show("--schedule", "1f1b", "--stages", 3, "--microbatches", 5, "--times", "F=0.1,B=.2,send=0.3", "--json") == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["times"] == {"F": 0.1, "B": 0.2, "W": 0, "send": 0.3}
    assert shown["events"][2]["start"] == 0.2  # not 0.30000000000000004 - 0.1
    for given, whole in (("F=1", 2), ("W=3", 4), ("B=2,W=1", 3), ("B=1.5", 1.5)):
        assert show("--schedule", "1f1b", "--stages", 3, "--microbatches", 5, "--times", given, "--json") == 0
        assert json.loads(capsys.readouterr().out)["times"]["B"] == whole
    assert show("--schedule", "zb-h1", "--stages", 3, "--microbatches", 5, "--times", "B=1.5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["times"] == {"F": 1, "B": 1.5, "W": 1, "send": 0}


# ---- text ----


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [44, 80, 200])
def test_plain_text_has_every_operation_once_in_order(case, width):
    shown = record(*case)
    lines = spoken(shown, width)
    assert max(map(len, lines)) <= width
    until = next(i for i, line in enumerate(lines) if line.startswith("F forward"))
    rows = ["" for _ in range(shown["stages"])]
    for line in lines[1:until]:
        found = re.match(r"stage (\d+) +(.*)", line)
        if found:
            rows[int(found[1])] += found[2] + " "
    for stage, row in enumerate(rows):
        assert re.findall(r"[FBW]\d+(?:\.\d+)?", row) == [e["op"] for e in shown["events"] if e["stage"] == stage]
        assert not re.sub(r"[FBW]\d+(\.\d+)?|[·─ ]", "", row)


@pytest.mark.parametrize("case", CASES)
def test_the_text_says_the_numbers(case):
    shown = record(*case)
    text = " ".join(" ".join(spoken(shown, 100)).split())
    assert f"Bubble {shown['bubble_fraction']:.1%}" in text
    assert f"In flight at most {max(shown['peak_in_flight'])} " in text
    assert f"bubble {shown['executor']['bubble_fraction']:.1%}." in text
    assert NAMES[case[0]] in text
    for stage, (busy, peak) in enumerate(zip(shown["busy_fraction"], shown["peak_in_flight"], strict=True)):
        assert re.search(rf"stage {stage} +{busy:.1%} +{peak} ", text)


@pytest.mark.parametrize(
    ("name", "R", "M", "width"), [("1f1b", 16, 64, 120), ("zb-v", 16, 64, 100), ("gpipe", 4, 1000, 80)]
)
def test_large_schedules_stay_on_a_screen_or_two(name, R, M, width):
    lines = spoken(record(name, R, M), width, colors=True)
    assert max(map(len, lines)) <= width
    timeline = next(i for i, line in enumerate(lines) if line.strip().startswith("F "))
    assert timeline <= schedule_text.MOST_LINES + 6


def test_with_colors_a_box_has_its_microbatch_and_its_kinds_color():
    shown = record("zb-v", 2, 3)
    console = Console(width=80, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    with console.capture() as captured:
        console.print(schedule_text.draw(shown, 80, colors=True))
    out = captured.get()
    for kind in "FBW":
        for chunk in (0, 1):
            r, g, b = (int(report.shade(kind, chunk, 2)[i : i + 2], 16) for i in (1, 3, 5))
            assert f"48;2;{r};{g};{b}m" in out
    assert len({report.shade(kind, chunk, 4) for kind in "FBW" for chunk in range(4)}) == 12


def test_a_sparkline_is_what_is_held():
    shown = record("1f1b", 4, 8)
    assert schedule_text.sparkline(shown, 3, 33) == " " * 3 + "▂" * 24 + " " * 6
    for stage in range(4):
        line = schedule_text.sparkline(shown, stage, 66)
        peak = shown["peak_in_flight"][stage]
        assert max(line) == schedule_text.BARS[-(-peak * 8 // 4)]
        assert line.lstrip(" ")[0] == schedule_text.BARS[2]


# ---- the picture ----


def picture(shown, **more):
    root = ElementTree.fromstring(schedule_svg.picture(shown, **more))
    operations = []
    for g in root.iter(f"{SVG}g"):
        title = g.find(f"{SVG}title")
        if title is not None:
            box = g.find(f"{SVG}rect")
            x, y, w = (float(box.get(key)) for key in ("x", "y", "width"))
            operations.append((g, title.text, x, x + w, y))
    return root, operations


@pytest.mark.parametrize("case", CASES)
def test_the_picture_has_every_operation_once_and_none_over_another(case):
    shown = record(*case)
    _, operations = picture(shown, linked=True)
    expected = Counter(f"{e['stage']}:{e['op']}" for e in shown["events"])
    assert Counter(g.get("data-op") for g, *_ in operations) == expected
    rows = {}
    for g, _, first, last, y in operations:
        rows.setdefault((g.get("data-op").split(":")[0], y), []).append((first, last))
    assert len(rows) == shown["stages"]
    for boxes in rows.values():
        assert all(a[1] <= b[0] for a, b in pairwise(boxes))
    widths = [
        (last - first + 1) / (e["end"] - e["start"])
        for (_, _, first, last, _), e in zip(operations, shown["events"], strict=True)
    ]
    assert max(widths) < 1.01 * min(widths)  # of a unit of time


@pytest.mark.parametrize("case", CASES)
def test_arrows_go_from_what_makes_to_what_uses(case):
    shown = record(*case)
    root, operations = picture(shown, linked=True)
    place = {g.get("data-op"): (first, last, y) for g, _, first, last, y in operations}
    needs = {g.get("data-op"): g.get("data-needs").split() for g, *_ in operations}
    arrows = [path for path in root.iter(f"{SVG}path") if path.get("data-from")]
    assert len(arrows) == len(shown["transfers"])
    for arrow in arrows:
        made, used = arrow.get("data-from"), arrow.get("data-to")
        assert made in needs[used]
        x0, y0, x1, y1 = map(float, re.fullmatch(r"M(\S+) (\S+)L(\S+) (\S+)", arrow.get("d")).groups())
        assert x0 < x1
        assert place[made][0] < x0 <= place[made][1] + 1  # leaves inside the box that makes it
        assert x1 <= place[used][0] + 4  # arrives when it is used, or before
        top, bottom = sorted((y0, y1))
        assert {place[made][2], place[used][2]} & {bottom, top} and bottom > top
    assert sum(len(n) for n in needs.values()) == sum(len(e["waits_for"]) for e in shown["events"])


def test_the_picture_says_what_it_waits_for_and_stands_alone():
    shown = record("zb-h1", 4, 8, times=Times(1, 1, 1, 0.5))
    root, operations = picture(shown)
    titles = [title for _, title, *_ in operations]
    assert "F0: forward, microbatch 0\nstage 1, from 1.5 to 2.5\nwaits for F0 of stage 0, there at 1.5" in titles
    assert titles[0].endswith("waits for nothing")
    text = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    for words in ("zb-h1", "4 stages, 8 microbatches", "Bubble", "In flight at most 4", "stage 3", "peak 4", "busy"):
        assert words in text
    assert root.get("role") == "img" and "Bubble" in root.get("aria-label")
    written = schedule_svg.picture(shown)
    assert "prefers-color-scheme: dark" in written
    assert not re.findall(r"(?:href|src|url)\s*[=(]\s*['\"]?(?!#)", written.replace('xmlns="http', ""))


def test_the_step_chart_holds_what_the_record_says():
    shown = record("1f1b", 4, 6)
    root, _ = picture(shown)
    charts = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("class") == "held"]
    assert len(charts) == 4
    for chart, steps, peak in zip(charts, shown["in_flight"], shown["peak_in_flight"], strict=True):
        floor = float(re.match(r"M\S+ (\S+?)H", chart)[1])
        heights = [floor - float(v) for v in re.findall(r"V([\d.]+)", chart)]
        assert len(heights) == len(steps)
        assert [round(h / max(heights) * peak, 3) for h in heights] == [held for _, held in steps]


# ---- the page ----


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.words, self.tags, self.faults = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


@pytest.mark.parametrize("case", CASES[::3])
def test_the_page_is_whole_alone_and_says_the_numbers(case):
    shown = record(*case)
    written = schedule_page.page(shown)
    reader = Reader()
    reader.feed(written)
    assert not reader.faults and not reader.open
    assert not [tag for tag, attributes in reader.tags if {"href", "src"} & set(attributes) or tag in ("link", "img")]
    assert "@import" not in written and "url(http" not in written and "fetch(" not in written
    text = " ".join(" ".join(reader.words).split())
    for sentence in report.sentences(shown):
        assert sentence in text
    assert sum("data-op" in attributes for _, attributes in reader.tags) == len(shown["events"])
    table = next(words for words in reader.words if words.startswith("tick   "))
    assert Counter(re.findall(r"[FBW]\d+(?:\.\d+)?", table)) == Counter(e["op"] for e in shown["events"])


def test_a_hostile_name_stays_text(tmp_path, capsys):
    path = tmp_path / "<b>&[red].csv"
    write_csv(make("1f1b", 2, 2), path)
    out = tmp_path / "page.html"
    assert show("--schedule", path, "--html", out, "--svg", tmp_path / "p.svg", "--trace", tmp_path / "t.json") == 0
    assert "<b>&[red]  2 stages" in capsys.readouterr().out
    assert "<h1>&lt;b&gt;&amp;[red]</h1>" in out.read_text()
    assert ElementTree.parse(tmp_path / "p.svg").getroot().tag == f"{SVG}svg"
    assert json.loads((tmp_path / "t.json").read_text())


# ---- the trace ----


@pytest.mark.parametrize("case", CASES)
def test_the_trace_has_threads_operations_arrows_and_counters(case):
    shown = record(*case)
    events = json.loads(schedule_trace.trace(shown))["traceEvents"]
    by_phase = {phase: [e for e in events if e["ph"] == phase] for phase in "MXsfC"}
    assert sum(map(len, by_phase.values())) == len(events)
    assert all({"name", "pid", "tid", "ts"} <= set(e) for e in events)
    names = [e["args"]["name"] for e in by_phase["M"] if e["name"] == "thread_name"]
    assert names == [f"stage {stage}" for stage in range(shown["stages"])]
    assert len(by_phase["X"]) == len(shown["events"])
    for stage in range(shown["stages"]):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in by_phase["X"] if e["tid"] == stage]
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))
    inside = lambda e: [  # noqa: E731
        x["name"] for x in by_phase["X"] if x["tid"] == e["tid"] and x["ts"] <= e["ts"] < x["ts"] + x["dur"]
    ]
    assert [e["id"] for e in by_phase["s"]] == [e["id"] for e in by_phase["f"]] == list(range(len(shown["transfers"])))
    for start, finish, t in zip(by_phase["s"], by_phase["f"], shown["transfers"], strict=True):
        assert (inside(start), inside(finish)) == ([t["op"]], [t["used_by"]])
        assert start["ts"] < finish["ts"] and finish["bp"] == "e"
    for stage in range(shown["stages"]):
        held = [e["args"]["held"] for e in by_phase["C"] if e["tid"] == stage]
        assert max(held) == shown["peak_in_flight"][stage] and held[-1] == 0


# ---- the command ----


def test_the_command_writes_what_is_asked_and_one_json_document(tmp_path, capsys):
    files = {flag: tmp_path / f"out.{flag}" for flag in ("svg", "html", "trace", "csv")}
    options = [word for flag, path in files.items() for word in (f"--{flag}", path)]
    assert show("--schedule", "zb-h1", "--stages", 4, "--microbatches", 8, "--json", *options) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == record("zb-h1", 4, 8)
    assert files["svg"].read_text() == schedule_svg.picture(shown)
    assert files["html"].read_text() == schedule_page.page(shown)
    assert files["trace"].read_text() == schedule_trace.trace(shown)
    assert show("--schedule", files["csv"].rename(tmp_path / "mine.csv"), "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["schedule"], again["table"]) == ("mine", shown["table"])
    assert show("--schedule", "zb-h1", "--stages", 4, "--microbatches", 8, *options) == 0
    printed = capsys.readouterr().out
    assert all(f"wrote {path}" in printed for path in files.values())


def test_the_form_that_runs_is_drawn_on_request(capsys):
    assert show("--schedule", "1f1b", "--stages", 4, "--microbatches", 8, "--as-run", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["timeline"], shown["ticks"]) == ("executor", shown["executor"]["ticks"])
    assert shown["total_time"] == shown["executor"]["total_time"]


def test_zb_auto_keeps_its_limit(capsys):
    for limit in (1, 2, 4):
        assert show("--schedule", "zb-auto", "--stages", 4, "--microbatches", 8, "--memory-limit", limit, "--json") == 0
        assert max(json.loads(capsys.readouterr().out)["peak_in_flight"]) <= limit


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("pipe=4 schedule=1f1b microbatches=8", ("1f1b", 4, 8, 1)),
        ("pipe=2 schedule=interleaved microbatches=8", ("interleaved", 2, 8, 2)),
        ("pipe=4 data=2 schedule=zb-v microbatches=16", ("zb-v", 4, 16, 2)),
    ],
)
def test_a_configuration_says_what_to_show(layout, expected, capsys):
    assert show("llama-tiny", "--layout", layout, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schedule"], shown["stages"], shown["microbatches"], shown["chunks"]) == expected


GOOD = ["--schedule", "zb-h1", "--stages", "4", "--microbatches", "8"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a schedule, as in --schedule zb-h1 --stages 4"),
        (["--schedule", "zbh1", "--stages", "4", "--microbatches", "8"], "Did you mean 'zb-h1'?"),
        (["--schedule", "zb-h1"], "needs --stages and --microbatches"),
        (["--schedule", "zb-h1", "--stages", "4"], "needs --microbatches, as in"),
        (["--schedule", "zb-h1", "--stages", "4.5", "--microbatches", "8"], "'4.5' must be a whole number from 1"),
        (["--schedule", "zb-h1", "--stages", "four", "--microbatches", "8"], "'four' must be a whole number"),
        (["--schedule", "zb-h1", "--stages", "0", "--microbatches", "8"], "'0' must be a whole number from 1"),
        (["--schedule", "zb-h1", "--stages", "4", "--microbatches", "-8"], "--microbatches"),
        (["--schedule", "zb-h1", "--stages", "9" * 400, "--microbatches", "8"], "must be a whole number"),
        (["--schedule", "1f1b", "--stages", "2000", "--microbatches", "8"], "2,000 stages are too many to show"),
        (["--schedule", "1f1b", "--stages", "100", "--microbatches", "9000"], "too much to show"),
        (
            ["--schedule", "zb-v", "--stages", "4", "--microbatches", "8", "--chunks", "3"],
            "zb-v has 2 chunks per stage",
        ),
        ([*GOOD, "--times", "F=1;B=2"], "write some of F=1,B=1,W=1,send=0.1"),
        ([*GOOD, "--times", "F"], "write some of F=1,B=1,W=1,send=0.1"),
        ([*GOOD, "--times", ""], "write some of"),
        ([*GOOD, "--times", "G=1"], "'G=1'"),
        ([*GOOD, "--times", "F=0"], "'F=0' must be above 0"),
        ([*GOOD, "--times", "F=1,W=-1"], "'W=-1' must be above 0"),
        ([*GOOD, "--times", "send=-1"], "'send=-1' must be above 0; only send may be 0"),
        ([*GOOD, "--times", "F=nan"], "is not a time"),
        ([*GOOD, "--times", "F=1e999999999"], "is not a time"),
        ([*GOOD, "--times", "F=1,F=2"], "names F twice"),
        ([*GOOD, "--memory-limit", "3"], "--memory-limit is for zb-auto"),
        ([*GOOD, "--svg", "nowhere/a.svg"], "--svg 'nowhere/a.svg' cannot be written"),
        ([*GOOD, "--html", "."], "--html '.' cannot be written"),
        ([*GOOD, "--trace", ""], "--trace '.' cannot be written"),
        ([*GOOD, "--csv", "nowhere/a.csv"], "--csv 'nowhere/a.csv' cannot be written"),
        (["--schedule", "none.csv"], "there is no schedule file 'none.csv'"),
        (["--schedule", "fault.csv"], "fault.csv, line 3: tick 0, stage 0, B0: uses F0 of the same stage"),
        (["--schedule", "good.csv", "--stages", "3"], "good.csv is for stages=2, not --stages 3"),
        (["--schedule", "good.csv", "--memory-limit", "3"], "--memory-limit is for zb-auto"),
        (["llama-tiny"], "has one stage (layout.pipe=1)"),
        (["llama-tiny", "--layout", "pipe=4 microbatches=8", "--stages", "4"], "--stages cannot"),
        (["llama-tiny", "--layout", "pipe=4 schedule=1fb microbatches=8"], "'1f1b'"),
        (["llama-tiny", "--layout", "pipe=4 schedule=good.csv microbatches=8"], "layout.pipe"),
    ],
)
def test_bad_requests_get_one_short_message(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fault.csv").write_text("tick,stage,op,microbatch\n1,0,F,0\n0,0,B,0\n")
    write_csv(make("1f1b", 2, 3), tmp_path / "good.csv")
    before = sorted(tmp_path.iterdir())
    assert show(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("meshwright: ") and words in err
    assert len(err.splitlines()) <= 2 and len(err) < 900
    assert sorted(tmp_path.iterdir()) == before


def test_it_imports_no_jax_and_works_in_a_pipe(tmp_path):
    program = "import sys; from meshwright.cli import main; main.main(sys.argv[1:]); sys.exit('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "show", "schedule", *GOOD, "--html", "page.html"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and "F0 F1 F2 F3" in done.stdout
    assert not [line for line in done.stdout.splitlines() if len(line) > 80]


# ---- the pictures of the documentation ----

DOCS = Path(__file__).parent.parent / "docs"
COMMAND = re.compile(r"^meshwright (show schedule .*--svg docs/schedules/(\S+\.svg).*)$", re.MULTILINE)


def test_the_pictures_in_the_documentation_are_what_the_commands_make(tmp_path, monkeypatch, capsys):
    page = (DOCS / "schedules.md").read_text()
    commands = {file: command for command, file in COMMAND.findall(page)}
    assert set(commands) == {path.name for path in (DOCS / "schedules").iterdir()}
    assert all(f"(schedules/{file})" in page for file in commands)
    assert set(NAMES) <= {Path(file).stem for file in commands}
    (tmp_path / "docs" / "schedules").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for file, command in commands.items():
        assert main(command.split()) == 0
        made, kept = Path("docs/schedules", file).read_text(), (DOCS / "schedules" / file).read_text()
        assert made == kept, f"run: meshwright {command}"


def test_the_table_in_the_documentation_is_what_the_command_says():
    rows = re.findall(
        r"^\| (\S+) \| (\S+%) \| (\S+%) \| (\S+) \| (\S+) \| (\d+) \| (\S+%) \|$",
        (DOCS / "schedules.md").read_text(),
        re.M,
    )
    assert [row[0] for row in rows] == list(NAMES)
    for name, *values in rows:
        chunks = make(name, 4, 8, 2 if name == "interleaved" else 1).chunks
        part = Fraction(1, chunks)
        shown = record(name, 4, 8, 2 if name == "interleaved" else 1, times=Times(part, part, part))
        assert values == [
            report.share(shown["bubble_fraction"]),
            report.share(shown["stage_bubble_fraction"]),
            report.text(shown["total_time"]),
            report.text(max(shown["peak_in_flight"]) / chunks),
            str(shown["executor"]["ticks"]),
            report.share(shown["executor"]["bubble_fraction"]),
        ]


def test_the_example_file_in_the_documentation_is_right(tmp_path, capsys):
    lines = re.search(r"^tick,stage,op,microbatch,chunk\n(?:\d.*\n)+", (DOCS / "schedules.md").read_text(), re.M)
    assert lines
    (tmp_path / "my.csv").write_text(lines[0])
    assert show("--schedule", tmp_path / "my.csv") == 0
