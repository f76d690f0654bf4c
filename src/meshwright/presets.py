"""Presets: functions that return configurations, one per name, with the published sizes.

Sources of the sizes: GPT-2, Radford et al. 2019 and the released checkpoints; Llama 1, arXiv:2302.13971, table 2;
Llama 2, arXiv:2307.09288, table 1; Llama 3 and 3.1, arXiv:2407.21783, table 3; Llama 3.2, its model cards. Learning
rates are those of the same papers where given, for GPT-2 those of its sizes in Brown et al. 2020 (arXiv:2005.14165,
table 2.1); so is the batch: about 4M tokens a step for Llama, 0.5M for GPT-2.
"""

import difflib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.config import ModelConfig, OptimConfig, Refused, RopeScaling, RunConfig, TrainConfig, load

# ---- parameters ------------------------------------------------------------------------------------------


def parameter_names(model: ModelConfig) -> tuple[str, ...]:
    """The path of every parameter, in reading order; a name ends in its letters: ``layers/attention/q_LDNH``."""
    if not model.is_language_model:
        return ("layers/mlp/up_LDF", "layers/mlp/down_LFD")
    gpt = model.family == "gpt"
    attention = ("q_LDNH", "k_LDKH", "v_LDKH", "out_LNHD")
    attention_bias = ("q_bias_LNH", "k_bias_LKH", "v_bias_LKH", "out_bias_LD") if gpt else ()
    mlp = ("up_LDF", "down_LFD", "up_bias_LF", "down_bias_LD") if gpt else ("gate_LDF", "up_LDF", "down_LFD")
    norm = ("scale", "bias") if gpt else ("scale",)
    return (
        "embedding/tokens_VD",
        *(("embedding/positions_PD",) if gpt else ()),
        *(f"layers/attention_norm/{name}_LD" for name in norm),
        *(f"layers/attention/{name}" for name in (*attention, *attention_bias)),
        *(f"layers/mlp_norm/{name}_LD" for name in norm),
        *(f"layers/mlp/{name}" for name in mlp),
        *(f"final_norm/{name}_D" for name in norm),
        *(() if model.tied_embeddings else ("head/tokens_DV",)),
    )


