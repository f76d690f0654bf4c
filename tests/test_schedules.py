"""Pipeline schedules as data: the published tick counts and peaks, and what the validator must find."""

from dataclasses import replace

import pytest

from meshwright.config import Refused
from meshwright.schedules.files import read_csv, write_csv
from meshwright.schedules.generate import NAMES, make
from meshwright.schedules.pack import pack, segments
from meshwright.schedules.place import from_orders
from meshwright.schedules.table import Op, Schedule
from meshwright.schedules.validate import validate

GRID = [(R, M) for R in range(1, 9) for M in (*range(1, 13), 16, 17, 23, 24)]
V_SHAPED = ("zb-v", "dualpipe-v")


def longest_stage(schedule: Schedule) -> int:
    """Ticks from the first operation to the last one on the stage where that is longest."""
    spans = []
    for stage in range(schedule.stages):
        ticks = [t for t, row in enumerate(schedule.table) if row[stage]]
        spans.append(ticks[-1] - ticks[0] + 1)
    return max(spans)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "zb-auto"])
def test_every_size_gives_a_right_table(name):
    for R, M in [*GRID, (3, 40), (12, 7), (16, 33)]:
        for chunks in (2, 3, 4) if name == "interleaved" else (1,):
            schedule = validate(make(name, R, M, chunks))
            assert (schedule.name, schedule.stages, schedule.microbatches) == (name, R, M)
            assert all(len(ops) <= 1 for row in schedule.table for ops in row)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_plain_pipelines_take_two_ticks_per_microbatch_and_stage_to_fill(name):
    for R, M in GRID:
        assert len(make(name, R, M).table) == 2 * (M + R - 1)  # Huang et al. 2019; Narayanan et al. 2021, section 2.2.1


def test_what_plain_pipelines_hold():
    for R, M in GRID:
        stages = range(R)
        assert make("gpipe", R, M).peak_in_flight() == tuple(M for _ in stages)
        assert make("1f1b", R, M).peak_in_flight() == tuple(min(M, R - s) for s in stages)
        assert make("eager-1f1b", R, M).peak_in_flight() == tuple(min(M, 2 * (R - s) - 1) for s in stages)


@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_has_the_bubble_of_a_single_chunk(v):
    for R, M in GRID:
        schedule = make("interleaved", R, M, v)
        whole = [min(v * M, 2 * (R - s - 1) + (v - 1) * R + 1) for s in range(R)]
        assert all(held <= most for held, most in zip(schedule.peak_in_flight(), whole, strict=True))
        if M % R == 0:  # Narayanan et al. 2021, section 2.2.2
            assert len(schedule.table) == 2 * (v * M + R - 1)
            assert schedule.peak_in_flight() == tuple(whole)
        else:  # the last group is not full: chunks wait for what is missing
            assert len(schedule.table) <= 2 * (v * M + R - 1) + 2 * (v - 1) * (R - M % R)


def test_zb_h1_holds_what_1f1b_holds_with_a_third_of_its_bubble():
    for R, M in GRID:
        schedule = make("zb-h1", R, M)
        assert max(schedule.peak_in_flight()) == min(M, R)
        if M >= R:  # Qi et al. 2023, table 2: (R-1)(F + B - W)
            assert len(schedule.table) == 3 * M + R - 1 == longest_stage(schedule)


def test_zb_h2_has_no_bubble_inside_a_stage():
    for R, M in GRID:
        schedule = make("zb-h2", R, M)
        assert max(schedule.peak_in_flight()) == min(M, 2 * R - 1)
        if M >= 2 * R - 1:  # Qi et al. 2023, table 2: (R-1)(F + B - 2W)
            assert longest_stage(schedule) == 3 * M
            assert len(schedule.table) == 3 * M + R - 1  # the last stage starts, and ends, R-1 later


def test_zb_v_has_no_bubble_inside_a_stage_and_holds_what_1f1b_holds():
    for R, M in GRID:
        schedule = make("zb-v", R, M)
        assert (schedule.placement, schedule.chunks) == ("v", 2)
        assert max(schedule.peak_in_flight()) == 2 * min(M, R)  # in halves of 1F1B's stage
        if M >= 2 * R - 1:
            assert longest_stage(schedule) == 6 * M
            assert len(schedule.table) == 6 * M + R - 1


