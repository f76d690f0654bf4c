"""Text from the model: greedy is the same on every layout and right; chance draws from the right set, in its shares."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import mesh
from meshwright.config import ModelConfig, Refused, RunConfig, TrainConfig, parse_layout
from meshwright.layout import check, letters_of
from meshwright.model import params as parameters
from meshwright.train.sample import Sampling, choose, generate
from meshwright.train.state import Run
from meshwright.verify import oracle

VOCABULARY = 101
LLAMA = ModelConfig(layers=2, d_model=24, d_ff=24, heads=6, kv_heads=2, head_size=4, vocab_size=VOCABULARY)
GPT = replace(LLAMA, family="gpt", kv_heads=6, positions=16, tied_embeddings=True)
TRAIN = TrainConfig(batch_sequences=12, sequence_length=12, param_dtype="float64", compute_dtype="float64")
GREEDY = Sampling()


def start(model: ModelConfig, layout: str) -> Run:
    config = RunConfig(model=model, train=TRAIN, layout=parse_layout(layout))
    return Run.of(config, check(config), mesh.make(check(config)))


def weights(model: ModelConfig) -> dict:
    """Parameters with so much in them that the likeliest token changes at every place."""
    rng = np.random.default_rng(0)
    size = lambda path: tuple(model.sizes[letter] for letter in letters_of(path))  # noqa: E731
    return jax.tree.map(lambda path: rng.standard_normal(size(path)), parameters.names(model))


def on_devices(run: Run, params: dict) -> dict:
    def put(path: str, w: np.ndarray, sharding) -> jax.Array:
        wanted = run.layout.shape(letters_of(path))
        padded = np.pad(w, [(0, a - b) for a, b in zip(wanted, w.shape, strict=True)], constant_values=9)
        return jax.device_put(padded, sharding)

    return jax.tree.map(put, parameters.names(run.layout.model), params, run.shardings()["params"])


def by_hand(model: ModelConfig, params: dict, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation, token by token, by the oracle's whole logits over the last `sequence_length` tokens."""
    tokens, window = list(prompt), TRAIN.sequence_length
    ones_BT = jnp.ones((1, window), jnp.int32)
    place_BT = jnp.arange(window, dtype=jnp.int32)[None]
    params = jax.tree.map(jnp.asarray, params)
    logits = jax.jit(lambda batch: oracle.logits(model, params, batch))
    for _ in range(count):
        seen = tokens[-window:]  # what stands behind it is not seen by it
        tokens_BT = jnp.array([seen + [0] * (window - len(seen))], jnp.int32)
        z_BTV = logits({"tokens_BT": tokens_BT, "positions_BT": place_BT, "segments_BT": ones_BT})
        tokens.append(int(jnp.argmax(z_BTV[0, len(seen) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_greedy_is_the_oracles_on_every_layout_also_beyond_the_window(model):
    params, prompt, count = weights(model), [5, 100, 17, 3], 14
    expected = by_hand(model, params, prompt, count)
    assert len(set(expected)) > 4, "this text says nothing"
    layouts = ("data=1", "data=2 fsdp=2 tensor=2", "fsdp=4 zero=1", "tensor=6 sequence_parallel=false")
    for layout in (*layouts, "pipe=2 fsdp=2 microbatches=3", "pipe=2 tensor=2 split_vocabulary=true schedule=zb-h1"):
        run = start(model, layout)
        assert generate(run, on_devices(run, params), prompt, count, GREEDY) == expected, layout


def test_chance_is_the_same_on_every_layout_and_another_with_another_seed():
    params, texts = weights(LLAMA), {}
    for layout, seed in (("data=1", 0), ("fsdp=2 tensor=2", 0), ("data=1", 1)):
        run = start(LLAMA, layout)
        sampling = Sampling(temperature=3.0, top_p=0.9, seed=seed)
        texts[layout, seed] = generate(run, on_devices(run, params), [5, 100], 9, sampling)
    assert texts["data=1", 0] == texts["fsdp=2 tensor=2", 0]
    assert texts["data=1", 0] != texts["data=1", 1]
    assert max(texts["data=1", 0]) < VOCABULARY


def draws(z_V: np.ndarray, sampling: Sampling, count: int = 4000) -> np.ndarray:
    """How often each token is drawn, as a share, over `count` places."""
    one = jax.jit(lambda place: choose(jnp.asarray(z_V)[None], sampling, place)[0])
    tokens = jax.lax.map(one, jnp.arange(count, dtype=jnp.int32))
    return np.bincount(np.asarray(tokens), minlength=len(z_V)) / count


PROBABILITIES = np.array([0.05, 0.4, 0.2, 0.3, 0.05, 0.0])


def z_of(probabilities: np.ndarray) -> np.ndarray:
    low = np.finfo(np.float64).min  # as padding of the vocabulary has
    return np.where(probabilities > 0, np.log(np.maximum(probabilities, 1e-300)) + 3.0, low)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_draws_in_the_shares_of_the_softmax(temperature):
    expected = PROBABILITIES ** (1 / temperature)
    expected /= expected.sum()
    got = draws(z_of(PROBABILITIES), Sampling(temperature=temperature))
    assert got[-1] == 0
    np.testing.assert_allclose(got, expected, atol=4 * np.sqrt(0.25 / 4000))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.05, {1}), (0.39, {1}), (0.41, {1, 3}), (0.75, {1, 2, 3}), (0.91, {0, 1, 2, 3, 4}), (1.0, {0, 1, 2, 3, 4})],
)
def test_top_p_draws_from_the_smallest_set_that_holds_the_share(top_p, kept):
    got = draws(z_of(PROBABILITIES), Sampling(temperature=1.0, top_p=top_p))
    assert set(np.flatnonzero(got)) == kept
    expected = np.where(np.isin(np.arange(6), list(kept)), PROBABILITIES, 0)
    np.testing.assert_allclose(got, expected / expected.sum(), atol=4 * np.sqrt(0.25 / 4000))


def test_greedy_takes_the_likeliest():
    assert set(np.flatnonzero(draws(z_of(PROBABILITIES), GREEDY, 10))) == {1}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "the prompt is empty"), ([1] * 13, "the prompt has 13 tokens, more than .* train.sequence_length=12")],
)
def test_a_prompt_that_the_model_cannot_read_is_refused(prompt, words):
    run = start(LLAMA, "data=1")
    with pytest.raises(Refused, match=words):
        generate(run, {}, prompt, 3, GREEDY)


@pytest.mark.parametrize("settings", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(Refused, match=next(iter(settings))):
        Sampling(**settings)
