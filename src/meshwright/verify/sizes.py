"""The sizes that `verify` runs: small ones at which a layout is legal, pads and divides exactly as at the true ones."""

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwright.config import LayoutConfig, ModelConfig, RunConfig
from meshwright.dims import BATCH_AXES
from meshwright.stages import schedule_of

CAPS = {"L": 4, "D": 96, "F": 192, "N": 64, "H": 16, "V": 1024, "T": 48, "B": 32, "P": 128}
"""The largest sizes that are verified as they are; a larger one is replaced by one that the same degrees divide."""


def reduced(config: RunConfig, device_count: int = 8, layouts: Sequence[LayoutConfig] = ()) -> RunConfig:
    """`config` with sizes above `CAPS` replaced by small ones that the same degrees up to `device_count` divide.

    Each replacement n' has gcd(n', d) = gcd(n, d) for every d up to `device_count`, so a layout is legal for the
    small sizes exactly where it is for the true ones (heads are kept up to 64 of a kind). `layouts` are those that will
    run: layers and batch stay large enough for their pipelines.
    """
    model, train = config.model, config.train
    common, prime = math.lcm(*range(1, device_count + 1)), _prime_above(max(device_count, 8))

    def small(size: int, cap: int, least: int = 1) -> int:
        if size <= cap:
            return size
        kept = math.gcd(size, common)
        while kept < least:
            kept *= prime  # which divides no degree
        return kept

    heads, kv_heads = _small_heads(model, common)
    length = small(train.sequence_length, CAPS["T"], least=16)
    batch, parts = train.sequences, config.layout.microbatches
    if batch > CAPS["B"] and batch % parts == 0:
        shares = [math.prod(layout.degrees[axis] for axis in BATCH_AXES) * layout.microbatches for layout in layouts]
        batch = math.lcm(parts * math.gcd(batch // parts, common), *(n for n in shares if batch % n == 0))
    return replace(
        config,
        model=replace(
            model,
            layers=_small_layers(model, [layout for layout in layouts if layout.pipe > 1]),
            d_model=small(model.d_model, CAPS["D"], least=24),
            d_ff=small(model.d_ff, CAPS["F"], least=24),
            heads=heads,
            kv_heads=kv_heads,
            head_size=min(model.head_size, CAPS["H"]),
            vocab_size=small(model.vocab_size, CAPS["V"], least=100),
            positions=min(model.positions, max(CAPS["P"], length)),
        ),
        train=replace(train, batch_sequences=batch, batch_tokens=0, sequence_length=length),
    )


def _small_layers(model: ModelConfig, pipelines: list[LayoutConfig]) -> int:
    """The fewest layers on which stages are even where they are now; all where a layout says how many each has."""
    if any(layout.stage_layers != "balanced" for layout in pipelines):
        return model.layers
    positions = {layout.pipe * schedule_of(layout).chunks for layout in pipelines}
    alike = lambda n: all((n % p == 0) == (model.layers % p == 0) for p in positions)  # noqa: E731
    least = min(model.layers, max(CAPS["L"], *positions, 0))
    return next((n for n in range(least, model.layers) if alike(n)), model.layers)


def _prime_above(n: int) -> int:
    return next(p for p in range(n + 1, 2 * n + 2) if all(p % d for d in range(2, p)))


def _small_heads(model: ModelConfig, common: int) -> tuple[int, int]:
    """Query and key/value heads: the same where few; else as divisible and, where it fits, grouped alike."""
    if model.heads <= CAPS["N"]:
        return model.heads, model.kv_heads
    kv_heads = model.kv_heads if model.kv_heads <= 16 else math.gcd(model.kv_heads, common)
    group = 1 if model.heads == model.kv_heads else math.gcd(model.heads // model.kv_heads, common)
    return kv_heads * group, kv_heads


def sizes_text(config: RunConfig) -> str:
    """The sizes that are verified, in one line."""
    m, t = config.model, config.train
    words = {"family": m.family, "L": m.layers, "D": m.d_model, "F": m.d_ff}
    if m.is_language_model:
        words |= {"N": m.heads, "K": m.kv_heads, "H": m.head_size, "V": m.vocab_size, "T": t.sequence_length}
    return " ".join(f"{key}={value}" for key, value in (words | {"B": t.sequences}).items())
