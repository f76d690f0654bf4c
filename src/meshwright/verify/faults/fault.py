"""What a planted fault is: the functions that it replaces, and where it must be found."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.compat import vary
from meshwright.engine import place
from meshwright.layout import Axes

Patch = tuple[Any, str, Callable[[Any], Any]]
"""What to replace: an object, the name of its function, and the wrong function made from the right one."""


@dataclass(frozen=True)
class Fault:
    """One planted fault. It shows on `layout`, with `settings` added to the configuration."""

    name: str
    says: str
    """What is wrong."""
    layout: str
    patches: tuple[Patch, ...]
    kind: str
    """What `bisect` must call it (`Place.kind`)."""
    at: str = ""
    """Where `bisect` must find it: the beginning of `Place.at`."""
    settings: tuple[str, ...] = ()
    families: tuple[str, ...] = ("gpt", "llama")


@contextlib.contextmanager
def replaced(owner: Any, attribute: str, wrong: Callable[[Any], Any]) -> Iterator[None]:
    """Run with `owner`'s function replaced."""
    right = getattr(owner, attribute)
    setattr(owner, attribute, wrong(right))
    try:
        yield
    finally:
        setattr(owner, attribute, right)


def first_only(x: jax.Array, axes: Axes) -> jax.Array:
    """The part of the first device along `axes`, sent to all: what a missing sum leaves, typed as a sum."""
    return lax.psum(jnp.where(place(axes) == 0, vary(x, axes), 0), axes) if axes else x
