"""Sets of layouts that a model allows: every one without a pipeline, and a covering set of those with one.

With pipelines there are tens of thousands: schedules, chunks, microbatches and splits of the layers, times all that the
other axes can do. `pipeline_layouts` is a covering array of strength two: any two values of two settings stand together in
at least one layout, where they may. Most faults need one setting or two to show (Kuhn et al. 2004, "Software fault
interactions and implications for software testing", IEEE TSE 30(6)); the greedy construction is that of AETG (Cohen et al.
1997, "The AETG system", IEEE TSE 23(7)), made deterministic.

Nothing here imports JAX.
"""

import functools
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from meshwright.config import LayoutConfig, Refused, RunConfig
from meshwright.layout import check
from meshwright.schedules.generate import NAMES

PIPES = (2, 3, 4, 8)
TWO_CHUNKS = ("interleaved", "zb-v", "dualpipe-v")
HEAPED = 16
"""Up to so many layers they are also heaped on the first stage (`verify` makes deeper models shorter, and cannot then)."""
COUNTS = ("one microbatch", "fewer than stages", "as many as stages", "three times the stages")


def without_pipe(layout: LayoutConfig) -> LayoutConfig:
    """The same layout on one stage: every setting of pipelines is its default."""
    names = ("pipe", "schedule", "chunks", "stage_layers", "stash", "split_vocabulary", "uniform_ticks")
    return replace(layout, **{name: getattr(LayoutConfig(), name) for name in names})


def legal_layouts(config: RunConfig, device_count: int) -> list[LayoutConfig]:
    """Every layout of data, fsdp, tensor, ZeRO and sequence parallelism of at most `device_count` devices that `check` accepts.

    Settings without effect are not repeated: ZeRO counts where fsdp is above 1, sequence parallelism where tensor is.
    """
    layouts, base = [], without_pipe(config.layout)
    sizes = range(1, device_count + 1)
    for data in sizes:
        for fsdp in (f for f in sizes if data * f <= device_count):
            for tensor in (t for t in sizes if data * fsdp * t <= device_count):
                for zero in (3, 2, 1, 0) if fsdp > 1 else (3,):
                    for parallel in (True, False) if tensor > 1 and config.model.is_language_model else (True,):
                        layout = replace(
                            base, data=data, fsdp=fsdp, tensor=tensor, zero=zero, sequence_parallel=parallel
                        )
                        if _accepted(config, layout):
                            layouts.append(layout)
    return layouts


def _accepted(config: RunConfig, layout: LayoutConfig) -> bool:
    try:
        check(replace(config, layout=layout))
    except Refused:
        return False
    return True


# ---- pipelines -----------------------------------------------------------------------------------------------


def every_schedule(config: RunConfig, device_count: int) -> list[LayoutConfig]:
    """Every schedule on 2, 3, 4 and 8 stages with every number of microbatches up to three for each stage.

    Those that divide the batch; on nothing but pipe, and balanced layers.
    """
    base = without_pipe(config.layout)
    layouts = [
        replace(base, pipe=pipe, schedule=name, chunks=1 + (name in TWO_CHUNKS), microbatches=count)
        for pipe in PIPES
        for name in NAMES
        for count in range(1, 3 * pipe + 1)
        if pipe <= device_count
    ]
    return [layout for layout in layouts if _accepted(config, layout)]


Choice = dict[str, int]
"""For each setting, the number of its value in `Covering.values`."""
Pair = tuple[tuple[str, int], tuple[str, int]]


def pipeline_layouts(config: RunConfig, device_count: int) -> list[LayoutConfig]:
    """A covering set of the pipelines of at most `device_count` devices, always the same for the same configuration.

    Settings: pipe (2, 3, 4, 8), every schedule (interleaved, zb-v and dualpipe-v with two chunks), microbatches (1, fewer
    than stages, as many, three times as many, or the nearest that divide the batch), layers balanced or (of up to 16) heaped
    on the first stage, data, fsdp with ZeRO 0 to 3 and both gathers, tensor with and without sequence parallelism,
    split_vocabulary, stash, uniform_ticks.
    """
    return Covering(config, device_count).layouts()


