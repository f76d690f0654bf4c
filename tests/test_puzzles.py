"""The event simulator against LLM-Training-Puzzles (S. Rush, 2023): exact times, peaks and counts of the eight puzzles.

Times are the start of the last event (what the puzzles print) and the end; memory is in u = 65,536 elements. The published
solutions are the `reference` ones; the others free everything as soon as it is legal.
"""

from fractions import Fraction

import pytest

from meshwright.config import Refused
from meshwright.cost import puzzles
from meshwright.cost.events import Step, run, tidy
from meshwright.schedules.generate import make
from meshwright.schedules.simulate import Times, asynchronous

U = 65_536
COUNTS = {
    "standard": "forward 2 backward 2 update 2",
    "accumulation": "forward 8 backward 8 update 2",
    "data_parallel": "forward 8 backward 8 allreduce 8 update 8",
    "weight_sharded": "allgather 48 forward 24 backward 24 allreduce 24 update 24",
    "fully_sharded": "allgather 48 forward 24 backward 24 scatterreduce 24 update 24",
    "pipeline": "forward 8 backward 8 pass 12 update 8",
    "gpipe": "forward 32 backward 32 pass 48 update 8",
    "pipeline_fully_sharded": "allgather 128 scatterreduce 64 forward 16 backward 16 pass 48 update 64",
}


@pytest.mark.parametrize(
    ("name", "last_start", "end", "reference", "tight"),
    [
        ("standard", "16.5", "17.0", None, 40 * U),
        ("accumulation", "16.5", "17.0", None, 30 * U),
        ("data_parallel", "5.1", "5.6", 28 * U, 24 * U),
        ("weight_sharded", "19.9", "20.4", 42 * U, 30 * U),
        ("fully_sharded", "19.9", "20.4", 36 * U, 30 * U),
        ("pipeline", "66.9", "67.4", 48 * U, 40 * U),
        ("gpipe", "33.3", "33.8", 64 * U, 44 * U),
        ("pipeline_fully_sharded", "15.5", "16.0", 966_656, 10.75 * U),  # tight: not searched before; freed when legal
    ],
)
def test_the_eight_puzzles(name, last_start, end, reference, tight):
    program = getattr(puzzles, name)
    for programs, peak in (
        (program(reference=True) if reference else program(), reference or tight),
        (program(), tight),
    ):
        result = run(programs)
        assert (result.last_start, result.end) == (Fraction(last_start), Fraction(end))
        assert max(result.peaks) * U == peak
        counts = {kind: count for kind, count in result.counts.items() if kind != "loss"}
        words = COUNTS[name].split()
        assert counts == dict(zip(words[::2], map(int, words[1::2]), strict=True))


@pytest.mark.parametrize(
    ("microbatches", "one_f_one_b", "gpipe", "reference"),
    [
        (4, ("33.4", 38), ("33.8", 44), ("33.8", 64)),
        (8, ("52.6", 42), ("53.0", 68), ("53.0", 112)),
        (16, ("91.0", 42), ("91.4", 116), ("91.4", 208)),
    ],
)
def test_1f1b_in_the_same_model_holds_as_much_for_any_number_of_microbatches(
    microbatches, one_f_one_b, gpipe, reference
):
    for programs, (end, peak) in (
        (puzzles.one_f_one_b(microbatches), one_f_one_b),
        (puzzles.gpipe(microbatches), gpipe),
        (puzzles.gpipe(microbatches, reference=True), reference),
    ):
        result = run(programs)
        assert (result.end, max(result.peaks)) == (Fraction(end), peak)
        done = [(r.step.layer, r.step.microbatch) for rank in result.records for r in rank if r.step.kind == "backward"]
        assert sorted(done) == [(layer, m) for layer in range(8) for m in range(microbatches)]
    if microbatches >= 8:
        assert run(puzzles.one_f_one_b(microbatches)).peaks == (42, 38, 34, 30)


@pytest.mark.parametrize(
    ("microbatches", "bubble"), [(1, 0.75), (2, 0.6), (4, 0.4286), (8, 0.2727), (16, 0.1579), (32, 0.0857)]
)
def test_the_bubble_without_messages_and_updates(microbatches, bubble):
    for name in ("gpipe", "1f1b"):
        assert round(asynchronous(make(name, 4, microbatches), Times(2, 2)).bubble_fraction, 4) == bubble


# ---- what the simulator refuses ----

WEIGHT = Step(makes=((("weight", 0), 4),))
INPUT = Step(makes=((("activation", 0), 2),))
SEND = Step("pass", 1, (("activation", 0),), to=1)
RECEIVE = Step("pass", 1, makes=((("activation", 0), 2),), source=0)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (
            [[Step("forward", 1, (("weight", 0),), layer=0)]],
            r"rank 0, forward of layer 0: \[\('weight', 0\)\] is not held",
        ),
        ([[Step(frees=(("weight", 0),))]], r"rank 0 frees \('weight', 0\), which it does not hold"),
        ([[RECEIVE], [RECEIVE]], r"ranks wait for each other: rank 0 in pass .*; rank 1 in pass"),
        (
            [[INPUT, SEND], [Step("pass", 1, makes=((("activation", 1), 2),), source=0)]],
            r"rank 1 waits for \('activation', 1\) from rank 0, which sends \('activation', 0\)",
        ),
        (
            [[WEIGHT, Step("allgather", 1, layer=0, barrier=True)], [Step("allreduce", 1, layer=0, barrier=True)]],
            r"different collectives: allgather of layer 0, allreduce of layer 0",
        ),
        ([[Step("allgather", 1, layer=0, barrier=True)], [RECEIVE]], r"rank 0 in allgather of layer 0; rank 1 in pass"),
    ],
)
def test_programs_that_cannot_run_are_refused(programs, message):
    with pytest.raises(Refused, match=message):
        run(programs)


def test_a_message_costs_both_sides_and_a_barrier_waits_for_the_last():
    barrier = Step("allreduce", 2, layer=0, barrier=True)
    result = run([[INPUT, SEND, barrier], [Step("forward", 3, layer=0), RECEIVE, barrier]])
    assert [(r.step.kind, r.start, r.end, r.memory) for rank in result.records for r in rank] == [
        ("pass", 0, 1, 2),
        ("allreduce", 4, 6, 2),
        ("forward", 0, 3, 0),
        ("pass", 3, 4, 0),
        ("allreduce", 4, 6, 2),
    ]


def test_tidy_frees_after_the_last_use_and_what_is_never_used():
    a, b, w = ("activation", 0), ("error", 0), ("weight", 0)
    program = tidy([Step(makes=((w, 4), (a, 2))), Step("forward", 1, (w, a), ((b, 2),)), Step("update", 1, (w,))])
    assert [step.frees for step in program] == [(), (a, b), ()]
