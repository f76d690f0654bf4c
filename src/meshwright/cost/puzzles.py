"""Eight ways to train, as programs for `events.run`: the puzzles 0 to 7 of LLM-Training-Puzzles (S. Rush, 2023).

Memory is counted in u = 65,536 elements (HIDDEN 512, LENGTH 256 there): a layer's weight, optimizer state and gradient take
4u each, an activation 2u per batch. Forward and backward of a layer take 1 per batch, an update 0.5, a collective 0.3 of any
size over any ranks, a message 0.2 on either side. `reference` programs free what the puzzles' published solutions free;
others free everything as soon as it is legal and update each layer as soon as its gradient is there.
"""

from collections.abc import Iterator
from fractions import Fraction

from meshwright.cost.events import Name, Step, tidy
from meshwright.schedules.generate import make
from meshwright.schedules.table import Schedule

UPDATE, COLLECTIVE, MESSAGE = Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)
LAYER, BATCH = 4, 2
"""u: a layer's weight, state or gradient; one batch's activation."""

Program = list[Step]


# ---- steps ----


def _load(layers: int | range, shards: int = 1) -> Step:
    """Weights and optimizer states, or this rank's shards of them."""
    layers = range(layers) if isinstance(layers, int) else layers
    names: list[Name] = [(what, layer) for layer in layers for what in ("weight", "state")]
    return Step(makes=tuple((name, Fraction(LAYER, shards)) for name in names))


def _input(batches: int, m: int = 0) -> Step:
    return Step(makes=((("activation", 0, m), BATCH * batches),))


def _forward(layer: int, batches: int, m: int = 0, weight: str = "weight", frees: tuple[Name, ...] = ()) -> Step:
    made = ("activation", layer + 1, m)
    needs = (("activation", layer, m), (weight, layer))
    return Step("forward", batches, needs, ((made, BATCH * batches),), frees, layer, m)


def _loss(layers: int, batches: int, m: int = 0, frees: tuple[Name, ...] = ()) -> Step:
    made = ("error", layers, m)
    return Step("loss", 0, (("activation", layers, m),), ((made, BATCH * batches),), frees, layers, m)


def _backward(layer: int, batches: int, m: int = 0, weight: str = "weight", frees: tuple[Name, ...] = ()) -> Step:
    """`error` is the gradient of an activation, `gradient` that of a weight."""
    needs = (("activation", layer, m), ("error", layer + 1, m), (weight, layer))
    makes = ((("gradient", layer, m), LAYER), (("error", layer, m), BATCH * batches))
    return Step("backward", batches, needs, makes, frees, layer, m)


def _used(layer: int, m: int = 0) -> tuple[Name, ...]:
    """What the reference solutions free after a backward."""
    return ("error", layer + 1, m), ("activation", layer, m)


def _sum(layer: int, ms: range, first: bool) -> Step:
    """Add the gradients of microbatches to the layer's, which the `first` sum makes."""
    parts: tuple[Name, ...] = tuple(("gradient", layer, m) for m in ms)
    total: Name = ("gradient", layer)
    return Step(needs=parts if first else (total, *parts), makes=((total, LAYER),), frees=parts)


def _sync(kind: str, layer: int, gradient: Name, shards: int = 1, has: bool = True) -> Step:
    makes = ((("gradient", layer), Fraction(LAYER, shards)),)
    frees = (gradient,) if has else ()
    return Step(kind, COLLECTIVE, (gradient,) if has else (), makes, frees, layer, barrier=True)


def _gather(layer: int) -> Step:
    makes = ((("whole", layer), LAYER),)
    return Step("allgather", COLLECTIVE, (("weight", layer),), makes, layer=layer, barrier=True)


def _update(layer: int) -> Step:
    needs: tuple[Name, ...] = (("gradient", layer), ("weight", layer), ("state", layer))
    return Step("update", UPDATE, needs, layer=layer)


def _send(name: Name, to: int) -> Step:
    return Step("pass", MESSAGE, (name,), to=to)


def _receive(name: Name, source: int, batches: int) -> Step:
    return Step("pass", MESSAGE, makes=((name, BATCH * batches),), source=source)


def _finish(program: Iterator[Step], reference: bool) -> Program:
    return list(program) if reference else tidy(program)


# ---- one rank ----


def standard(layers: int = 2, batches: int = 4) -> list[Program]:
    """Puzzle 0: all batches at once on one rank."""
    return [tidy(_one_rank(layers, batches, 1))]


def accumulation(layers: int = 2, batches: int = 4) -> list[Program]:
    """Puzzle 1: one batch after another, their gradients summed."""
    return [tidy(_one_rank(layers, 1, batches))]


def _one_rank(layers: int, batches: int, microbatches: int) -> Iterator[Step]:
    yield _load(layers)
    for m in range(microbatches):
        yield _input(batches, m)
        yield from (_forward(layer, batches, m) for layer in range(layers))
        yield _loss(layers, batches, m)
        for layer in reversed(range(layers)):
            yield _backward(layer, batches, m)
            yield _sum(layer, range(m, m + 1), first=m == 0)
    yield from (_update(layer) for layer in range(layers))


# ---- data parallel ----


def data_parallel(ranks: int = 4, layers: int = 2, reference: bool = False) -> list[Program]:
    """Puzzle 2: a batch per rank, gradients summed over the ranks."""

    def program() -> Iterator[Step]:
        yield _load(layers)
        yield _input(1)
        yield from (_forward(layer, 1) for layer in range(layers))
        yield _loss(layers, 1)
        for layer in reversed(range(layers)):
            yield _backward(layer, 1, frees=_used(layer))
        for layer in range(layers):
            yield _sync("allreduce", layer, ("gradient", layer, 0))
            yield _update(layer)

    return [_finish(program(), reference) for _ in range(ranks)]