class Covering:
    """The settings of one configuration's pipelines, and what of them is covered."""

    def __init__(self, config: RunConfig, device_count: int):
        self.config, self.device_count = config, device_count
        self.values = _values(config, device_count)
        self.layout_of = functools.cache(self._layout_of)

    def layouts(self) -> list[LayoutConfig]:
        """Layouts until every pair of values that may stand together does."""
        chosen: dict[LayoutConfig, None] = {}
        left = dict.fromkeys(
            ((a, i), (b, j))
            for a, b in combinations(self.values, 2)
            for i, j in product(range(len(self.values[a])), range(len(self.values[b])))
        )
        used: Counter[Pair] = Counter()
        while left:
            pair = next(iter(left))
            choice = self._completed(dict(pair), left, used)
            if choice is None:
                del left[pair]
                continue
            for covered in _pairs(choice):
                left.pop(covered, None)
            used.update(_pairs(choice))
            layout = self._layout(choice)
            assert layout
            chosen[layout] = None
        return list(chosen)

    def _completed(self, choice: Choice, left: dict[Pair, None], used: Counter[Pair]) -> Choice | None:
        """`choice` with a value for every setting, or None where none is legal: those that cover most of what is `left`.

        Among equal ones that which was used least beside the others.
        """
        if not self._possible(choice):
            return None
        for setting, values in self.values.items():
            if setting not in choice:
                options = [{**choice, setting: i} for i in range(len(values))]
                legal = [option for option in options if self._possible(option)]
                choice = max(legal, key=lambda own: _gain(own, left, used))
        return {setting: choice[setting] for setting in self.values}

    def _possible(self, choice: Choice) -> bool:
        """Whether some legal layout has these values. The first value of each setting is the one that asks for least."""
        least = dict.fromkeys(self.values, 0)
        free = [setting for setting in ("pipe", "microbatches") if setting not in choice]
        tries = product(*(range(len(self.values[setting])) for setting in free))
        return any(self._layout(least | choice | dict(zip(free, numbers, strict=True))) for numbers in tries)

    def _layout(self, choice: Choice) -> LayoutConfig | None:
        return self.layout_of(tuple(choice[setting] for setting in self.values))

    def _layout_of(self, numbers: tuple[int, ...]) -> LayoutConfig | None:
        settings: dict[str, Any] = {}
        for values, i in zip(self.values.values(), numbers, strict=True):
            settings |= values[i]
        settings |= _counted(self.config, settings)
        try:
            layout = replace(self.config.layout, **settings)
        except Refused:
            return None
        return layout if layout.device_count <= self.device_count and _accepted(self.config, layout) else None


def _values(config: RunConfig, device_count: int) -> dict[str, list[dict[str, Any]]]:
    """Each setting's values, as settings of a layout; in each list the first asks for least."""
    model = config.model
    tensor = [t for t in range(2, device_count // 2 + 1) if _accepted(config, LayoutConfig(tensor=t))]
    parallel = [dict(sequence_parallel=p) for p in ((True, False) if model.is_language_model else (True,))]
    fsdp = [dict(zero=3, gather="use"), dict(zero=3, gather="step"), *(dict(zero=z, gather="use") for z in (2, 1, 0))]
    on = (False, True)
    return {
        "schedule": [dict(schedule=name, chunks=1 + (name in TWO_CHUNKS)) for name in NAMES],
        "pipe": [dict(pipe=pipe) for pipe in PIPES if pipe <= min(device_count, model.layers)],
        "microbatches": [dict(microbatches=count) for count in COUNTS],
        "fsdp": [dict(fsdp=1, zero=3, gather="use"), *(dict(fsdp=2) | own for own in fsdp)],
        "tensor": [
            dict(tensor=1, sequence_parallel=True),
            *(dict(tensor=t) | own for t in dict.fromkeys((*tensor[:1], *tensor[-1:])) for own in parallel),
        ],
        "data": [dict(data=1), dict(data=2)],
        "layers": [dict(stage_layers="balanced"), dict(stage_layers="heaped")],
        "stash": [dict(stash="layer"), dict(stash="stage")],
        "split_vocabulary": [dict(split_vocabulary=s) for s in on[: 1 + model.is_language_model]],
        "uniform_ticks": [dict(uniform_ticks=u) for u in on],
    }


def _counted(config: RunConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Microbatches and layers in numbers; zero or none where there are none such."""
    pipe, chunks = settings["pipe"], settings["chunks"]
    share, rest = divmod(config.train.sequences, settings["data"] * settings["fsdp"])
    counts = [n for n in range(1, share + 1) if rest == 0 and share % n == 0]
    fewer = [n for n in counts if 1 < n < pipe]
    least = lambda most: next((n for n in counts if n >= most), 0)  # noqa: E731
    more = [n for n in counts if n > pipe]
    number = {
        COUNTS[0]: 1,
        COUNTS[1]: max(fewer, default=0),
        COUNTS[2]: least(pipe),
        COUNTS[3]: least(3 * pipe) or max(more, default=0),
    }[settings["microbatches"]]
    over = config.model.layers - pipe * chunks
    layers = "balanced"
    if settings["stage_layers"] == "heaped":
        heap = ",".join(str(chunks + over * (stage == 0)) for stage in range(pipe))
        layers = heap if over > 0 and config.model.layers <= HEAPED else "none"
    return {"microbatches": number, "stage_layers": layers}


def _gain(choice: Choice, left: dict[Pair, None], used: Counter[Pair]) -> tuple[int, int]:
    return sum(pair in left for pair in _pairs(choice)), -sum(used[pair] for pair in _pairs(choice))


def _pairs(choice: Choice) -> list[Pair]:
    return list(combinations(choice.items(), 2))
