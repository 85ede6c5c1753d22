"""Samplers against the distributions that they are defined by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from zaya_jax.generate.sampling import Sampling, draw, keep_likely

VOCAB, DRAWS = 24, 20_000
LOGITS = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
OCCURRED = np.random.default_rng(1).random(VOCAB) < 0.3
_draw = jax.jit(draw)
_keep = jax.jit(keep_likely, static_argnums=2)


def expected(logits, sampling, occurred):
    """The distribution, in float64 and one setting after another."""
    scores = logits.astype(np.float64)
    penalty = sampling.repetition_penalty
    scores = np.where(occurred, np.where(scores > 0, scores / penalty, scores * penalty), scores) / sampling.temperature
    order = np.argsort(-scores)
    kept = list(order[: sampling.top_k] if sampling.top_k else order)
    weights = np.exp(scores[kept] - scores.max())
    reached = np.cumsum(weights) / weights.sum()
    kept = kept[: 1 + int((reached < sampling.top_p).sum())] if sampling.top_p < 1 else kept
    kept = [token for token in kept if scores[token] >= scores.max() + np.log(max(sampling.min_p, 1e-300))]
    probabilities = np.zeros(VOCAB)
    probabilities[kept] = np.exp(scores[kept])
    return probabilities / probabilities.sum()


def of_rows(samplings):
    return Sampling(*np.array(samplings, np.float32).T)


def rows(values, count):
    return jnp.broadcast_to(jnp.asarray(values), (count, VOCAB))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.5), Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.8), Sampling(1.5, min_p=0.1),
        Sampling(1.0, repetition_penalty=1.8),
        Sampling(1.3, top_k=12, top_p=0.9, min_p=0.05, repetition_penalty=0.7),
    ],
)  # fmt: skip
def test_draws_follow_the_distribution(sampling):
    keys = jax.random.split(jax.random.key(3), DRAWS)
    tokens, logprobs = _draw(rows(LOGITS, DRAWS), keys, of_rows([sampling] * DRAWS), rows(OCCURRED, DRAWS))
    means = expected(LOGITS, sampling, OCCURRED) * DRAWS
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[means == 0].sum() == 0
    rare = means < 5  # together one class of the test
    observed, reference = (np.append(x[~rare], x[rare].sum()) for x in (counts, means))
    assert chisquare(observed[reference > 0], reference[reference > 0]).pvalue > 1e-3
    under_model = np.asarray(jax.nn.log_softmax(LOGITS))
    np.testing.assert_allclose(logprobs, under_model[np.asarray(tokens)], rtol=1e-5)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 100), temperature=st.sampled_from([0.3, 1.0, 3.0]), top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]), min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)  # fmt: skip
def test_the_tokens_that_are_kept_are_those_of_the_definition(seed, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    kept = _keep(jnp.asarray(logits / temperature)[None], jax.tree.map(np.float32, sampling), top_k > 0 or top_p < 1)
    np.testing.assert_array_equal(np.isfinite(kept)[0], expected(logits, sampling, np.zeros(VOCAB, bool)) > 0)


def test_greedy_takes_the_likeliest_after_the_penalty():
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 7]] = 2.0, 1.9
    keys = jax.random.split(jax.random.key(0), 1)
    for penalty, token in ((1.0, 3), (1.2, 7), (0.9, 3)):
        sampling = Sampling(repetition_penalty=penalty)
        (result,), _ = _draw(rows(logits, 1), keys, of_rows([sampling]), rows(np.arange(VOCAB) == 3, 1))
        assert result == token


SETTINGS = st.builds(Sampling, st.sampled_from([0.0, 0.7, 2.0]), st.sampled_from([0, 3]), st.sampled_from([0.6, 1.0]),
                     st.sampled_from([0.0, 0.2]), st.sampled_from([1.0, 1.5]))  # fmt: skip


@settings(max_examples=20)
@given(samplings=st.lists(SETTINGS, min_size=3, max_size=3), seed=st.integers(0, 99))
def test_a_row_is_drawn_as_if_the_others_had_its_settings(samplings, seed):
    rng = np.random.default_rng(seed)
    logits, occurred = rng.normal(0, 2, (3, VOCAB)).astype(np.float32), rng.random((3, VOCAB)) < 0.3
    keys = jax.random.split(jax.random.key(seed), 3)
    together = _draw(logits, keys, of_rows(samplings), occurred)
    for row, sampling in enumerate(samplings):
        alike = _draw(logits, keys, of_rows([sampling] * 3), occurred)
        np.testing.assert_array_equal([x[row] for x in together], [x[row] for x in alike])


@given(scores=st.lists(st.lists(st.sampled_from([-2.5, 0.0, 1.5, float("-inf")]), min_size=7, max_size=7), min_size=1))
def test_the_likeliest_token_is_the_first_of_the_highest_logits(scores):
    scores = np.array(scores, np.float32)
    greedy = Sampling(*(jnp.full(len(scores), value) for value in Sampling()))
    tokens, _ = draw(jnp.array(scores), jax.random.split(jax.random.key(0), len(scores)), greedy, scores > 9)
    assert tokens.tolist() == scores.argmax(-1).tolist()
