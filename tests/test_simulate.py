"""The simulated time of pipelines: closed forms, published bubble rates, and the program's lock-step."""

from fractions import Fraction
from itertools import pairwise

import pytest

from meshwright.schedules.generate import NAMES, make
from meshwright.schedules.orders import one_f_one_b
from meshwright.schedules.pack import pack, segments
from meshwright.schedules.place import from_orders
from meshwright.schedules.simulate import Times, Transfer, asynchronous, executor, executor_form
from meshwright.schedules.table import Op, Schedule

GRID = [(R, M) for R in range(1, 9) for M in (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 23, 24)]
UNIT = Times(1, 1, 1)
UNEQUAL = Times(3, 4, 2)
SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")
EVERY = [name for name in NAMES if name != "zb-auto"]


def table(name: str, R: int, M: int) -> Schedule:
    return make(name, R, M, 2 if name == "interleaved" else 1)


# ---- free-running stages ----


@pytest.mark.parametrize("times", [UNIT, UNEQUAL, Times(1, 3)])
def test_bubbles_of_plain_pipelines(times):
    for R, M in GRID:
        for name in ("gpipe", "1f1b", "eager-1f1b"):
            timeline = asynchronous(make(name, R, M), times)
            assert timeline.total == (M + R - 1) * (times.F + times.B + times.W)
            assert timeline.bubble_fraction == pytest.approx(
                (R - 1) / (M + R - 1), abs=1e-15
            )  # Narayanan et al. 2021, section 2.2.1
        for v in (2, 3, 4):
            if M % R == 0:
                timeline = asynchronous(make("interleaved", R, M, v), times)
                assert timeline.total == (v * M + R - 1) * (times.F + times.B + times.W)  # the same, section 2.2.2
                assert timeline.bubble_fraction == pytest.approx((R - 1) / (v * M + R - 1), abs=1e-15)


def test_bubbles_of_zero_bubble_schedules():
    """Qi et al. 2023, tables 1 and 2, for F = B = W, and ZB-H1 for others: (R-1)(F + B - W)."""
    for R, M in GRID:
        if M >= 2 * R - 1:
            for name, work in (("zb-h2", 3 * M), ("zb-v", 6 * M)):
                timeline = asynchronous(make(name, R, M), UNIT)
                assert timeline.stage_bubble_fraction == 0
                assert timeline.total == work + R - 1  # the last stage begins R-1 later
        if M >= R:
            for F, B, W in ((1, 1, 1), (3, 4, 2), (2, 2, 1), (4, 5, 3), (5, 6, 5)):
                timeline = asynchronous(make("zb-h1", R, M), Times(F, B, W))
                assert timeline.total == M * (F + B + W) + (R - 1) * (F + B - W)
                assert timeline.stage_bubble_fraction == timeline.bubble_fraction


def test_bubble_of_dualpipe_v():
    """A step of ours starts each operation when it can; the published bubble, (R-1)(F&B + B - 3W) with B whole, counts a forward
    beside a backward as one (F&B = F + B here). In our letters F + 2B - W with B + W the whole: ours is B shorter."""
    for R, M in GRID:
        if M >= 2 * R:
            for F, B, W in ((1, 1, 1), (3, 3, 2), (2, 2, 1)):
                timeline = asynchronous(make("dualpipe-v", R, M), Times(F, B, W))
                bubble = timeline.total - 2 * M * (F + B + W)
                published = (R - 1) * ((F + B + W) + (B + W) - 3 * W)
                assert bubble == published - (R - 1) * B


@pytest.mark.parametrize("name", EVERY)
def test_a_timeline_keeps_its_own_books(name):
    times = Times(3, 4, 2, Fraction(1, 2), {0: Fraction(3, 2), (1, 1): 2})
    for R, M in ((1, 1), (2, 3), (4, 9), (5, 16)):
        schedule = table(name, R, M)
        for timeline in (asynchronous(schedule, times), executor(schedule, times)):
            assert timeline.peaks == schedule.peak_in_flight()
            arrivals = {(t.target, t.op.kind, t.op.microbatch, t.source): t for t in timeline.transfers}
            end = {(span.stage, span.op): span.end for stage in timeline.spans for span in stage}
            for stage, spans in enumerate(timeline.spans):
                assert [span.op for span in spans] == schedule.order(stage)
                assert all(a.end <= b.start for a, b in pairwise(spans))
                assert timeline.busy[stage] == sum(times.of(schedule, stage, span.op) for span in spans)
                for span in spans:
                    for there, need in schedule.needs(stage, span.op):
                        if there == stage:
                            assert end[there, need] <= span.start
                        else:
                            transfer = arrivals[stage, need.kind, need.microbatch, there]
                            assert end[there, need] <= transfer.leave <= transfer.arrive - times.send
            assert timeline.total == max(end.values())
            assert 0 <= timeline.bubble_fraction < 1
            assert timeline.in_flight[0][-1] == (timeline.spans[0][-1].end, 0)
            hops = (
                2 * M * sum(schedule.at(p)[0] != schedule.at(p + 1)[0] for p in range(schedule.positions - 1))
            )  # forward and back
            assert len(timeline.transfers) == hops


