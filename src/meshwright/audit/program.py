"""The child process of `audit.aot`: describe the devices, trace the run's step, compile it, write the facts down."""

import json
import sys
import time
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding

from meshwright import mesh
from meshwright.audit.target import Target, parse
from meshwright.config import RunConfig, from_table
from meshwright.layout import check
from meshwright.train.state import Run
from meshwright.train.step import objective_of, train_step


def devices(target: Target) -> list[Any]:
    """The devices of `target`, described to the compiler or (CPU) emulated."""
    shape = "x".join(map(str, target.shape))
    if target.kind.platform == "cpu":
        return jax.devices()
    if target.kind.platform == "tpu":
        described = topologies.get_topology_desc(platform="tpu", topology_name=f"{target.kind.compiler_name}:{shape}")
    else:  # partitions x hosts x devices of a host
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.kind.compiler_name,
            topology=f"1x{shape}",
            target_config=target.gpu_config(),
        )
    return list(described.devices)


def lowered(config: RunConfig, target: Target) -> Any:
    """The step of `config`, traced and lowered for `target`: exactly what `train` would run there."""
    layout = check(config, target.device_count)
    run = Run.of(config, layout, mesh.make(layout, devices(target)))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    state = jax.tree.map(place, jax.eval_shape(run.initial_state), run.shardings(at_rest=True))
    return train_step(run).lower(state, _batch(run))


def _batch(run: Run) -> dict[str, jax.ShapeDtypeStruct]:
    """The types of a global batch."""
    letters = objective_of(run).batch_letters
    sizes = run.layout.model.sizes | {"B": run.config.train.sequences, "T": run.config.train.sequence_length}
    kinds = {"mask_BT": jnp.bool_, "x_BD": jnp.float32, "y_BD": jnp.float32}
    specs = run.batch_specs(letters)
    return {
        name: jax.ShapeDtypeStruct(
            tuple(sizes[letter] for letter in word),
            kinds.get(name, jnp.int32),
            sharding=NamedSharding(run.mesh, specs[name]),
        )
        for name, word in letters.items()
    }


def facts(config: RunConfig, target: Target, text: Path | None) -> dict[str, Any]:
    """Compile and measure; bytes are of one device."""
    began = time.perf_counter()
    program = lowered(config, target)
    traced, processed = time.perf_counter(), time.process_time()
    compiled = program.compile()
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    answer = {
        "peak_bytes": getattr(memory, "peak_memory_in_bytes", None),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "trace_s": traced - began,
        "compile_s": done - traced,
        "compile_cpu_s": time.process_time() - processed,
        "compiler": _compiler(target),
    }
    return answer | (_write_text(compiled, text) if text else {})


def _compiler(target: Target) -> str:
    package = {"cpu": "jaxlib", "tpu": "libtpu", "gpu": "jaxlib"}[target.kind.platform]
    return f"jax {jax.__version__}, {package} {version(package)}"


def _write_text(compiled: Any, path: Path) -> dict[str, Any]:
    """Write the program's text. JAX 0.10.2 cannot print a TPU program with asynchronous Pallas calls; 0.12 can."""
    try:
        text = compiled.as_text()
    except Exception as error:  # whatever it is, the memory figures stand
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {"text_error": f"JAX {jax.__version__} cannot print this program ({reason}); JAX 0.12 can"}
    path.write_text(text, encoding="utf-8")
    return {"text_path": str(path)}


def main() -> None:
    request = json.load(sys.stdin)
    config, target = from_table(tomllib.loads(request["config"])), parse(request["target"])
    if target.kind.platform == "cpu":
        mesh.emulate(target.device_count)
    text = Path(request["text"]) if request["text"] else None
    Path(sys.argv[1]).write_text(json.dumps(facts(config, target, text)), encoding="utf-8")


if __name__ == "__main__":
    main()
