import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train_helpers import MODEL, fast_jit
from zaya_jax.config import ParallelConfig
from zaya_jax.errors import InputError
from zaya_jax.generate import decode
from zaya_jax.generate.decode import generate_text
from zaya_jax.model.tree import roles, shapes
from zaya_jax.model.zaya import Zaya, logits
from zaya_jax.ops.registry import KernelSelection
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.placement import make_placement

STEPS = 6
PROMPTS = [[5, 17, 250], [9], [3, 3, 8, 120, 44, 7, 299]]
KEY = jax.random.key(0)
_compiled = fast_jit(decode._decode.__wrapped__, static_argnames=("steps", "greedy", "placement"))
_logits = fast_jit(logits)


@pytest.fixture(autouse=True)
def fast_decode(monkeypatch):
    monkeypatch.setattr(decode, "_decode", _compiled)


@functools.cache
def model():
    """A model whose tokens depend on the whole context: embeddings of size one make the head decided."""
    made = fast_jit(functools.partial(Zaya, MODEL))(jax.random.key(3))
    spread = [x if x.ndim < 2 else x + 0.2 * jax.random.normal(jax.random.key(i), x.shape)
              for i, x in enumerate(jax.tree.leaves(made))]  # fmt: skip
    made = jax.tree.unflatten(jax.tree.structure(made), spread)
    router = made.blocks[0].mixture.router
    router.balancing_bias[...] = jnp.zeros_like(router.balancing_bias[...]).at[:, -1].set(-1.0)
    return made


def scores_after(row):
    """fp32 [v] logits of the token after `row`, by a forward pass over it all."""
    tokens = np.zeros((1, 16), np.int32)
    tokens[0, : len(row)] = row
    segments = (np.arange(16) < len(row)).astype(np.int32)[None]
    return np.array(_logits(model(), tokens, segments))[0, len(row) - 1]


@functools.cache
def continued():
    return generate_text(model(), PROMPTS, STEPS)


def test_greedy_decoding_takes_what_a_whole_forward_pass_finds_likeliest():
    seen = set()
    for prompt, new in zip(PROMPTS, continued(), strict=True):
        assert len(new) == STEPS
        row = list(prompt)
        for token in new:
            scores = scores_after(row)
            assert scores[token] >= scores.max() - 1e-4
            row.append(token)
            seen.add(token)
    assert len(seen) > 4  # not one token over and over


@pytest.mark.parametrize("row", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_prompt_goes_on_in_a_batch_as_it_does_alone(row):
    assert generate_text(model(), [PROMPTS[row]], STEPS) == [continued()[row]]


def test_a_row_ends_before_the_stop_token_and_the_others_go_on():
    stop = continued()[2][3]
    expected = [row[: row.index(stop)] if stop in row else row for row in continued()]
    assert generate_text(model(), PROMPTS, STEPS, stop_token=stop) == expected
    assert len(expected[2]) < STEPS
    first = continued()[0][0]
    assert generate_text(model(), PROMPTS, STEPS, stop_token=first)[0] == []


def test_sampling_is_a_function_of_the_key():
    def sample(seed, temperature=1.0):
        return generate_text(model(), PROMPTS, STEPS, temperature=temperature, key=jax.random.key(seed))

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)
    assert sample(0) != sample(0, temperature=3.0)
    assert sample(5, temperature=1e-4) == continued()  # so cold that only the likeliest is left


def test_samples_follow_the_softmax():
    prompt, temperature = PROMPTS[0], 0.3
    rows = generate_text(model(), [prompt] * 2000, 1, temperature=temperature, key=jax.random.key(0))
    drawn = np.bincount(np.array(rows)[:, 0], minlength=MODEL.vocab_size) / 2000
    expected = np.array(jax.nn.softmax(scores_after(prompt) / temperature))
    assert np.abs(drawn - expected).sum() / 2 < 0.2  # total variation; 2000 draws of 300 classes give about 0.13
    likely = expected > 0.02
    assert likely.any()
    np.testing.assert_allclose(drawn[likely], expected[likely], atol=5 * (0.25 / 2000) ** 0.5)


def test_each_call_uses_the_kernels_that_are_left_unless_a_placement_is_given(monkeypatch):
    target, used, compute = current_target(), [], decode._decode
    selections = [KernelSelection(target), KernelSelection(target, reasons={("attention", "pallas"): "it fails."})]
    left = iter(selections)
    monkeypatch.setattr(decode, "validate_kernels", lambda *_, **__: next(left))

    def record(*arguments, placement, **options):
        used.append(placement.kernels)
        return compute(*arguments, placement=placement, **options)

    monkeypatch.setattr(decode, "_decode", record)
    expected = [generate_text(model(), PROMPTS, STEPS) for _ in selections]
    assert used == selections  # a kernel that was rejected between two calls is not used by the second
    placement = make_placement(ParallelConfig(), make_mesh(devices=jax.devices()[:1]), shapes(model()), roles(model()),
                               "float32", KernelSelection(target))  # fmt: skip
    assert generate_text(model(), PROMPTS, STEPS, placement=placement.replicated) == expected[0] == expected[1]
    assert used[2:] == [placement.kernels]  # and nothing is tried


def test_prompts_can_be_arrays():
    prompts = np.array([[5, 17, 250]])
    assert (
        generate_text(model(), jnp.array(prompts), STEPS) == generate_text(model(), prompts, STEPS) == [continued()[0]]
    )


@pytest.mark.parametrize(
    ("prompts", "steps", "options", "match"),
    [
        ([], 1, {}, "A prompt is empty"),
        ([[1], []], 1, {}, "A prompt is empty"),
        ([[1], [2, 300]], 1, {}, "contains token 300, but tokens must be from 0 to 299"),
        ([[-1]], 1, {}, "contains token -1"),
        ([[1] * 60], 5, {}, r"60 tokens.* max_new_tokens=5 exceed model\.max_positions=64"),
        ([[1]], 0, {}, "max_new_tokens is 0, but must be at least 1"),
        ([[1]], 1, {"temperature": 0.5}, "needs a random key"),
        pytest.param([[1]], 1, {"temperature": -1.0}, "temperature is -1"),
        pytest.param([[1]], 1, {"temperature": math.nan, "key": KEY}, "temperature is nan"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(prompts, steps, options, match):
    with pytest.raises(InputError, match=rf"{match}.*\.$"):
        generate_text(model(), prompts, steps, **options)


def test_prompt_and_new_tokens_may_fill_every_position():
    assert len(generate_text(model(), [[1] * 63], 1)[0]) == 1
