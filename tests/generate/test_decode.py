import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import random_model
from tests.train_helpers import MODEL, fast_jit
from zaya_jax.config import ParallelConfig
from zaya_jax.errors import InputError
from zaya_jax.generate import decode
from zaya_jax.generate import placement as generate_placement
from zaya_jax.generate.decode import BLOCK, cache_capacity, continuations, generate_tokens
from zaya_jax.generate.sampling import Sampling, draw
from zaya_jax.hf.exporter import save_pretrained
from zaya_jax.model.tree import roles, shapes
from zaya_jax.model.zaya import logits, unrolled
from zaya_jax.ops.registry import KernelSelection
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.placement import make_placement

# Compilation takes most of the time: nearly all tests share the programs of three rows, two chunks and three blocks.
STEPS, CHUNK = 2 * BLOCK + 4, 4
PROMPTS = [[5, 17, 250], [9], [3, 3, 8, 120, 44, 7, 299]]
UNUSED = [0, 1]  # stop tokens that no row draws, since another number of them is another program
HOT = Sampling(1.5, top_k=40, top_p=0.95, repetition_penalty=1.3)
_compiled = {
    "_decode": fast_jit(decode._decode.__wrapped__, static_argnames=("size", "branches", "placement"),
                        donate_argnums=1),
    "_prefill": fast_jit(decode._prefill.__wrapped__, static_argnames="placement", donate_argnums=1),
}  # fmt: skip
_logits = fast_jit(logits)


@pytest.fixture(autouse=True)
def fast_decode(monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", CHUNK)
    for name, function in _compiled.items():
        monkeypatch.setattr(decode, name, function)


@functools.cache
def model():
    """A model on its device, as weights are that were read."""
    return jax.device_put(random_model(MODEL, seed=1), jax.devices()[0])


def generate(prompts, sampling=None, stop_tokens=UNUSED, **options):
    """The tokens of each row."""
    rows = generate_tokens(model(), prompts, STEPS, sampling, stop_tokens=stop_tokens, **options)
    return [row.tokens for row in rows]


@functools.cache
def greedy():
    """The most likely continuations, and how often the programs were compiled for them."""
    before = [function._cache_size() for function in _compiled.values()]
    rows = generate_tokens(model(), PROMPTS, STEPS, stop_tokens=UNUSED)
    compiled = [function._cache_size() for function in _compiled.values()]
    return rows, [count - earlier for count, earlier in zip(compiled, before, strict=True)]


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
        return draw(flat[0], flat[1], HOT, HOT.branches, flat[2])

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


def test_a_batch_ends_when_all_its_rows_have():
    blocks = list(continuations(model(), PROMPTS, STEPS, stop_tokens=UNUSED,
                                stopped=lambda row, tokens: len(tokens) > 2 * BLOCK * row))  # fmt: skip
    lengths = [[len(row.tokens) for row in rows] for rows in blocks]
    assert lengths == [[BLOCK] * 3, [BLOCK, 2 * BLOCK, 2 * BLOCK], [BLOCK, STEPS, STEPS]]
    assert [[row.stopped for row in rows] for rows in blocks] == [[True, False, False]] * 2 + [[True, True, False]]
    (first, *_), (second, *_), _ = continued()
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    (rows,) = continuations(model(), prompts, STEPS, stop_tokens=[first, second])
    assert [(row.tokens, row.logprobs, row.stopped) for row in rows] == [([], [], True)] * 3


@pytest.mark.parametrize(
    ("lengths", "new", "capacity", "chunk", "expected"),
    [
        ((1, 20, 33), 6, None, 512, ([58], 64)),  # one class; as many positions as the model has
        ((7,), 36, None, 4, ([4, 4], 48)),
        ((10,), 53, None, 4, ([4, 4, 3], 64)),
        ((7, 33), 10, 48, 512, ([38], 48)),
    ],
)
def test_prompts_of_one_length_class_have_arrays_of_one_shape(monkeypatch, lengths, new, capacity, chunk, expected):
    monkeypatch.setattr(decode, "CHUNK", chunk)
    placement = generate_placement.decode_placement(model(), generate_placement.FIRST_DEVICE)
    for length in lengths:
        widths = []

        def record(_model, cache, tokens, segments, *, placement, widths=widths):
            widths.append(tokens.shape[1])
            return cache, np.zeros((2, MODEL.vocab_size), np.float32)

        monkeypatch.setattr(decode, "_prefill", record)
        prompts = [[1] * length, [2]]
        state = decode._prefilled(unrolled(model()), prompts, new, capacity, Sampling().branches, placement)
        assert (widths, state.cache.layers[0].kv.k_btx.shape[1]) == expected


def test_a_capacity_is_enough_for_whole_chunks_and_no_more_than_the_positions():
    assert [cache_capacity(prompt, 20, MODEL) for prompt in (8, 9, 24, 25, 60)] == [32, 48, 48, 64, 64]


def test_each_call_uses_the_kernels_that_are_left_unless_a_placement_is_given(monkeypatch):
    target, used = current_target(), []
    selections = [KernelSelection(target), KernelSelection(target, reasons={("attention", "pallas"): "it fails."})]
    left = iter(selections)
    monkeypatch.setattr(generate_placement, "validate_kernels", lambda *_, **__: next(left))

    def record(*arguments):
        used.append(arguments[-1].kernels)
        raise NotImplementedError

    monkeypatch.setattr(decode, "_prefilled", record)
    placement = make_placement(ParallelConfig(), make_mesh(devices=jax.devices()[:1]), shapes(model()), roles(model()),
                               "float32", KernelSelection(target))  # fmt: skip
    for options in ({}, {}, {"placement": placement.replicated}):
        with pytest.raises(NotImplementedError):
            generate(PROMPTS, **options)
    # A kernel that was rejected between two calls is not used by the second, and with a placement nothing is tried.
    assert used == [*selections, placement.kernels]


def test_a_step_does_not_copy_the_cache():
    made, placement = unrolled(model()), generate_placement.decode_placement(model(), generate_placement.FIRST_DEVICE)
    branches = Sampling().branches
    state = decode._prefilled(made, PROMPTS, STEPS, None, branches, placement)
    keys = jax.vmap(jax.random.key)(np.zeros(len(PROMPTS), np.uint32))
    block = decode.Block(keys, jax.tree.map(np.float32, Sampling()), np.array(UNUSED, np.int32), np.int32(2))
    lowered = decode._decode.lower(made, state, block, size=BLOCK, branches=branches, placement=placement)
    text = lowered.compile().as_text()
    shape = ",".join(map(str, state.cache.layers[0].kv.k_btx.shape))
    assert f"f32[{shape}]" in text
    assert not re.findall(rf"= f32\[{shape}\]\S* (?:copy|transpose)\(.*", text)


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
        ([], 1, {}, "A prompt is empty"),
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
