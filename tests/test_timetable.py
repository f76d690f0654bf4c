"""The timetable of a schedule, carried out with labels in the place of arrays: every operation finds what it needs."""

import itertools

import pytest

from meshwright.config import Refused
from meshwright.parallel.timetable import Timetable, forward_only, timetable
from meshwright.schedules.generate import NAMES, make
from meshwright.schedules.pack import pack
from meshwright.schedules.table import Op, Schedule


def carry_out(table: Timetable) -> list[tuple[int, Op]]:
    """Run the loops as `parallel/pipeline.py` does; assert that every slot holds what is looked for. What was done."""
    schedule, stages = table.schedule, range(table.schedule.stages)
    rings = {name: [{} for _ in stages] for name in table.depths}
    out: dict[tuple[str, int], object] = {}
    done: list[tuple[int, Op]] = []

    def put(ring: str, stage: int, slot: int, label: object) -> None:
        assert slot < table.depths[ring] and slot not in rings[ring][stage], (
            f"{label} overwrites {ring} on stage {stage}"
        )
        rings[ring][stage][slot] = label

    def take(ring: str, stage: int, slot: int, label: object) -> None:
        assert slot < table.depths[ring], f"{label} has no slot of {ring}"
        assert rings[ring][stage].pop(slot, None) == label, f"{label} is not in its slot of {ring} on stage {stage}"

    for loop in table.loops:
        for tick in range(len(loop.columns["F"])):
            row = {name: column[tick] for name, column in loop.columns.items()}
            column = lambda name, stage, row=row: int(row[name][stage]) if name in row else 0  # noqa: E731
            made: dict[tuple[str, int], object] = {}
            coming = dict(out) if schedule.delay > 1 else {}
            for stage in stages:
                for kind in loop.kinds:
                    if not column(kind, stage):
                        continue
                    m, chunk = column(f"{kind}_microbatch", stage), column(f"{kind}_chunk", stage)
                    place = schedule.position(stage, chunk)
                    assert column(f"{kind}_first", stage) == (place == 0)
                    assert column(f"{kind}_last", stage) == (place == schedule.positions - 1)
                    done.append((stage, Op(kind, m, chunk)))
                    if kind == "F":
                        if place:
                            take("input", stage, column("F_input", stage), (m, place - 1))
                        put("stash", stage, column("F_stash", stage), (m, place))
                        if place == schedule.positions - 1:
                            put("slope", stage, column("F_slope", stage), (m, place + 1))
                        else:
                            assert column("F_slope", stage) == table.depths["slope"]
                        made["F", stage] = (m, place)
                    elif kind == "B":
                        take("slope", stage, column("B_slope", stage), (m, place + 1))
                        take("stash", stage, column("B_stash", stage), (m, place))
                        if schedule.splits_backward:
                            put("tape", stage, column("B_tape", stage), (m, place))
                        made["B", stage] = (m, place)
                    else:
                        take("tape", stage, column("W_tape", stage), (m, place))
                    for channel in table.channels:  # from a chunk of this stage to another of its own
                        if channel.by == 0 and channel.kind == kind:
                            ring = "input" if kind == "F" else "slope"
                            if column(channel.name, stage) < table.depths[ring]:
                                put(ring, stage, column(channel.name, stage), made[kind, stage])
            for channel in table.channels:
                if channel.by == 0 or (schedule.delay == 1 and channel.kind not in loop.kinds):
                    continue
                ring = "input" if channel.kind == "F" else "slope"
                for stage in stages:
                    slot = column(channel.name, stage)
                    source = (channel.kind, (stage - channel.by) % schedule.stages)
                    if slot < table.depths[ring]:
                        put(ring, stage, slot, (coming if schedule.delay > 1 else made)[source])
            out = made
    for name, per_stage in rings.items():
        assert not any(per_stage), f"something is left in {name}: {per_stage}"
    return done


SIZES = [(1, 1, 1), (2, 1, 1), (2, 5, 2), (3, 3, 2), (4, 8, 1), (4, 7, 3), (5, 4, 2), (8, 3, 2), (8, 16, 2)]


def schedules() -> list[Schedule]:
    found = []
    for name, (stages, count, chunks) in itertools.product(NAMES, SIZES):
        try:
            found.append(make(name, stages, count, 2 if name == "interleaved" and chunks == 1 else chunks))
        except Refused:
            found.append(make(name, stages, count))
    return found


def form(schedule: Schedule, delay: int) -> Schedule:
    return pack(schedule, delay) if delay else schedule


@pytest.mark.parametrize("delay", [0, 1, 2], ids=["table", "packed", "packed with a delay of 2"])
def test_every_operation_finds_what_it_needs(delay):
    for schedule in schedules():
        table = timetable(form(schedule, delay))
        done = carry_out(table)
        wanted = [(s, op) for s in range(schedule.stages) for op in schedule.order(s)]
        assert sorted(done) == sorted(wanted), schedule.name


def test_rings_are_as_deep_as_the_schedule_needs():
    for schedule in schedules():
        depths = timetable(schedule).depths
        unsplit = max(schedule.peak_in_flight()) if not schedule.splits_backward else None
        assert depths["stash"] == (unsplit or depths["stash"])
        assert depths["stash"] <= max(schedule.peak_in_flight())
    assert timetable(make("1f1b", 4, 32)).depths == {"input": 1, "stash": 4, "slope": 1, "tape": 0}
    assert timetable(make("gpipe", 4, 32)).depths["stash"] == 32


def test_a_loop_has_no_column_of_ends_that_it_does_not_reach():
    first, *_, last = timetable(pack(make("interleaved", 4, 8, 2))).loops
    assert first.kinds == ("F",) and "F_last" not in first.columns and "F_first" in first.columns
    assert last.kinds == ("B",) and "B_first" in last.columns and "F_last" not in last.columns


@pytest.mark.parametrize("count", [1, 3])
def test_forward_passes_alone_are_for_any_number_of_microbatches(count):
    for name in ("1f1b", "interleaved", "zb-v", "dualpipe-v"):
        schedule = make(name, 4, 8, 2 if name == "interleaved" else 1)
        alone = forward_only(schedule, count)
        passes = [(stage, op) for stage in range(4) for op in alone.order(stage)]
        assert len(passes) == count * schedule.positions
        assert {op.kind for _, op in passes} == {"F"}
        for stage, op in passes:
            place = schedule.position(stage, op.chunk)
            if place:
                source, chunk = schedule.at(place - 1)
                assert alone.tick_of[source, Op("F", op.microbatch, chunk)] < alone.tick_of[stage, op]
