"""One run, written down: frozen dataclasses that refuse bad values, read from TOML and ``--set``.

Nothing here imports JAX, so a wrong configuration is refused in milliseconds.
"""

import dataclasses
import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.dims import AXES


class Refused(ValueError):
    """A request that cannot be carried out: the message names the setting, the numbers and the remedy."""


FAMILIES = ("gpt", "llama", "ffn", "residual")
DTYPES = ("float32", "bfloat16", "float16", "float64")
OPTIMIZERS = ("adamw", "sgd", "lion", "adafactor", "muon")
SCHEDULES = ("constant", "cosine", "linear", "wsd")


def require(holds: bool, message: str) -> None:
    """Raise `Refused` with `message` unless `holds`."""
    if not holds:
        raise Refused(message)


def _one_of(setting: str, value: str, allowed: Iterable[str]) -> None:
    require(
        value in allowed, f"{setting}={value!r} is not known; allowed: {', '.join(allowed)}{_nearest(value, allowed)}"
    )


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f". Did you mean {close[0]!r}?" if close else ""


def _at_least(section: str, config: Any, least: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value >= least, f"{section}.{name}={value} must be at least {least}")


def _at_most(section: str, config: Any, **limits: int) -> None:
    """Beyond any run there is, so a slip of the pen: refused at once instead of after hours of counting."""
    for name, most in limits.items():
        value = getattr(config, name)
        require(value <= most, f"{section}.{name}={value} must be at most {most}")


def _share(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0 <= value < 1, f"{section}.{name}={value} must be at least 0 and below 1")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling for long contexts (Llama Team 2024, arXiv:2407.21783; reference code of the release)."""

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        _at_least("model.rope_scaling", self, 1, "factor", "low_frequency_factor", "original_length")
        require(
            self.high_frequency_factor > self.low_frequency_factor,
            f"model.rope_scaling.high_frequency_factor={self.high_frequency_factor} must be above"
            f" low_frequency_factor={self.low_frequency_factor}",
        )


@dataclass(frozen=True)
class ModelConfig:
    """The model. Sizes are those of the whole model, never of a shard.

    `family`: `gpt` (learned positions, LayerNorm with bias, GELU), `llama` (RoPE, RMSNorm, SwiGLU),
    or the two regression networks of the tutorials: `ffn` (one feed-forward block) and `residual`
    (a stack of them), which map f32[B,D] to f32[B,D] and have no vocabulary.
    """

    family: str = "llama"
    layers: int = 4
    d_model: int = 256
    d_ff: int = 1024
    heads: int = 8
    kv_heads: int = 8
    head_size: int = 32
    vocab_size: int = 4096
    tied_embeddings: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    positions: int = 1024
    """Rows of the learned position table (`gpt` only): the longest sequence the model can read."""
    dropout_embedding: float = 0.0
    dropout_attention: float = 0.0
    dropout_residual: float = 0.0

    def __post_init__(self) -> None:
        _one_of("model.family", self.family, FAMILIES)
        _at_least(
            "model", self, 1, "layers", "d_model", "d_ff", "heads", "kv_heads", "head_size", "vocab_size", "positions"
        )
        _at_most(
            "model", self, layers=10_000, d_model=2**20, d_ff=2**22, heads=2**14, head_size=2**14, vocab_size=2**26
        )
        _share("model", self, "dropout_embedding", "dropout_attention", "dropout_residual")
        require(self.norm_eps > 0, f"model.norm_eps={self.norm_eps} must be above 0")
        if self.is_language_model:
            require(
                self.heads % self.kv_heads == 0,
                f"model.kv_heads={self.kv_heads} (K) must divide model.heads={self.heads} (N);"
                f" allowed: {_divisors(self.heads)}",
            )
        if self.family == "llama":
            require(self.head_size % 2 == 0, f"model.head_size={self.head_size} (H) must be even: RoPE turns pairs")
        if self.family == "gpt":
            require(
                self.kv_heads == self.heads,
                f"model.kv_heads={self.kv_heads} must equal model.heads={self.heads}: gpt has no grouped heads",
            )

    @property
    def is_language_model(self) -> bool:
        return self.family in ("gpt", "llama")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter that belongs to the model; V is the true vocabulary, without padding."""
        return {
            "D": self.d_model,
            "F": self.d_ff,
            "V": self.vocab_size,
            "N": self.heads,
            "K": self.kv_heads,
            "G": self.heads // self.kv_heads,
            "H": self.head_size,
            "L": self.layers,
            "P": self.positions,
        }


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