def parameter_count(model: ModelConfig) -> int:
    """The number of parameters, without padding: over all parameters, the product of the sizes of its letters."""
    sizes = model.sizes
    return sum(math.prod(sizes[letter] for letter in name.rsplit("_", 1)[1]) for name in parameter_names(model))


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs that training needs for one token, forward and backward, without rematerialisation.

    6 for each weight of a matmul (Kaplan et al. 2020, arXiv:2001.08361, section 2.1; the embedding's look-up is none,
    a tied head is one), and for attention's two products 6 L N H T, counting causal pairs only. A regression's token is
    one example.
    """
    sizes, weights = model.sizes, 0
    for name in parameter_names(model):
        letters = name.rsplit("_", 1)[1]
        if set(letters) & set("FNKV") and "D" in letters and (letters != "VD" or model.tied_embeddings):
            weights += math.prod(sizes[letter] for letter in letters)
    attention = model.layers * model.heads * model.head_size * sequence_length if model.is_language_model else 0
    return 6.0 * (weights + attention)


# ---- proofs and demonstrations ---------------------------------------------------------------------------


def llama_demo() -> RunConfig:
    """What `make train` trains: a few million parameters, about a minute and a half on two cores."""
    return RunConfig(
        model=ModelConfig(layers=4, d_model=192, d_ff=512, heads=8, kv_heads=4, head_size=24, vocab_size=2048),
        optim=OptimConfig(lr=3e-3, warmup_steps=20),
        train=TrainConfig(steps=240, batch_sequences=32, sequence_length=128, eval_sequences=64, sample_tokens=48),
    )


def llama_tiny() -> RunConfig:
    """A Llama for proofs: many layers and heads, little of everything else. Its vocabulary, 512, still carries text."""
    return RunConfig(
        model=ModelConfig(layers=8, d_model=32, d_ff=64, heads=8, kv_heads=4, head_size=4, vocab_size=512),
        optim=OptimConfig(lr=5e-3, warmup_steps=5),
        train=TrainConfig(steps=50, batch_sequences=32, sequence_length=32, eval_sequences=32, sample_tokens=16),
    )


def gpt_tiny() -> RunConfig:
    """A GPT for proofs, as `llama_tiny`: dropout off, so that any layout can be compared with one device."""
    return RunConfig(
        model=ModelConfig(
            family="gpt",
            layers=8,
            d_model=32,
            d_ff=64,
            heads=8,
            kv_heads=8,
            head_size=4,
            vocab_size=512,
            positions=64,
            tied_embeddings=True,
        ),
        optim=OptimConfig(lr=5e-3, warmup_steps=5),
        train=TrainConfig(steps=50, batch_sequences=32, sequence_length=32, eval_sequences=32, sample_tokens=16),
    )


def ffn_demo() -> RunConfig:
    """One feed-forward block, relu(x W1) W2, on a batch of 16 vectors of 8 with 32 hidden units."""
    return _regression("ffn", layers=1)


def residual_demo() -> RunConfig:
    """16 residual blocks, x + relu(x W1) W2, fitted to y = sin(x w) by mean squared error at rate 1e-3."""
    return _regression("residual", layers=16)


def _regression(family: str, layers: int) -> RunConfig:
    return RunConfig(
        model=ModelConfig(family=family, layers=layers, d_model=8, d_ff=32),
        optim=OptimConfig(name="sgd", lr=1e-3, schedule="constant", weight_decay=0.0, clip_norm=0.0),
        train=TrainConfig(steps=100, batch_sequences=16),
    )


# ---- published sizes -------------------------------------------------------------------------------------


def _gpt2(layers: int, d_model: int, lr: float) -> RunConfig:
    return RunConfig(
        model=ModelConfig(
            family="gpt",
            layers=layers,
            d_model=d_model,
            d_ff=4 * d_model,
            heads=d_model // 64,
            kv_heads=d_model // 64,
            head_size=64,
            vocab_size=50257,
            positions=1024,
            tied_embeddings=True,
        ),
        optim=OptimConfig(lr=lr, warmup_steps=2000),
        train=TrainConfig(steps=100_000, batch_sequences=512, sequence_length=1024, **_LONG_RUN),
    )


def _llama(
    layers: int,
    d_model: int,
    d_ff: int,
    heads: int,
    kv_heads: int,
    *,
    lr: float,
    head_size: int = 128,
    vocab_size: int = 128_256,
    rope_theta: float = 500_000.0,
    rope_scaling: RopeScaling | None = None,
    norm_eps: float = 1e-5,
    tied_embeddings: bool = False,
    sequence_length: int = 4096,
) -> RunConfig:
    model = ModelConfig(
        layers=layers,
        d_model=d_model,
        d_ff=d_ff,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocab_size,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=norm_eps,
        tied_embeddings=tied_embeddings,
    )
    sequences = 4 * 2**20 // sequence_length
    return RunConfig(
        model=model,
        optim=OptimConfig(lr=lr, warmup_steps=2000),
        train=TrainConfig(steps=100_000, batch_sequences=sequences, sequence_length=sequence_length, **_LONG_RUN),
    )


_LONG_RUN: dict[str, Any] = {"eval_every": 1000, "checkpoint_every": 1000}
_LLAMA_2: dict[str, Any] = {"vocab_size": 32_000, "rope_theta": 10_000.0}
_LLAMA_1: dict[str, Any] = {**_LLAMA_2, "norm_eps": 1e-6, "sequence_length": 2048}
_LONG: dict[str, Any] = {"rope_scaling": RopeScaling(factor=8.0)}
_SMALL: dict[str, Any] = {"rope_scaling": RopeScaling(factor=32.0), "tied_embeddings": True}

PRESETS: dict[str, Callable[[], RunConfig]] = {
    "llama-demo": llama_demo,
    "llama-tiny": llama_tiny,
    "gpt-tiny": gpt_tiny,
    "ffn-demo": ffn_demo,
    "residual-demo": residual_demo,
    "gpt2-124m": lambda: _gpt2(12, 768, lr=6e-4),
    "gpt2-355m": lambda: _gpt2(24, 1024, lr=3e-4),
    "gpt2-774m": lambda: _gpt2(36, 1280, lr=2.5e-4),
    "gpt2-1.5b": lambda: _gpt2(48, 1600, lr=2e-4),
    "llama1-7b": lambda: _llama(32, 4096, 11_008, 32, 32, lr=3e-4, **_LLAMA_1),
    "llama1-65b": lambda: _llama(80, 8192, 22_016, 64, 64, lr=1.5e-4, **_LLAMA_1),
    "llama2-7b": lambda: _llama(32, 4096, 11_008, 32, 32, lr=3e-4, **_LLAMA_2),
    "llama2-13b": lambda: _llama(40, 5120, 13_824, 40, 40, lr=3e-4, **_LLAMA_2),
    "llama2-70b": lambda: _llama(80, 8192, 28_672, 64, 8, lr=1.5e-4, **_LLAMA_2),
    "llama3-8b": lambda: _llama(32, 4096, 14_336, 32, 8, lr=3e-4),
    "llama3-70b": lambda: _llama(80, 8192, 28_672, 64, 8, lr=1.5e-4),
    "llama3.1-8b": lambda: _llama(32, 4096, 14_336, 32, 8, lr=3e-4, **_LONG),
    "llama3.1-70b": lambda: _llama(80, 8192, 28_672, 64, 8, lr=1.5e-4, **_LONG),
    "llama3.1-405b": lambda: _llama(126, 16_384, 53_248, 128, 8, lr=8e-5, **_LONG),
    "llama3.2-1b": lambda: _llama(16, 2048, 8192, 32, 8, lr=3e-4, head_size=64, **_SMALL),
    "llama3.2-3b": lambda: _llama(28, 3072, 8192, 24, 8, lr=3e-4, **_SMALL),
}
"""Every preset by its name."""

WITH_EXPERTS = ("mixtral-tiny", "switch-tiny", "mixtral-8x7b", "mixtral-8x22b", "switch-base")
"""Names that are taken: these models have experts, which cannot run yet."""


def resolve(name_or_path: str) -> RunConfig:
    """The configuration that a command names: a preset, or else a TOML file; anything else is `Refused`."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]()
    if name_or_path in WITH_EXPERTS:
        raise Refused(
            f"preset {name_or_path!r} is a mixture of experts, which cannot run yet"
            f"\npresets that can: {', '.join(PRESETS)}"
        )
    if name_or_path.endswith(".toml") or Path(name_or_path).exists():
        return load(name_or_path)
    close = difflib.get_close_matches(name_or_path.replace("_", "-").lower(), PRESETS, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise Refused(f"{name_or_path!r} is neither a preset nor a file.{hint}\npresets: {', '.join(PRESETS)}")