def test_two_stages_one_microbatch_by_hand():
    timeline = asynchronous(make("1f1b", 2, 1), Times(2, 4, send=1, factors={1: 3}))
    assert [[(str(s.op), s.start, s.end) for s in stage] for stage in timeline.spans] == [
        [("F0", 0, 2), ("B0", 22, 26)],
        [("F0", 3, 9), ("B0", 9, 21)],
    ]
    assert timeline.transfers == (Transfer(0, 1, Op("F", 0), 2, 3), Transfer(1, 0, Op("B", 0), 21, 22))
    assert timeline.in_flight == (((0, 1), (26, 0)), ((3, 1), (21, 0)))
    assert (timeline.total, timeline.busy, timeline.longest_stage) == (26, (6, 18), 26)


def test_a_stage_that_takes_twice_as_long_sets_the_pace():
    for M in (8, 16):
        timeline = asynchronous(make("1f1b", 4, M), Times(1, 2, factors={2: 2}))
        # 2 until it begins, then its own work and 1 until the first backward comes, then back through two stages
        assert timeline.total == 2 + M * 6 + 1 + 2 * 2


# ---- published figures ----

# The profiled times in ms of Qi et al. 2023 (arXiv 2401.10241, appendix: T_F, T_B, T_W, T_comm), and the bubble rates that
# the paper computes with them (table 5): 1F1B, 1F1B-I, ZB-H1, ZB-H2, ZB-1p, ZB-2p. The times, written from memory, are
# borne out by the rates: 36 of them come out to all four digits.
TABLE_5 = {
    (8, 24, 3): ((18.522, 18.086, 9.337, 0.601), (0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433)),
    (8, 32, 3): ((18.513, 18.086, 9.331, 0.626), (0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039)),
    (8, 64, 3): ((18.546, 18.097, 9.321, 0.762), (0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026)),
    (8, 24, 4): ((29.718, 29.444, 19.927, 0.527), (0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029)),
    (8, 32, 4): ((29.802, 29.428, 19.530, 0.577), (0.1898, 0.0628, 0.1045, 0.0559, 0.1045, 0.0022)),
    (8, 64, 4): ((29.935, 29.621, 19.388, 0.535), (0.1091, 0.0320, 0.0554, 0.0294, 0.0554, 0.0010)),
    (16, 48, 3): ((11.347, 11.248, 8.132, 0.377), (0.2552, 0.1104, 0.1397, 0.0672, 0.1397, 0.0066)),
    (16, 64, 3): ((11.307, 11.254, 8.101, 0.379), (0.2082, 0.0852, 0.1088, 0.0516, 0.1088, 0.0054)),
    (16, 128, 3): ((11.325, 11.308, 8.109, 0.378), (0.1251, 0.0445, 0.0576, 0.0266, 0.0576, 0.0028)),
    (32, 96, 2): ((10.419, 10.207, 7.715, 0.408), (0.2646, 0.1493, 0.1421, 0.0641, 0.1421, 0.0038)),
    (32, 128, 2): ((10.408, 10.204, 7.703, 0.408), (0.2168, 0.1164, 0.1106, 0.0490, 0.1106, 0.0029)),
    (32, 256, 2): ((10.402, 10.248, 7.698, 0.460), (0.1352, 0.0624, 0.0594, 0.0257, 0.0594, 0.0018)),
}
"""(stages, microbatches, chunks of 1F1B-I) of the paper's models 1.5B, 6.2B, 14.6B, 28.3B."""