def test_dualpipe_v_holds_one_chunk_more_than_twice_the_stages():
    for R, M in GRID:
        schedule = make("dualpipe-v", R, M)
        assert (schedule.placement, schedule.chunks) == ("v", 2)
        assert max(schedule.peak_in_flight()) <= min(2 * M, 2 * R + 1)  # DualPipe's README: PP + 1, of PP = 2R
        if M >= 2 * R:
            assert max(schedule.peak_in_flight()) == 2 * R + 1
            assert len(schedule.table) == 6 * M + R - 1


def test_names_and_sizes_that_do_not_exist_are_refused():
    with pytest.raises(Refused, match=r"'1fb1' is not known; known: gpipe, .* Did you mean '1f1b'"):
        make("1fb1", 4, 8)
    with pytest.raises(Refused, match=r"interleaved needs layout.chunks of at least 2, not 1"):
        make("interleaved", 4, 8)
    with pytest.raises(Refused, match=r"zb-v has 2 chunks per stage, not layout.chunks=3"):
        make("zb-v", 4, 8, 3)
    with pytest.raises(Refused, match=r"1f1b has 1 chunk per stage, not layout.chunks=2"):
        make("1f1b", 4, 8, 2)
    with pytest.raises(Refused, match=r"layout.microbatches=0 must be at least 1"):
        make("gpipe", 4, 0)


# ---- the validator: each kind of fault, planted ----


def move(schedule: Schedule, stage: int, op: Op, tick: int) -> Schedule:
    """The table with one operation moved to another tick."""
    table = [[tuple(o for o in ops if (s, o) != (stage, op)) for s, ops in enumerate(row)] for row in schedule.table]
    table[tick][stage] = (*table[tick][stage], op)
    return replace(schedule, table=tuple(map(tuple, table)))


def swap(schedule: Schedule, stage: int, a: Op, b: Op | None) -> Schedule:
    """The table with `b` (or nothing) where stage `stage` does `a`."""
    put = lambda s, o: (b if (s, o) == (stage, a) else o,)  # noqa: E731
    table = tuple(
        tuple(tuple(x for o in ops for x in put(s, o) if x) for s, ops in enumerate(row)) for row in schedule.table
    )
    return replace(schedule, table=table)


GOOD = make("1f1b", 3, 4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            move(GOOD, 1, Op("F", 0), 0),
            r"tick 0, stage 1, F0: uses F0 of stage 0, which is done in tick 0; it must be a tick",
        ),
        (move(GOOD, 0, Op("B", 0), 4), r"tick 4, stage 0, B0: uses B0 of stage 1, which is done in tick 4"),
        (move(GOOD, 2, Op("B", 1), 1), r"tick 1, stage 2, B1: uses F1 of the same stage, which is done in tick 4"),
        (swap(GOOD, 2, Op("B", 1), None), r"stage 2, B1: is never done"),
        (swap(GOOD, 2, Op("B", 1), Op("B", 0)), r"tick 5, stage 2, B0: is done a second time; the first was in tick 3"),
        (swap(GOOD, 1, Op("F", 1), Op("F", 4)), r"tick 2, stage 1, F4: microbatch 4 does not exist; there are 0 to 3"),
        (swap(GOOD, 1, Op("F", 1), Op("F", 1, 1)), r"tick 2, stage 1, F1.1: chunk 1 does not exist; there are 0 to 0"),
        (swap(GOOD, 1, Op("F", 1), Op("W", 1)), r"tick 2, stage 1, W1: is of no known kind; this schedule has F, B"),
        (move(GOOD, 0, Op("F", 1), 0), r"tick 0, stage 0, F1: comes after F; .* at most one F, one B and one W"),
        (replace(GOOD, splits_backward=True), r"stage 0, W0: is never done"),
        (replace(GOOD, stages=4), r"tick 0: has operations for 3 stages, but there are 4"),
        (replace(GOOD, placement="u"), r"placement='u' is not known; allowed: straight, v"),
        (replace(GOOD, delay=2), r"tick 1, stage 1, F0: uses F0 of stage 0, .*; it must be 2 ticks before"),
        (replace(make("zb-v", 2, 3), placement="straight"), r"uses F0(.1)? of stage"),
    ],
)
def test_a_fault_is_found_and_named(bad, message):
    with pytest.raises(Refused, match=message):
        validate(bad)