@dataclass(frozen=True)
class DataConfig:
    """What is read. With no `paths`, the Python standard library's own source text on this machine."""

    paths: tuple[str, ...] = ()
    """Files, directories or globs of .txt, .md, .py, .jsonl and .parquet, each also .gz or .zst."""
    text_field: str = "text"
    tokenizer: str = ""
    """A tokenizer.json; empty: a byte-level BPE of `model.vocab_size` is trained on the data and cached."""
    packing: bool = True
    """Several documents in one sequence, with no attention or loss across them; without it, one document a sequence, padded."""
    held_out_share: float = 0.02
    """Share of the documents kept for evaluation, chosen by a hash of their content."""

    def __post_init__(self) -> None:
        _share("data", self, "held_out_share")
        require(
            bool(self.text_field),
            "data.text_field is empty; it names the field of a .jsonl or .parquet row that holds the text",
        )


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser, its schedule and the clipping of gradients."""

    name: str = "adamw"
    lr: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 0
    final_lr_share: float = 0.1
    """The last step's learning rate as a share of `lr`."""
    decay_share: float = 0.2
    """Share of the steps that `wsd` spends falling to the final rate."""
    weight_decay: float = 0.1
    decay_exempt: tuple[str, ...] = ("norm", "bias", "position")
    """Parameters whose path contains one of these words are not decayed."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0
    """Momentum of `sgd`, and of `muon` where it is not 0 (else 0.95)."""
    moment_dtype: str = "float32"
    offload: bool = False
    """Keep the optimiser's state in host memory between steps, where the platform has it."""

    def __post_init__(self) -> None:
        _one_of("optim.name", self.name, OPTIMIZERS)
        _one_of("optim.schedule", self.schedule, SCHEDULES)
        _one_of("optim.moment_dtype", self.moment_dtype, DTYPES)
        _at_least("optim", self, 0, "lr", "warmup_steps", "weight_decay", "clip_norm", "eps", "final_lr_share")
        _share("optim", self, "b1", "b2", "momentum")
        require(0 < self.decay_share <= 1, f"optim.decay_share={self.decay_share} must be above 0 and at most 1")


@dataclass(frozen=True)
class TrainConfig:
    """The training itself: batch, length, precision, memory. Nothing here depends on the layout."""

    steps: int = 100
    batch_sequences: int = 8
    """The global batch of one optimiser step, in sequences (with `batch_tokens`, it is derived)."""
    batch_tokens: int = 0
    """The global batch in tokens instead; must be a multiple of `sequence_length`."""
    sequence_length: int = 256
    seed: int = 0
    remat: str = "auto"
    """What a layer keeps for its backward pass: `none` keeps all, `full` only its input, `save:NAMES` the named
    arrays; `auto` is `none` on CPU and `full` on accelerators."""
    param_dtype: str = "float32"
    compute_dtype: str = "auto"
    """`auto` is float32 on CPU and bfloat16 on accelerators."""
    reduce_dtype: str = "float32"
    """Gradients are summed across devices and microbatches in this dtype (or a wider compute dtype)."""
    logits_dtype: str = "float32"
    sparse_cores: bool = False
    """TPU v5p, without pipe and tensor: gathers and scatter-sums by the SparseCores, beside matmuls. By the compiler's
    estimate 3 to 5% faster; no chip has run it yet (docs/aot.md)."""
    loss_chunk_tokens: int = 1024
    """Tokens whose logits a device holds at one time; times the tensor degree, for then it holds a part of each."""
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""
    eval_sequences: int = 64
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = 2
    sample_prompt: str = ""
    """Text that the model continues before and after training; empty: a piece of the held-out text."""
    sample_tokens: int = 64
    tensorboard: bool = False

    def __post_init__(self) -> None:
        _at_least(
            "train", self, 1, "steps", "sequence_length", "loss_chunk_tokens", "keep_checkpoints", "batch_sequences"
        )
        _at_most("train", self, batch_sequences=2**22, batch_tokens=2**36, sequence_length=2**26, steps=2**31)
        _at_least(
            "train",
            self,
            0,
            "batch_tokens",
            "seed",
            "z_loss",
            "eval_every",
            "eval_sequences",
            "checkpoint_every",
            "sample_tokens",
        )
        _share("train", self, "label_smoothing")
        for name in ("param_dtype", "reduce_dtype", "logits_dtype"):
            _one_of(f"train.{name}", getattr(self, name), DTYPES)
        _one_of("train.compute_dtype", self.compute_dtype, ("auto", *DTYPES))
        require_remat(self.remat)
        if self.batch_tokens:
            require(
                self.batch_tokens % self.sequence_length == 0,
                f"train.batch_tokens={self.batch_tokens} must be a multiple of train.sequence_length={self.sequence_length}",
            )

    @property
    def sequences(self) -> int:
        """Sequences in the global batch of one optimiser step."""
        return self.batch_tokens // self.sequence_length if self.batch_tokens else self.batch_sequences


