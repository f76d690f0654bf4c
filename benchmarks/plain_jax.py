"""The fastest one-device Llama training step we can write in plain JAX: the mark that the engine is held to on CPU.

One file, float32, AdamW by optax, the parameter tree of Meshwright and nothing else of it. What makes it fast on
XLA:CPU is written where it is done and measured in README.md. Run alone it times itself; `cpu_step.py` runs it beside
its peers, over the protocol described there.

    python plain_jax.py '{"layers": 4, "d_model": 256, ...}'
"""

import dataclasses
import functools
import itertools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model and its batch. Query heads equal key/value heads: that is what is compared here."""

    layers: int = 4
    d_model: int = 256
    d_ff: int = 1024
    heads: int = 8
    head_size: int = 32
    vocab_size: int = 1024
    batch: int = 8
    length: int = 256


QUERY_BLOCKS = 2
"""Attention is cut into this many blocks of queries, each against the keys it can see: 2 skip a quarter of the work."""


def init(s: Sizes) -> dict:
    """Parameters f32, normal with standard deviation 0.02."""
    rng = np.random.default_rng(0)
    L, D, F, N, H, V = s.layers, s.d_model, s.d_ff, s.heads, s.head_size, s.vocab_size

    def normal(*shape):
        return jnp.asarray(0.02 * rng.standard_normal(shape), jnp.float32)

    attention = {"q_LDNH": normal(L, D, N, H), "k_LDKH": normal(L, D, N, H), "v_LDKH": normal(L, D, N, H)}
    return {
        "embedding": {"tokens_VD": normal(V, D)},
        "layers": {
            "attention_norm": {"scale_LD": jnp.ones((L, D))},
            "attention": attention | {"out_LNHD": normal(L, N, H, D)},
            "mlp_norm": {"scale_LD": jnp.ones((L, D))},
            "mlp": {"gate_LDF": normal(L, D, F), "up_LDF": normal(L, D, F), "down_LFD": normal(L, F, D)},
        },
        "final_norm": {"scale_D": jnp.ones(D)},
        "head": {"tokens_DV": normal(D, V)},
    }


@jax.custom_vjp
def linear(x_MD, w_DF):
    """x w, whose weight gradient is a matmul of a transposed copy.

    XLA:CPU contracts two operands over their first dims at about half its best rate, and undoes a transpose
    written before such a matmul; the barrier keeps the (cheap) transposed copy of the narrower operand.
    """
    return x_MD @ w_DF


def _linear_forward(x_MD, w_DF):
    return x_MD @ w_DF, (x_MD, w_DF)


def _linear_backward(saved, dy_MF):
    x_MD, w_DF = saved
    if x_MD.shape[1] <= dy_MF.shape[1]:
        dw_DF = lax.optimization_barrier(x_MD.T) @ dy_MF
    else:
        dw_DF = lax.optimization_barrier(lax.optimization_barrier(dy_MF.T) @ x_MD).T
    return dy_MF @ w_DF.T, dw_DF


linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def attention(q_BNTH, k_BNSH, v_BNSH):
    """Causal attention in blocks of queries, with a backward pass in which no batched matmul is transposed.

    Saves the unnormalised probabilities e and 1/sum(e) instead of normalising T S entries: forward
    o = (e v)/sum, backward with do/sum in place of do. dk and dv are computed transposed, [H,S] = [H,T] . [T,S],
    because XLA:CPU contracts the T of [T,S] with that of [T,H] five times slower.
    """
    return _attention_forward(q_BNTH, k_BNSH, v_BNSH)[0]


def _query_blocks(T: int) -> list[tuple[int, int]]:
    edges = [i * T // QUERY_BLOCKS for i in range(QUERY_BLOCKS + 1)]
    return list(itertools.pairwise(edges))


def _attention_forward(q_BNTH, k_BNSH, v_BNSH):
    q_BNTH = q_BNTH * q_BNTH.shape[-1] ** -0.5
    out, saved = [], []
    for start, end in _query_blocks(q_BNTH.shape[2]):
        scores_BNTS = jnp.einsum("BNTH,BNSH->BNTS", q_BNTH[:, :, start:end], k_BNSH[:, :, :end])
        causal_TS = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        scores_BNTS = jnp.where(causal_TS, scores_BNTS, -jnp.inf)
        e_BNTS = jnp.exp(scores_BNTS - scores_BNTS.max(-1, keepdims=True))
        inverse_BNT1 = 1 / e_BNTS.sum(-1, keepdims=True)
        out.append(jnp.einsum("BNTS,BNSH->BNTH", e_BNTS, v_BNSH[:, :, :end]) * inverse_BNT1)
        saved.append((e_BNTS, inverse_BNT1))
    o_BNTH = jnp.concatenate(out, axis=2)
    return o_BNTH, (q_BNTH, k_BNSH, v_BNSH, o_BNTH, saved)


def _attention_backward(residuals, do_BNTH):
    q_BNTH, k_BNSH, v_BNSH, o_BNTH, saved = residuals
    T = q_BNTH.shape[2]
    delta_BNT1 = (do_BNTH * o_BNTH).sum(-1, keepdims=True)
    dq, dk_BNHS, dv_BNHS = [], 0, 0
    for (start, end), (e_BNTS, inverse_BNT1) in zip(_query_blocks(T), saved, strict=True):
        part = (slice(None), slice(None), slice(start, end))
        scaled_do_BNTH = do_BNTH[part] * inverse_BNT1
        dp_BNTS = jnp.einsum("BNTH,BNSH->BNTS", scaled_do_BNTH, v_BNSH[:, :, :end])
        ds_BNTS = e_BNTS * (dp_BNTS - delta_BNT1[part] * inverse_BNT1)
        dq.append(jnp.einsum("BNTS,BNSH->BNTH", ds_BNTS, k_BNSH[:, :, :end]))
        rest = ((0, 0), (0, 0), (0, 0), (0, T - end))
        dk_BNHS += jnp.pad(jnp.einsum("BNHT,BNTS->BNHS", _turned(q_BNTH[part]), ds_BNTS), rest)
        dv_BNHS += jnp.pad(jnp.einsum("BNHT,BNTS->BNHS", _turned(scaled_do_BNTH), e_BNTS), rest)
    dq_BNTH = jnp.concatenate(dq, axis=2) * q_BNTH.shape[-1] ** -0.5
    return dq_BNTH, _turned(dk_BNHS), _turned(dv_BNHS)


def _turned(x):
    """The last two dims swapped by a copy: XLA would fold a bare transpose into the matmul beside it."""
    return lax.optimization_barrier(jnp.swapaxes(x, 2, 3))


attention.defvjp(_attention_forward, _attention_backward)


def rms_norm(x_MD, scale_D):
    return x_MD * lax.rsqrt(jnp.mean(x_MD * x_MD, axis=-1, keepdims=True) + 1e-5) * scale_D


def rotate(x_BNTH):
    T, H = x_BNTH.shape[2:]
    angle_Th = np.arange(T)[:, None] * 10000.0 ** (-2 * np.arange(H // 2) / H)
    cos, sin = np.cos(angle_Th).astype("f"), np.sin(angle_Th).astype("f")
    a, b = jnp.split(x_BNTH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def layer(s: Sizes, x_MD, w):
    """One layer on M = B T rows: every matmul with a weight is a matmul of two matrices."""
    D, M = s.d_model, s.batch * s.length

    def heads(x_MP):
        return x_MP.reshape(s.batch, s.length, s.heads, s.head_size).swapaxes(1, 2)

    h_MD = rms_norm(x_MD, w["attention_norm"]["scale_LD"])
    q, k, v = (heads(linear(h_MD, w["attention"][name].reshape(D, -1))) for name in ("q_LDNH", "k_LDKH", "v_LDKH"))
    mixed_MP = attention(rotate(q), rotate(k), v).swapaxes(1, 2).reshape(M, -1)
    x_MD = x_MD + linear(mixed_MP, w["attention"]["out_LNHD"].reshape(-1, D))
    h_MD = rms_norm(x_MD, w["mlp_norm"]["scale_LD"])
    gate_MF, up_MF = linear(h_MD, w["mlp"]["gate_LDF"]), linear(h_MD, w["mlp"]["up_LDF"])
    return x_MD + linear(jax.nn.silu(gate_MF) * up_MF, w["mlp"]["down_LFD"])


def loss(s: Sizes, params, tokens_BT, targets_BT):
    """Mean cross-entropy. The layers are unrolled: a loop over them would copy what each one saves."""
    x_MD = params["embedding"]["tokens_VD"][tokens_BT.reshape(-1)]
    for i in range(s.layers):
        x_MD = layer(s, x_MD, jax.tree.map(lambda w: w[i], params["layers"]))  # noqa: B023 (used at once)
    logits_MV = linear(rms_norm(x_MD, params["final_norm"]["scale_D"]), params["head"]["tokens_DV"])
    is_target_MV = jnp.arange(s.vocab_size) == targets_BT.reshape(-1, 1)
    return jnp.mean(jax.nn.logsumexp(logits_MV, axis=-1) - jnp.sum(jnp.where(is_target_MV, logits_MV, 0), axis=-1))


def make_step(s: Sizes):
    """The initial state and the jitted step: (state, tokens, targets) -> (state, loss), with the state donated."""
    optimizer = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens_BT, targets_BT):
        params, moments = state
        value, grads = jax.value_and_grad(functools.partial(loss, s))(params, tokens_BT, targets_BT)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = init(s)
    return (params, optimizer.init(params)), step


def measured(run) -> dict[str, float]:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    value = run()
    return {"cpu_s": time.process_time() - cpu_s, "step_s": time.perf_counter() - wall_s, "loss": float(value)}


def main() -> None:
    """Answer `step` lines with one step's times and `matmul` lines with the machine's matmul rate, as JSON lines."""
    s = Sizes(**json.loads(sys.argv[1])) if len(sys.argv) > 1 else Sizes()
    state, step = make_step(s)
    tokens = np.random.default_rng(1).integers(0, s.vocab_size, (s.batch, s.length + 1)).astype(np.int32)
    inputs_BT, targets_BT = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])
    square = jnp.ones((2048, 2048))
    matmul = jax.jit(jnp.matmul)

    def one_step():
        nonlocal state
        state, value = step(state, inputs_BT, targets_BT)
        return jax.block_until_ready((state, value))[1]

    def matmuls():
        return jax.block_until_ready([matmul(square, square) for _ in range(4)])[0][0, 0]

    for _ in range(2):
        one_step(), matmuls()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
    print(json.dumps({"ready": True, "parameters": parameters, "jax": jax.__version__}), flush=True)
    for line in sys.stdin:
        if line.strip() == "matmul":
            times = measured(matmuls)
            print(json.dumps({"flops_per_cpu_s": 4 * 2 * 2048**3 / times["cpu_s"]}), flush=True)
        else:
            print(json.dumps(measured(one_step)), flush=True)


if __name__ == "__main__":
    main()
