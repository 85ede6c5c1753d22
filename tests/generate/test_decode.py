"""Continuations of lists of prompts, against forward passes over whole sequences."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.generate.engine_helpers import compilations, fast_engine, model  # noqa: F401
from tests.train_helpers import MODEL, fast_jit
from zaya_jax.errors import InputError
from zaya_jax.generate.decode import continuations, generate_tokens
from zaya_jax.generate.engine import Engine
from zaya_jax.generate.sampling import Sampling, draw
from zaya_jax.generate.steps import BLOCK
from zaya_jax.hf.exporter import save_pretrained
from zaya_jax.model.zaya import logits, unrolled

# Compilation takes most of the time: nearly all tests share the programs of three rows.
STEPS = 2 * BLOCK + 4
PROMPTS = [[5, 17, 250], [9], [3, 3, 8, 120, 44, 7, 299]]
UNUSED = [0, 1]  # stop tokens that no row draws, since another number of them is another program
HOT = Sampling(1.5, top_k=40, top_p=0.95, repetition_penalty=1.3)
_logits = fast_jit(logits)
pytestmark = pytest.mark.usefixtures("fast_engine")


def generate(prompts, sampling=None, stop_tokens=UNUSED, **options):
    """The tokens of each row."""
    rows = generate_tokens(model(), prompts, STEPS, sampling, stop_tokens=stop_tokens, **options)
    return [row.tokens for row in rows]


@functools.cache
def greedy():
    """The most likely continuations, and how often the programs were compiled for them."""
    engine = Engine(model(), slots=1, length=1, stop_tokens=UNUSED)
    (*_, rows) = continuations(engine, PROMPTS, STEPS)
    return rows, compilations(engine)


def continued():
    return [row.tokens for row in greedy()[0]]


def whole(continuations):
    """fp32 [rows, STEPS, v] logits of each new token, by a forward pass over everything before it."""
    rows = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, continuations, strict=True)]
    tokens, segments = np.zeros((2, len(rows), MODEL.max_positions), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)], segments[index, : len(row)] = row, 1
    scores = np.array(_logits(model(), tokens, segments))
    return np.stack([x[len(row) - STEPS - 1 : len(row) - 1] for x, row in zip(scores, rows, strict=True)])


def test_greedy_decoding_takes_what_a_whole_forward_pass_finds_likeliest():
    scores = whole(continued())
    for row, new in zip(scores, greedy()[0], strict=True):
        assert len(new.tokens) == len(new.logprobs) == STEPS
        assert not new.stopped
        chosen = row[np.arange(STEPS), new.tokens]
        assert (chosen >= row.max(-1) - 1e-4).all()
        np.testing.assert_allclose(new.logprobs, chosen - np.logaddexp.reduce(row, -1), rtol=0, atol=1e-4)
    assert len({token for row in continued() for token in row}) > 4  # not one token over and over


def test_a_model_on_its_device_needs_one_compilation_for_all_chunks_and_blocks():
    assert greedy()[1] == [1, 1]


def test_sampled_tokens_are_those_drawn_from_a_whole_forward_pass():
    seeds = [7, -8, 9]
    rows = generate_tokens(model(), PROMPTS, STEPS, HOT, seeds=seeds)
    scores = whole([row.tokens for row in rows])
    occurred = np.zeros(scores.shape, bool)
    for seen, prompt, row in zip(occurred, PROMPTS, rows, strict=True):
        seen[:, prompt] = True
        for step, token in enumerate(row.tokens):
            seen[step + 1 :, token] = True

    @fast_jit
    def expected(scores, occurred, seeds):
        keys = jax.vmap(lambda seed: jax.vmap(lambda step: jax.random.fold_in(jax.random.key(seed), step))(
            jnp.arange(STEPS)))(seeds)  # fmt: skip
        flat = [x.reshape(-1, *x.shape[2:]) for x in (scores, keys, occurred)]
        hot = Sampling(*(jnp.full(len(flat[0]), value) for value in HOT))
        return draw(flat[0], flat[1], hot, flat[2])

    tokens, logprobs = expected(scores, occurred, np.array([seed % 2**32 for seed in seeds], np.uint32))
    assert [token for row in rows for token in row.tokens] == tokens.tolist()
    np.testing.assert_allclose([x for row in rows for x in row.logprobs], logprobs, rtol=0, atol=1e-4)
    # A row depends on its own prompt and seed, not on how many tokens its neighbours have.
    _, row, _ = generate([[4, 8], PROMPTS[0], [2]], HOT, (), seeds=[1, 7, 3])
    assert row == rows[0].tokens


def test_sampling_is_a_function_of_the_seed():
    def sample(sampling=HOT, **options):
        return generate(PROMPTS, sampling, (), **options)

    assert sample(seeds=[0, 1, 2]) == sample() != sample(seeds=[1, 2, 3])
    assert sample() != sample(HOT._replace(temperature=3.0))
    likeliest = HOT._replace(top_k=1, repetition_penalty=1 + 1e-9)  # which is 1 in fp32
    assert sample(likeliest) == continued()
    assert sample(likeliest._replace(temperature=1e-4, top_k=0)) == continued()  # so cold that nothing else is left


def test_a_row_ends_before_a_stop_token_and_the_others_go_on():
    first, second, third = continued()
    stop = next(token for token in third if token not in (*second, third[0]))
    expected = [row[: row.index(stop)] if stop in row else row for row in (first, second, third)]
    rows = generate_tokens(model(), PROMPTS, STEPS, stop_tokens=[stop, UNUSED[0]])
    assert [row.tokens for row in rows] == expected
    assert [len(row.logprobs) for row in rows] == list(map(len, expected))
    assert [row.stopped for row in rows] == [stop in first, False, True]


def test_a_row_ends_when_its_caller_says_so():
    engine = Engine(model(), slots=3, length=7 + STEPS, stop_tokens=UNUSED)
    prompts = [*PROMPTS[:2], PROMPTS[0]]
    blocks = list(continuations(engine, prompts, STEPS, stopped=lambda row, tokens: len(tokens) > 2 * BLOCK * row))
    lengths = [[len(row.tokens) for row in rows] for rows in blocks]
    assert lengths == [[BLOCK + 1] * 3, [BLOCK + 1, 2 * BLOCK + 1, 2 * BLOCK + 1], [BLOCK + 1, 2 * BLOCK + 1, STEPS]]
    stopped = [[row.stopped for row in rows] for rows in blocks]
    assert stopped == [[True, False, False], [True, True, False], [True, True, False]]
    (first, *_), (second, *_), _ = continued()
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    rows = generate_tokens(model(), prompts, STEPS, stop_tokens=[first, second])
    assert [(row.tokens, row.logprobs, row.stopped) for row in rows] == [([], [], True)] * 3


def test_rows_that_a_caller_leaves_are_cancelled():
    engine = Engine(model(), slots=3, length=7 + STEPS, stop_tokens=UNUSED)
    blocks = continuations(engine, PROMPTS, STEPS, block=3)
    first = next(blocks)
    blocks.close()
    first_tokens, second_tokens, _ = continued()
    assert [row.tokens for row in first] == [first_tokens[:4], second_tokens[:4], []]  # a prompt of two chunks
    assert not engine.busy
    assert [row.tokens for row in list(continuations(engine, PROMPTS, STEPS))[-1]] == continued()


def test_an_unrolled_model_generates_the_same_and_is_not_exported(tmp_path):
    expected, made = continued(), unrolled(model())
    rows = generate_tokens(made, PROMPTS, STEPS, stop_tokens=UNUSED)
    assert [row.tokens for row in rows] == expected
    assert unrolled(made) is made
    with pytest.raises(InputError, match="This model was unrolled to generate"):
        save_pretrained(made, tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_prompts_can_be_arrays():
    prompts = [PROMPTS[0], [9, 8, 7], PROMPTS[0]]
    rows = generate(prompts)
    assert rows[0] == rows[2] == continued()[0]
    assert generate(jnp.array(prompts)) == generate(np.array(prompts)) == rows


@pytest.mark.parametrize(
    ("prompts", "steps", "options", "match"),
    [
        ([], 1, {}, "The list of prompts is empty"),
        ([[1], []], 1, {}, "A prompt is empty"),
        ([[1], [2, 300]], 1, {}, "A prompt contains token 300, but tokens must be from 0 to 299"),
        ([[-1]], 1, {}, "contains token -1"),
        ([[1]], 1, {"stop_tokens": [400]}, "stop_tokens contains token 400"),
        ([[1]], 1, {"seeds": [1, 2]}, "There are 2 seeds, but must be one for each of 1 prompts"),
        ([[1] * 60], 5, {}, r"60 tokens.* max_new_tokens=5 exceed model\.max_positions=64"),
        ([[1]], 0, {}, "max_new_tokens is 0, but must be at least 1"),
        ([[1]], 1, {"sampling": Sampling(-1.0)}, "temperature is -1"),
        ([[1]], 1, {"sampling": Sampling(math.nan)}, "temperature is .nan"),
        ([[1]], 1, {"sampling": Sampling(1.0, top_k=-1)}, "top_k is -1"),
        ([[1]], 1, {"sampling": Sampling(1.0, top_p=0.0)}, "top_p is 0"),
        ([[1]], 1, {"sampling": Sampling(1.0, min_p=1.5)}, "min_p is 1.5"),
        ([[1]], 1, {"sampling": Sampling(1.0, repetition_penalty=0.0)}, "repetition_penalty is 0"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(prompts, steps, options, match):
    with pytest.raises(InputError, match=rf"{match}.*\.$"):
        generate_tokens(model(), prompts, steps, **options)