def weight_sharded(ranks: int = 4, layers: int = 6, reference: bool = False) -> list[Program]:
    """Puzzle 3: weights and states in shards, gathered before use; gradients summed whole."""

    def program() -> Iterator[Step]:
        yield from _gathered_forward(ranks, layers)
        for layer in reversed(range(layers)):
            yield _gather(layer)
            yield _backward(layer, 1, weight="whole", frees=(*_used(layer), ("whole", layer)))
            if not reference:
                yield from (_sync("allreduce", layer, ("gradient", layer, 0)), _update(layer))
        for layer in range(layers) if reference else ():
            yield from (_sync("allreduce", layer, ("gradient", layer, 0)), _update(layer))

    return [_finish(program(), reference) for _ in range(ranks)]


def fully_sharded(ranks: int = 4, layers: int = 6, reference: bool = False) -> list[Program]:
    """Puzzle 4, FSDP: weights, states and gradients in shards."""

    def program() -> Iterator[Step]:
        yield from _gathered_forward(ranks, layers)
        yield Step(frees=(("activation", layers, 0),))
        for layer in reversed(range(layers)):
            yield _gather(layer)
            yield _backward(layer, 1, weight="whole")
            yield _sync("scatterreduce", layer, ("gradient", layer, 0), ranks)
            yield Step(frees=(*_used(layer), ("whole", layer)))
        yield from (_update(layer) for layer in range(layers))

    return [_finish(program(), reference) for _ in range(ranks)]


def _gathered_forward(ranks: int, layers: int) -> Iterator[Step]:
    yield _load(layers, ranks)
    yield _input(1)
    for layer in range(layers):
        yield _gather(layer)
        yield _forward(layer, 1, weight="whole", frees=(("whole", layer),))
    yield _loss(layers, 1)


# ---- pipelines ----


def pipeline(batches: int = 4, reference: bool = False) -> list[Program]:
    """Puzzle 5: four stages of two layers, all batches at once."""
    return scheduled(make("gpipe", 4, 1), batches=batches, reference=reference)


def gpipe(microbatches: int = 4, reference: bool = False) -> list[Program]:
    """Puzzle 6: the same, batch by batch: all forward, then all backward."""
    return scheduled(make("gpipe", 4, microbatches), reference=reference)


def one_f_one_b(microbatches: int = 4) -> list[Program]:
    """The same with one forward and one backward by turns."""
    return scheduled(make("1f1b", 4, microbatches))


def scheduled(schedule: Schedule, layers: int = 8, batches: int = 1, reference: bool = False) -> list[Program]:
    """The programs of a schedule of one chunk per stage, backward whole; `batches` in each microbatch."""
    last = schedule.stages - 1

    def program(rank: int) -> Iterator[Step]:
        mine = range(rank * layers // schedule.stages, (rank + 1) * layers // schedule.stages)
        yield _load(mine)
        for kind, m, _ in schedule.order(rank):
            if kind == "F":
                edge: Name = ("activation", mine[0], m)
                yield _input(batches, m) if rank == 0 else _receive(edge, rank - 1, batches)
                yield from (_forward(layer, batches, m) for layer in mine)
                if rank != last:
                    yield _send(("activation", mine[-1] + 1, m), rank + 1)
                continue
            edge = ("error", mine[-1] + 1, m)
            yield _loss(layers, batches, m) if rank == last else _receive(edge, rank + 1, batches)
            for layer in reversed(mine):
                yield _backward(layer, batches, m, frees=_used(layer, m))
                if not reference:
                    yield _sum(layer, range(m, m + 1), first=m == 0)
            if rank:
                yield _send(("error", mine[0], m), rank - 1)
        for layer in reversed(mine):
            if reference:
                yield _sum(layer, range(schedule.microbatches), first=True)
            yield _update(layer)

    return [_finish(program(rank), reference) for rank in range(schedule.stages)]


def pipeline_fully_sharded(reference: bool = False) -> list[Program]:
    """Puzzle 7: four pipelines of four stages of one layer, every weight in sixteen shards, gathered by all."""
    layers, ranks = 4, 16

    def program(rank: int) -> Iterator[Step]:
        mine = rank % layers
        yield _load(layers, ranks)
        for layer in range(layers):
            if layer == mine:
                yield _input(1) if mine == 0 else _receive(("activation", layer, 0), rank - 1, 1)
            yield _gather(layer)
            if layer == mine:
                yield _forward(layer, 1, weight="whole")
            yield Step(frees=(("whole", layer),))
            if layer == mine:
                yield _loss(layers, 1) if mine == layers - 1 else _send(("activation", layer + 1, 0), rank + 1)
        for layer in reversed(range(layers)):
            if layer == mine != layers - 1:
                yield _receive(("error", layer + 1, 0), rank + 1, 1)
            yield _gather(layer)
            if layer == mine:
                yield _backward(layer, 1, weight="whole", frees=_used(layer))
            yield _sync("scatterreduce", layer, ("gradient", layer, 0), ranks, has=layer == mine)
            yield Step(frees=(("whole", layer),))
            if layer == mine != 0:
                yield _send(("error", layer, 0), rank - 1)
        yield from (_update(layer) for layer in range(layers))

    return [_finish(program(rank), reference) for rank in range(ranks)]