REMAT_NAMES = (
    "attention_norm",
    "q",
    "k",
    "v",
    "attention",
    "attention_out",
    "mlp_norm",
    "gate",
    "up",
    "hidden",
    "mlp_out",
)
"""The named arrays of a layer, in the order in which a layer makes them."""


def require_remat(remat: str) -> None:
    """Refuse a rematerialisation policy that is not `auto`, `none`, `full` or `save:` with known names."""
    policies = ("auto", "none", "full", "save:NAMES")
    if remat.startswith("save:"):
        for name in remat.removeprefix("save:").split(","):
            _one_of("train.remat names", name.strip(), REMAT_NAMES)
    else:
        _one_of("train.remat", remat, policies[:3]) if remat in policies[:3] else require(
            False,
            f"train.remat={remat!r} is not known; allowed: {', '.join(policies)} (names: {', '.join(REMAT_NAMES)})",
        )


@dataclass(frozen=True)
class LayoutConfig:
    """The degree of every axis and how they are used. Changing it never changes what is computed."""

    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 3
    """What the fsdp axis shards: 0 nothing, 1 optimiser state, 2 also gradients, 3 also parameters."""
    gather: str = "use"
    """When ZeRO-3 weights are gathered: `use` (each time a layer needs them) or `step` (once; more memory, fewer bytes)."""
    prefetch: bool = False
    """Gather a layer's ZeRO-3 weights while its neighbour computes. No effect with pipe, gather=step or zero below 3."""
    sequence_parallel: bool = True
    """Split the residual stream's tokens over the tensor axis, so that norms are not computed by every rank."""
    microbatches: int = 1
    """Parts of the global batch, run one after another; their gradients are added before one update."""
    schedule: str = "1f1b"
    """The order of a pipeline's work: a name (`meshwright show schedule --help` lists them) or a CSV file."""
    chunks: int = 1
    """Chunks of layers on each pipeline stage; 1 is the schedule's own number."""
    stage_layers: str = "balanced"
    """Layers of each stage, as in "8,8,8,6", or of each chunk in the order of the model; `balanced` counts the head's work."""
    stash: str = "layer"
    """What a pipeline keeps of a microbatch until its backward pass: each `layer`'s input and what `train.remat` names, or
    one input a `stage`, whose layers then run once more."""
    split_vocabulary: bool = False
    """Split embedding and head over pipe as well as tensor: all stages work on both, instead of the first and the last."""
    uniform_ticks: bool = False
    """Run a pipeline's F, B and W without branches: every stage does the work of every tick and throws away what is not its
    own. Branches remain for the model's ends (but see `split_vocabulary`) and for rows without a layer."""

    def __post_init__(self) -> None:
        _at_least("layout", self, 1, *AXES, "microbatches", "chunks")
        _at_most("layout", self, **dict.fromkeys(AXES, 2**16), microbatches=2**16, chunks=10_000)
        require(self.zero in (0, 1, 2, 3), f"layout.zero={self.zero} must be 0, 1, 2 or 3")
        _one_of("layout.gather", self.gather, ("use", "step"))
        _one_of("layout.stash", self.stash, ("layer", "stage"))
        require(
            self.stage_layers == "balanced" or bool(re.fullmatch(r"\d+(,\d+)*", self.stage_layers)),
            f"layout.stage_layers={self.stage_layers!r} must be 'balanced' or numbers of layers, as in '8,8,8,6'",
        )
        for axis in ("expert", "context"):
            degree = getattr(self, axis)
            require(
                degree == 1, f"layout.{axis}={degree} cannot run yet: pipe, data, fsdp and tensor can, so set {axis}=1"
            )

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def device_count(self) -> int:
        count = 1
        for degree in self.degrees.values():
            count *= degree
        return count

    def __str__(self) -> str:
        """The layout string: degrees above 1, then every other setting that is not its default."""
        parts = [f"{axis}={degree}" for axis, degree in self.degrees.items() if degree > 1] or ["data=1"]
        for f in dataclasses.fields(self):
            if f.name not in AXES and getattr(self, f.name) != f.default:
                parts.append(f"{f.name}={_toml_value(getattr(self, f.name)).strip(chr(34))}")
        return " ".join(parts)


@dataclass(frozen=True)
class RunConfig:
    """Everything that one run is: the five sections of its configuration file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)

    def __post_init__(self) -> None:
        model, train = self.model, self.train
        if model.family == "gpt":
            require(
                train.sequence_length <= model.positions,
                f"train.sequence_length={train.sequence_length} is longer than model.positions={model.positions},"
                " the rows of the position table; lower the first or raise the second",
            )


# ---- reading and writing ----------------------------------------------------------------------------


def load(path: str | Path) -> RunConfig:
    """Read a configuration file; every fault in it is `Refused` with the file's name."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refused(f"there is no configuration file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"configuration file {str(path)!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"configuration file {str(path)!r} is not valid TOML: {error}") from None
    try:
        return from_table(table)
    except Refused as refusal:
        raise Refused(f"{refusal} (in {path})") from None


