"""Writes tests/data/transformers.npz: what transformers' GPT-2 and Llama compute in float64, for the oracle's test.

Run by hand, in an environment with `torch` and `transformers` (written with 2.13 and 5.24), which this project does
not depend on: `python tests/make_transformers_fixture.py`.

transformers computes norms, softmax and RoPE in float32 whatever the model's dtype; here every float32 that its
code names is made float64, so that the figures are good to 1e-12.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

B, T, V = 2, 12, 23
LENGTHS = ((7, 5), (4, 6))  # two documents in each row; the second row ends in two tokens of padding
Z_LOSS, SMOOTHING = 0.01, 0.1
LLAMA = dict(hidden_size=8, intermediate_size=10, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def models() -> dict[str, torch.nn.Module]:
    """The models compared: GPT-2; Llama 3.1 with grouped heads; Llama with one key/value head and a tied head."""
    common = dict(vocab_size=V, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
    plain_rope = dict(rope_type="default", rope_theta=10000.0)
    return {
        "gpt": GPT2LMHeadModel(
            GPT2Config(
                **common,
                n_positions=16,
                n_embd=8,
                n_layer=2,
                n_head=2,
                n_inner=12,
                attn_pdrop=0.0,
                embd_pdrop=0.0,
                resid_pdrop=0.0,
            )
        ),
        "llama_grouped": LlamaForCausalLM(
            LlamaConfig(**common, **LLAMA, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5)
        ),
        "llama_tied": LlamaForCausalLM(
            LlamaConfig(
                **common,
                **LLAMA,
                num_key_value_heads=1,
                rope_parameters=plain_rope,
                rms_norm_eps=1e-6,
                tie_word_embeddings=True,
            )
        ),
    }


def make_batch() -> dict[str, np.ndarray]:
    """A packed batch with padding, as the loader makes it."""
    rng = np.random.default_rng(0)
    segments_BT = np.zeros((B, T), np.int32)
    positions_BT = np.zeros((B, T), np.int32)
    mask_BT = np.zeros((B, T), bool)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            span = slice(start, start + length)
            segments_BT[row, span], positions_BT[row, span] = number + 1, np.arange(length)
            mask_BT[row, start : start + length - 1] = True  # the last token of a document has no target
            start += length
    tokens_BT, targets_BT = rng.integers(0, V, (2, B, T)).astype(np.int32)
    return dict(
        tokens_BT=tokens_BT, targets_BT=targets_BT, mask_BT=mask_BT, segments_BT=segments_BT, positions_BT=positions_BT
    )


def forward(model: torch.nn.Module, batch: dict[str, np.ndarray]) -> torch.Tensor:
    """transformers' logits, with the packing given as its additive mask of four dims."""
    segments_BT = torch.tensor(batch["segments_BT"])
    same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    visible_BTS = same_BTS & torch.ones(T, T, dtype=torch.bool).tril()
    mask_B1TS = torch.zeros(B, 1, T, T, dtype=torch.float64)
    mask_B1TS[~visible_BTS[:, None]] = torch.finfo(torch.float64).min
    tokens_BT, positions_BT = (torch.tensor(batch[name]).long() for name in ("tokens_BT", "positions_BT"))
    return model(tokens_BT, attention_mask=mask_B1TS, position_ids=positions_BT, use_cache=False).logits


def losses(logits_BTV: torch.Tensor, batch: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain loss, and the loss with label smoothing and z-loss; both means over the counted targets."""
    mask_BT = torch.tensor(batch["mask_BT"])
    counted, targets = logits_BTV[mask_BT], torch.tensor(batch["targets_BT"]).long()[mask_BT]
    smoothed = torch.nn.functional.cross_entropy(counted, targets, label_smoothing=SMOOTHING)
    z_loss = Z_LOSS * (torch.logsumexp(counted, -1) ** 2).mean()
    return torch.nn.functional.cross_entropy(counted, targets), smoothed + z_loss


def main() -> None:
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.manual_seed(0)
    batch = make_batch()
    arrays = {f"batch.{name}": array for name, array in batch.items()}
    for name, model in models().items():
        model = model.double().eval()
        with torch.no_grad():
            for parameter in model.parameters():  # values that float16 holds exactly, so that the file is small
                parameter.copy_((torch.randn_like(parameter) * 0.3).to(torch.half).double())
        logits_BTV = forward(model, batch)
        assert logits_BTV.dtype == torch.float64
        plain, extended = losses(logits_BTV, batch)
        extended.backward()
        arrays |= {
            f"{name}.logits": logits_BTV.detach().numpy(),
            f"{name}.loss": plain.item(),
            f"{name}.extended_loss": extended.item(),
        }
        for key, parameter in model.named_parameters():
            arrays[f"{name}.weight.{key}"] = parameter.detach().numpy().astype(np.float16)
            arrays[f"{name}.grad.{key}"] = parameter.grad.numpy()
    np.savez_compressed(Path(__file__).parent / "data" / "transformers.npz", **arrays)


if __name__ == "__main__":
    main()
