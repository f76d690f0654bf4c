"""Planted faults: what goes wrong in other systems, put inside the engine, so that `verify` can be seen to find it.

Each is a context manager that replaces a function of the engine, the model, the accumulation or the optimiser by one
that makes the mistake. Where the mistake would leave an array different on devices that must agree, JAX's
varying-axes types would refuse the program before it ran; such a fault is planted in a form that types as correct
(one device's part is sent to all).
"""

import contextlib
from collections.abc import Iterator

import jax

from meshwright import layout
from meshwright.config import Refused, RunConfig, override
from meshwright.verify.faults import inputs, pipelines, step, sums
from meshwright.verify.faults.fault import Fault, replaced

FAULTS = {fault.name: fault for fault in (*sums.FAULTS, *step.FAULTS, *inputs.FAULTS, *pipelines.FAULTS)}
"""Every planted fault by its name."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[Fault]:
    """Run with the fault `name` inside; everything is as it was afterwards."""
    fault = named(name)
    with contextlib.ExitStack() as stack:
        stack.callback(forget)
        for patch in fault.patches:
            stack.enter_context(replaced(*patch))
        forget()
        yield fault


def forget() -> None:
    """Drop what was traced or planned with other functions."""
    layout._plan.cache_clear()
    jax.clear_caches()


def named(name: str) -> Fault:
    if name not in FAULTS:
        raise Refused(f"fault {name!r} is not known; allowed: {', '.join(FAULTS)}")
    return FAULTS[name]


def configured(fault: Fault, config: RunConfig) -> RunConfig:
    """`config` with what the fault needs to show; refused where its family has no place for the fault."""
    if config.model.family not in fault.families:
        raise Refused(
            f"fault {fault.name!r} has no place in model.family={config.model.family!r};"
            f" it shows in {', '.join(fault.families)}"
        )
    return override(config, fault.settings)