@pytest.mark.parametrize("size", TABLE_5)
def test_published_bubble_rates(size):
    R, M, v = size
    (F, B, W, send), rates = TABLE_5[size]
    for name, rate in (("1f1b", rates[0]), ("zb-h1", rates[2]), ("zb-h2", rates[3])):
        assert round(asynchronous(make(name, R, M), Times(F, B, W, send)).stage_bubble_fraction, 4) == rate
    # 1F1B-I: our path has 2(vR-1) transfers, the paper's rates have R fewer, in all 12 rows; it does not say which.
    timeline = asynchronous(make("interleaved", R, M, v), Times(F / v, B / v, W / v, send))
    assert timeline.total == pytest.approx((M + (R - 1) / v) * (F + B + W) + 2 * (v * R - 1) * send)
    assert 1 - M * (F + B + W) / (timeline.total - R * send) == pytest.approx(rates[1], abs=6e-5)


# ---- the program's lock-step ----


@pytest.mark.parametrize("name", EVERY)
def test_the_program_is_never_faster_than_free_running_stages(name):
    for R, M in ((1, 3), (2, 5), (4, 8), (4, 13), (8, 16)):
        for times in (UNEQUAL, Times(2, 5, 1, Fraction(1, 3))):
            schedule = table(name, R, M)
            least = asynchronous(schedule, times).total
            forms = [schedule, pack(schedule, 1), pack(schedule, 2)]
            totals = [executor(form, times).total for form in forms]
            assert min(totals) >= least
            assert executor(executor_form(schedule, times), times).total == min(totals)


@pytest.mark.parametrize("times", [UNIT, UNEQUAL, Times(1, 3)])
def test_pairs_run_at_the_closed_form(times):
    """Where the order leaves a transfer its turn, ticks of one F and one B lose nothing to the coupling."""
    whole = times.F + times.B + times.W
    for R, M in GRID:
        assert executor(pack(make("eager-1f1b", R, M)), times).total == (M + R - 1) * whole
        if M % R == 0:
            for v in (2, 3):
                assert executor(pack(make("interleaved", R, M, v)), times).total == (v * M + R - 1) * whole


def test_coupling_costs_1f1b_what_the_larger_operation_costs_more():
    """One operation per tick: in each tick some stages do F, their neighbours B, and the pair waits for the longer."""
    for R, M in ((4, 64), (8, 64)):
        for B in (1, 2, 3):
            rate = executor(make("1f1b", R, M), Times(1, B)).total / ((M + R - 1) * (1 + B))
            assert rate == pytest.approx(2 * B / (1 + B), rel=0.08)


def test_two_stages_in_lock_step_by_hand():
    """Ticks F0 | F1, F0 B0 | B0 F1 B1 | B1 of eager 1F1B on two stages, transfers of 1 at the end of each tick."""
    packed = pack(make("eager-1f1b", 2, 2))
    assert packed.table == (
        ((Op("F", 0),), ()),
        ((Op("F", 1),), (Op("F", 0), Op("B", 0))),
        ((Op("B", 0),), (Op("F", 1), Op("B", 1))),
        ((Op("B", 1),), ()),
    )
    assert len(segments(packed)) == 1  # too short for loops of their own: every tick has both transfers
    timeline = executor(packed, Times(2, 3, send=1))
    assert [[(str(s.op), s.start, s.end) for s in stage] for stage in timeline.spans] == [
        [("F0", 0, 2), ("F1", 2, 4), ("B0", 9, 12), ("B1", 14, 17)],
        [("F0", 3, 5), ("B0", 5, 8), ("F1", 8, 10), ("B1", 10, 13)],
    ]
    assert timeline.total == 17


def test_a_tick_of_slack_hides_the_transfer():
    """With delay 2, what a tick sends travels beside the next tick; an order with room for that loses nothing to transfers."""
    R, M = 4, 32
    schedule = from_orders("far ahead", [one_f_one_b(R, s, M, ahead=4) for s in range(R)], M)
    tight, slack = pack(schedule, 1), pack(schedule, 2)
    for send in (1, 2, 4):
        times = Times(2, 2, send=send)
        assert executor(tight, times).total >= M * (4 + send)
        assert executor(slack, times).total <= M * 4 + 2 * (R - 1) * (4 + send)
    assert executor_form(make("eager-1f1b", R, M), Times(2, 2)).delay == 1
    assert executor_form(schedule, Times(2, 2, send=2)).delay == 2
