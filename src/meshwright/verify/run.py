"""`verify`: hold layouts against one device, and say where a difference begins."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from meshwright.config import LayoutConfig, RunConfig
from meshwright.verify import faults
from meshwright.verify.bisect import Bisector
from meshwright.verify.parity import Result, Verifier


def verify(
    config: RunConfig,
    layouts: Sequence[LayoutConfig],
    dtype: str = "float64",
    progress: Callable[[Result], None] = lambda result: None,
    *,
    form: str = "",
    located: int = 3,
    plant: str = "",
) -> tuple[Result, ...]:
    """Each layout against one device, in order; `progress` is given each result as it comes.

    `form`: the platform whose form of the program runs, whatever the devices are (`cpu`, `tpu`, `gpu`; empty: their
    own). The first `located` results that differ also say where (`Result.where`). `plant` names a fault to run with
    (`faults.FAULTS`). A layout that cannot run is a result with verdict `refused`; nothing else raises.
    """
    verifier = Verifier(config, dtype, form)
    bisector = Bisector(verifier)
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        if plant:
            for layout in layouts:  # what is right is computed before anything is wrong
                bisector.one_device(verifier.oracle.batch(layout))
            stack.enter_context(faults.planted(plant))
        for layout in layouts:
            result = verifier(layout)
            if result.verdict == "differs" and sum(bool(r.where) for r in results) < located:
                result = replace(result, where=bisector(layout, result).sentence)
            results.append(result)
            progress(result)
    return tuple(results)
