"""One training step of transformers' Llama in PyTorch: eager mode, float32, AdamW, CPU.

A peer for `cpu_step.py`, which runs it with an interpreter that has `torch` and `transformers` (this project needs
neither). It reads the sizes as JSON on its command line, then takes one step for every line it reads on standard
input and answers each with a JSON line: CPU seconds, seconds and the loss. Its first line is `{"ready": ...}`.

    python pytorch_llama.py '{"layers": 4, "d_model": 256, ...}'
"""

import json
import sys
import time

import torch
import transformers


def build(sizes: dict[str, int], attention: str) -> torch.nn.Module:
    """The same Llama as `plain_jax.py`'s: untied head, RoPE, RMSNorm, SwiGLU."""
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["d_model"],
        intermediate_size=sizes["d_ff"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_size"],
        max_position_embeddings=sizes["length"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).train()


def main() -> None:
    sizes = json.loads(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(sizes.get("threads", torch.get_num_threads()))
    model = build(sizes, sys.argv[2] if len(sys.argv) > 2 else "sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    tokens_BT = torch.randint(0, sizes["vocab_size"], (sizes["batch"], sizes["length"] + 1))
    inputs_BT, targets_BT = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits_BTV = model(inputs_BT).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(2):
        step()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    parameters = sum(p.numel() for p in model.parameters())
    print(
        json.dumps({"ready": True, "parameters": parameters, "threads": torch.get_num_threads(), **versions}),
        flush=True,
    )
    for _ in sys.stdin:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        loss = step()
        measured = {"cpu_s": time.process_time() - cpu_s, "step_s": time.perf_counter() - wall_s, "loss": loss}
        print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