def from_table(table: Mapping[str, Any]) -> RunConfig:
    """Make a `RunConfig` of nested tables; unknown keys are refused with the nearest known one."""
    return _build(RunConfig, table, "")


def override(config: RunConfig, settings: Iterable[str]) -> RunConfig:
    """Apply `section.key=value` settings, in order; values are TOML, and bare words are strings."""
    table = to_table(config)
    for setting in settings:
        name, equals, text = setting.partition("=")
        require(bool(equals), f"--set {setting!r} has no '='; write --set section.key=value")
        *sections, key = name.strip().split(".")
        require(
            bool(sections), f"--set {setting!r} names no section; write --set section.key=value, as in optim.lr=1e-3"
        )
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
            require(isinstance(inner, dict), f"--set {setting!r}: {section} is not a section")
        inner[key] = _parse_value(text.strip())
    return from_table(table)


def parse_layout(text: str, base: LayoutConfig | None = None) -> LayoutConfig:
    """Read a layout string such as `"fsdp=4 tensor=2 zero=1"`.

    Axes that it does not name have degree 1; other settings keep `base`'s values.
    """
    base = base or LayoutConfig()
    table = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)} | dict.fromkeys(AXES, 1)
    seen = set()
    for part in re.split(r"[\s,]+(?=[^\s,]*[a-z_=])", text.strip(" ,")) if text.strip(" ,") else ():
        name, equals, value = part.partition("=")
        require(bool(equals), f"layout {text!r}: {part!r} has no '='; write axis=degree, as in 'fsdp=4 tensor=2'")
        require(name not in seen, f"layout {text!r} names {name} twice")
        seen.add(name)
        table[name] = _parse_value(value)
    return _build(LayoutConfig, table, "layout")


def to_table(config: Any) -> dict[str, Any]:
    """Nested dictionaries of plain values: the inverse of `from_table`."""
    table = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            table[f.name] = to_table(value)
        elif value is not None:
            table[f.name] = list(value) if isinstance(value, tuple) else value
    return table


def flat(config: RunConfig) -> dict[str, Any]:
    """Every setting by its full name: ``{"model.layers": 4, ...}``."""
    settings = {}

    def add(prefix: str, table: dict[str, Any]) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                add(f"{prefix}{key}.", value)
            else:
                settings[prefix + key] = value

    add("", to_table(config))
    return settings


def to_toml(config: RunConfig) -> str:
    """The complete configuration as TOML: reading it back gives an equal `RunConfig`."""
    lines = []

    def write(name: str, table: dict[str, Any]) -> None:
        lines.append(f"[{name}]")
        lines.extend(f"{key} = {_toml_value(value)}" for key, value in table.items() if not isinstance(value, dict))
        lines.append("")
        for key, value in table.items():
            if isinstance(value, dict):
                write(f"{name}.{key}", value)

    for name, table in to_table(config).items():
        write(name, table)
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return repr(value)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(cls: type, table: Mapping[str, Any], path: str) -> Any:
    """Make the dataclass `cls` of `table`, whose place in the configuration is `path`."""
    kinds = typing.get_type_hints(cls)
    prefix = f"{path}." if path else ""
    require(isinstance(table, Mapping), f"{path}={table!r} must be a section with keys {', '.join(kinds)}")
    for key in table:
        if key not in kinds:
            what = "key" if path else "section"
            raise Refused(f"unknown {what} {prefix}{key}{_nearest(key, kinds) or '; known: ' + ', '.join(kinds)}")
    return cls(**{key: _convert(value, kinds[key], f"{prefix}{key}") for key, value in table.items()})


def _convert(value: Any, kind: Any, name: str) -> Any:
    """Give `value` the type `kind` where nothing is lost by it; refuse otherwise."""
    if isinstance(kind, types.UnionType):
        inner = next(k for k in typing.get_args(kind) if k is not type(None))
        return None if value is None or value == "none" else _convert(value, inner, name)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else _build(kind, value, name)
    if typing.get_origin(kind) is tuple:
        items = [value] if isinstance(value, str) else value
        require(
            isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items),
            f"{name}={value!r} must be a list of strings",
        )
        return tuple(items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and type(value) is int:
        return str(value)  # stage_layers=4
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    require(type(value) is kind, f"{name}={value!r} must be {words[kind]}")
    require(kind is not float or math.isfinite(value), f"{name}={value!r} must be finite")
    return value