def test_w_comes_after_its_b():
    schedule = make("zb-h1", 2, 2)
    assert schedule.order(1) == [Op("F", 0), Op("B", 0), Op("F", 1), Op("B", 1), Op("W", 0), Op("W", 1)]
    with pytest.raises(Refused, match=r"tick 1, stage 1, W0: uses B0 of the same stage, which is done in tick 2"):
        validate(move(schedule, 1, Op("W", 0), 1))


def test_orders_that_wait_for_each_other_are_refused_by_stage():
    F, B = (lambda m: Op("F", m)), (lambda m: Op("B", m))
    with pytest.raises(
        Refused, match=r"stage 0 waits with B0 for B0 of stage 1; stage 1 waits with F1 for F1 of stage 0"
    ):
        from_orders("mine", [[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]], 2)
    with pytest.raises(Refused, match=r"stage 1 never does B1"):
        from_orders("mine", [[F(0), F(1), B(0), B(1)], [F(0), F(1), B(0)]], 2)
    with pytest.raises(Refused, match=r"stage 0 has F0 twice"):
        from_orders("mine", [[F(0), F(0), B(0)]], 1)
    with pytest.raises(Refused, match=r"stage 0 has F5, but kinds are F B, microbatches 0 to 0"):
        from_orders("mine", [[F(0), F(5), B(0)]], 1)


def test_own_orders_become_the_table_that_the_generator_makes():
    schedule = make("1f1b", 4, 6)
    assert from_orders("1f1b", [schedule.order(s) for s in range(4)], 6) == schedule


# ---- files ----


@pytest.mark.parametrize("name", [name for name in NAMES if name != "zb-auto"])
def test_a_file_gives_back_the_table(name, tmp_path):
    for R, M in ((1, 2), (3, 5), (4, 8)):
        for delay in (0, 1, 2):
            schedule = make(name, R, M, 2 if name == "interleaved" else 1)
            schedule = pack(schedule, delay) if delay else schedule
            path = tmp_path / f"{name}.csv"
            write_csv(schedule, path)
            again = read_csv(path, schedule.delay)
            placement = again.placement if R == 1 else schedule.placement  # on one stage both are the same
            assert replace(again, placement=placement) == replace(schedule, placement=placement)


def test_the_chunk_column_may_be_left_out_and_lines_may_come_in_any_order(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("op,tick,stage,microbatch,chunk\nB,2,0,0,\n\nF, 0, 0, 0, 0\nB,1,1,0,\nF,1,1,0,0\n")
    without = tmp_path / "without.csv"
    without.write_text("op,tick,stage,microbatch\nB,2,0,0\nF,0,0,0\nB,1,1,0\nF,1,1,0\n")
    assert read_csv(without).table == read_csv(path).table
    assert read_csv(path).table == (
        ((Op("F", 0),), ()),
        ((), (Op("F", 0), Op("B", 0))),
        ((Op("B", 0),), ()),
    )
    assert read_csv(path).name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tick,stage,op\n0,0,F\n",
            r"mine.csv, line 1: the columns are tick, stage, op; they must be tick, stage, op, micro",
        ),
        ("", r"mine.csv, line 1: the columns are none"),
        ("tick,stage,op,microbatch\n", r"mine.csv: there are no operations"),
        ("tick,stage,op,microbatch\n0,0,F\n", r"line 2: there are 3 cells for 4 columns"),
        ("tick,stage,op,microbatch\n0,0,F,-1\n", r"line 2: microbatch='-1' must be a whole number from 0"),
        ("tick,stage,op,microbatch\n0,0,G,0\n", r"line 2: op='G' must be one of F, B, W"),
        (
            "tick,stage,op,microbatch\n0,0,F,0\n900,0,B,0\n",
            r"line 3: tick 900 and 1 stages are too many .* 2 operations",
        ),
        (
            "tick,stage,op,microbatch\n0,0,F,0\n1,0,F,0\n",
            r"line 3: tick 1, stage 0, F0: is done a second time; .* line 2, tick 0",
        ),
        ("tick,stage,op,microbatch\n0,0,F,0\n", r"mine.csv: stage 0, B0: is never done"),
        (
            "tick,stage,op,microbatch\n1,0,F,0\n0,0,B,0\n",
            r"line 3: tick 0, stage 0, B0: uses F0 of the same stage, .* tick 1",
        ),
        (
            "tick,stage,op,microbatch\n0,0,F,0\n0,1,F,0\n1,1,B,0\n2,0,B,0\n",
            r"line 3: tick 0, stage 1, F0: uses F0 of stage 0, which is done in tick 0; it must be a tick before",
        ),
        (
            "tick,stage,op,microbatch\n0,0,F,0\n0,0,F,1\n1,0,B,0\n2,0,B,1\n",
            r"line 3: tick 0, stage 0, F1: comes after F; a stage does at most one F",
        ),
        (
            "tick,stage,op,microbatch,chunk\n0,0,F,0,0\n1,0,F,0,1\n2,0,B,0,0\n3,0,B,0,1\n",
            r"line 4: tick 2, stage 0, B0: uses B0.1 of stage 0|line 4: .* uses B0.1 of the same stage, .* wrong too",
        ),
    ],
)
def test_a_fault_in_a_file_is_named_with_its_line(text, message, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(Refused, match=message):
        read_csv(path)


def test_a_file_that_is_not_there_or_is_not_text_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"there is no schedule file '.*none.csv'"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Refused, match=r"schedule file '.*bytes.csv' cannot be read"):
        read_csv(tmp_path / "bytes.csv")


