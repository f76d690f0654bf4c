"""The state of a run and where each part of it lies: parameters, the optimiser's state, the number of steps done."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.config import LayoutConfig, RunConfig
from meshwright.engine import Engine
from meshwright.layout import Layout, Spec, letters_of
from meshwright.mesh import rings
from meshwright.model import params as parameters
from meshwright.parallel import accumulate
from meshwright.train import optim

Tree = Any


@dataclass(frozen=True)
class Run:
    """One configuration on one mesh: everything that stays the same while it trains."""

    config: RunConfig
    layout: Layout
    engine: Engine
    mesh: Mesh

    @classmethod
    def of(cls, config: RunConfig, layout: Layout, mesh: Mesh) -> "Run":
        platform = mesh.devices.flat[0].platform
        engine = Engine.of(layout, config.train, platform, config.data.packing)
        return cls(config, layout, replace(engine, rings=rings(mesh)), mesh)

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def remat(self) -> str:
        remat = self.config.train.remat
        return remat if remat != "auto" else "none" if self.platform == "cpu" else "full"

    @property
    def transformation(self) -> optax.GradientTransformation:
        return optim.transformation(self.config.optim, self.layout)

    def specs(self) -> Tree:
        """The state's tree of `PartitionSpec`."""
        rule = lambda letters: partition(self.layout.stored(letters))  # noqa: E731
        params = parameters.specs(self.layout.model, rule)
        return {"params": params, "opt": self._opt_specs(), "step": PartitionSpec()}

    def _opt_specs(self) -> Tree:
        """Moments lie as `layout.updated` says; counters and whole-leaf statistics are replicated."""
        single = Layout(LayoutConfig(), self.layout.model)
        shapes = parameters.specs(
            single.model, lambda letters: jax.ShapeDtypeStruct(single.shape(letters), jnp.float32)
        )
        state = jax.eval_shape(optim.transformation(self.config.optim, single).init, shapes)
        whole = self.config.optim.name == "adafactor"

        def leaf(path: tuple[Any, ...], kind: jax.ShapeDtypeStruct) -> PartitionSpec:
            letters = "" if whole else moment_letters(path, kind, single)
            return partition(self.layout.updated(letters))

        return jax.tree_util.tree_map_with_path(leaf, state)

    def shardings(self, *, at_rest: bool = False) -> Tree:
        """The state's shardings. `at_rest`: between steps, the optimiser's state in host memory if so configured."""
        named = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs())
        if at_rest and self.config.optim.offload:
            named["opt"] = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), named["opt"])
        return named

    def initial_state(self) -> Tree:
        """The state before the first step: a function of configuration and seed, equal bit for bit on every layout."""
        return self.initial_program()()

    def initial_program(self) -> Any:
        """The program ``() -> state`` that makes it."""
        train = self.config.train

        def shards() -> Tree:
            params = parameters.initial_shards(self.layout, train.seed, jnp.dtype(train.param_dtype))
            opt = self.transformation.init(accumulate.updated_shards(self.engine, params))
            return {"params": params, "opt": opt, "step": jnp.zeros((), jnp.int32)}

        return self.manual(shards, (), self.specs(), out_shardings=self.shardings(at_rest=True))

    def manual(self, function: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
        """`function` as one compiled program, manual over the whole mesh."""
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True), **options
        )

    def batch_specs(self, letters: dict[str, str]) -> dict[str, PartitionSpec]:
        """Where a batch lies: B over the batch axes, T over context (every tensor rank reads all of its tokens)."""
        layout = self.layout
        axes = {"B": layout.activation("B")[0], "T": layout.live("context")}
        return {name: partition(tuple(axes.get(letter, ()) for letter in word)) for name, word in letters.items()}


def moment_letters(path: tuple[Any, ...], leaf: Any, layout: Layout) -> str:
    """The letters of a leaf of the state that is a parameter or is shaped like one; none of any other."""
    name = optim.path_of(path)
    letters = letters_of(name) if "_" in name.rsplit("/", 1)[-1] else ""
    return letters if letters.isupper() and tuple(leaf.shape) == layout.shape(letters) else ""


def partition(spec: Spec) -> PartitionSpec:
    """A layout as JAX writes it."""
    return PartitionSpec(*(axes or None for axes in spec))
