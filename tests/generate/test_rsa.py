"""Markovian RSA: its calls, prompts and carried tails, traced through rounds of recorded candidates."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_helpers import small_tokenizer
from zaya_jax.errors import InputError
from zaya_jax.generate.rsa import MarkovianRSA, aggregate_recursively

QUESTION = "What is read?"


@settings(max_examples=20)
@given(
    data=st.data(), count=st.integers(1, 5), rounds=st.integers(0, 3), tail=st.integers(1, 6), seed=st.integers(0, 9)
)
def test_rounds_are_those_of_the_definition(data, count, rounds, tail, seed):
    aggregated = data.draw(st.integers(1, count))
    tokenizer, calls = small_tokenizer(), []

    def write(prompts, seeds):
        rng = np.random.default_rng(len(calls))
        texts = ["".join(f"<{len(calls)}.{row}.{i}>" for i in range(rng.integers(1, 9))) for row in range(len(prompts))]
        calls.append((list(prompts), list(seeds), [tokenizer.encode(text) for text in texts]))
        return calls[-1][2]

    last = aggregate_recursively(write, tokenizer, QUESTION, MarkovianRSA(count, aggregated, rounds, tail), seed)
    assert len(calls) == rounds + 1
    assert last == calls[-1][2]
    assert calls[0][0] == [QUESTION] * count
    assert [seed for _, seeds, _ in calls for seed in seeds] == list(range(seed, seed + count * (rounds + 1)))
    for (_, _, candidates), (prompts, _, _) in itertools.pairwise(calls):
        tails = {tokenizer.decode(tokens[-tail:]) for tokens in candidates}
        for prompt in prompts:
            assert prompt.startswith(QUESTION)
            attempts = re.split(r"\n*Attempt \d+:\n", prompt)[1:]
            assert len(attempts) == aggregated
            assert set(attempts) <= tails
            assert all(len(tokenizer.encode(attempt)) <= 3 * tail for attempt in attempts)


@pytest.mark.parametrize("change", [{"candidates": 0}, {"aggregated": 17}, {"rounds": -1}, {"tail": 0}])
def test_settings_out_of_range_are_refused(change):
    (name,) = change
    with pytest.raises(InputError, match=name):
        aggregate_recursively(lambda *_: [], small_tokenizer(), QUESTION, MarkovianRSA()._replace(**change))