# ---- packing ----


@pytest.mark.parametrize("name", [name for name in NAMES if name != "zb-auto"])
def test_packing_keeps_the_order_and_is_right_and_short(name):
    for R, M in GRID[::3]:
        schedule = make(name, R, M, 2 if name == "interleaved" else 1)
        for delay in (1, 2, 3):
            packed = validate(pack(schedule, delay))
            assert [packed.order(s) for s in range(R)] == [schedule.order(s) for s in range(R)]
            assert packed.peak_in_flight() == schedule.peak_in_flight()
            if delay == 1:
                assert len(packed.table) <= len(schedule.table)


def test_orders_with_room_for_the_transfer_pack_into_pairs():
    for R, M in GRID:
        assert len(pack(make("eager-1f1b", R, M)).table) == M + 2 * (R - 1)
        if M % R == 0:
            for v in (2, 3):  # R-1 forward to fill, then pairs, of which the last stage has the most, then R-1 backward
                assert len(pack(make("interleaved", R, M, v)).table) == v * M + (v - 1) * R + 2 * (R - 1)


def test_segments_cover_the_table_with_the_kinds_they_need():
    for name in NAMES:
        if name == "zb-auto":
            continue
        for R, M in ((1, 1), (2, 3), (4, 4), (4, 12), (8, 9), (8, 32)):
            for delay in (0, 1, 2):
                schedule = make(name, R, M, 2 if name == "interleaved" else 1)
                schedule = pack(schedule, delay) if delay else schedule
                loops = segments(schedule)
                assert 1 <= len(loops) <= 5
                assert [loop.first for loop in loops] == [0, *(loop.last for loop in loops[:-1])]
                assert loops[-1].last == len(schedule.table)
                for first, last, kinds in loops:
                    used = {op.kind for row in schedule.table[first:last] for ops in row for op in ops}
                    assert used == set(kinds)


def test_segments_are_warm_up_steady_and_cool_down():
    kinds = lambda schedule: [(first, last, "".join(kinds)) for first, last, kinds in segments(schedule)]  # noqa: E731
    assert kinds(pack(make("eager-1f1b", 4, 8))) == [(0, 3, "F"), (3, 11, "FB"), (11, 14, "B")]
    assert kinds(make("gpipe", 4, 8)) == [(0, 11, "F"), (11, 22, "B")]
    assert kinds(make("1f1b", 4, 8)) == [(0, 4, "F"), (4, 18, "FB"), (18, 22, "B")]
    assert kinds(make("zb-h2", 4, 8)) == [(0, 4, "F"), (4, 8, "FB"), (8, 19, "FBW"), (19, 23, "BW"), (23, 27, "W")]
    assert kinds(make("1f1b", 1, 2)) == [(0, 4, "FB")]
    assert len(segments(make("zb-h2", 4, 8), most=2)) == 2
