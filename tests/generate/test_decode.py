import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train_helpers import MODEL, fast_jit
from zaya_jax.config import ParallelConfig
from zaya_jax.errors import InputError
from zaya_jax.generate import decode
from zaya_jax.generate import placement as generate_placement
from zaya_jax.generate.decode import continuations, generate_tokens
from zaya_jax.generate.sampling import Sampling
from zaya_jax.hf.exporter import save_pretrained
from zaya_jax.model.tree import roles, shapes
from zaya_jax.model.zaya import Zaya, logits, unrolled
from zaya_jax.ops.registry import KernelSelection
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.placement import make_placement

STEPS = 6
PROMPTS = [[5, 17, 250], [9], [3, 3, 8, 120, 44, 7, 299]]
_compiled = {
    "_decode": fast_jit(decode._decode.__wrapped__, static_argnames=("size", "branches", "placement"),
                        donate_argnums=1),
    "_prefill": fast_jit(decode._prefill.__wrapped__, static_argnames="placement", donate_argnums=1),
}  # fmt: skip
_logits = fast_jit(logits)


@pytest.fixture(autouse=True)
def fast_decode(monkeypatch):
    for name, function in _compiled.items():
        monkeypatch.setattr(decode, name, function)


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


def generate(prompts, steps=STEPS, sampling=None, **options):
    """The tokens of each row."""
    return [row.tokens for row in generate_tokens(model(), prompts, steps, sampling, **options)]


@functools.cache
def continued():
    return generate(PROMPTS)


def test_greedy_decoding_takes_what_a_whole_forward_pass_finds_likeliest():
    seen = set()
    for prompt, new in zip(PROMPTS, generate_tokens(model(), PROMPTS, STEPS), strict=True):
        assert len(new.tokens) == len(new.logprobs) == STEPS
        assert not new.stopped
        row = list(prompt)
        for token, logprob in zip(new.tokens, new.logprobs, strict=True):
            scores = scores_after(row)
            assert scores[token] >= scores.max() - 1e-4
            assert logprob == pytest.approx(float(jax.nn.log_softmax(scores)[token]), abs=1e-4)
            row.append(token)
            seen.add(token)
    assert len(seen) > 4  # not one token over and over


@pytest.mark.parametrize("row", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_prompt_goes_on_in_a_batch_as_it_does_alone(row):
    assert generate([PROMPTS[row]]) == [continued()[row]]
    hot = Sampling(temperature=2.0)
    together = generate(PROMPTS, sampling=hot, seeds=[7, 8, 9])
    assert generate([PROMPTS[row]], sampling=hot, seeds=[7 + row]) == [together[row]]


@pytest.mark.parametrize("chunk", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_prefill_in_chunks_is_prefill_at_once(monkeypatch, chunk):
    expected = continued()
    monkeypatch.setattr(decode, "CHUNK", chunk)
    assert generate(PROMPTS) == expected


@pytest.mark.parametrize("block", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_blocks_of_steps_change_nothing(block):
    hot, seen = Sampling(temperature=1.5, top_p=0.9, repetition_penalty=1.3), []
    for rows in continuations(model(), PROMPTS, STEPS, hot, block=block):
        seen.append([len(row.tokens) for row in rows])
        last = [row.tokens for row in rows]
    assert last == generate(PROMPTS, sampling=hot)
    assert seen == [[min(end, STEPS)] * 3 for end in range(block, STEPS + block, block)]


def test_a_row_ends_before_the_stop_token_and_the_others_go_on():
    stop = continued()[2][3]
    expected = [row[: row.index(stop)] if stop in row else row for row in continued()]
    rows = generate_tokens(model(), PROMPTS, STEPS, stop_tokens=[stop])
    assert [row.tokens for row in rows] == expected
    assert [row.stopped for row in rows] == [len(row) < STEPS for row in expected]
    assert len(expected[2]) < STEPS
    first = continued()[0][0]
    assert generate(PROMPTS, stop_tokens=[first, stop])[0] == []


def test_a_batch_ends_when_all_its_rows_have():
    blocks = list(continuations(model(), PROMPTS, STEPS, block=2, stopped=lambda row, tokens: len(tokens) > 2 * row))
    assert [[len(row.tokens) for row in rows] for rows in blocks] == [[2, 2, 2], [2, 4, 4], [2, 4, 6]]
    everything = [row[0] for row in continued()]
    assert len(list(continuations(model(), PROMPTS, STEPS, block=2, stop_tokens=everything))) == 1


def test_sampling_is_a_function_of_the_seed():
    def sample(seed, temperature=1.0):
        return generate(PROMPTS, sampling=Sampling(temperature), seeds=[seed, seed + 1, seed + 2])

    assert sample(0) == sample(0) == generate(PROMPTS, sampling=Sampling(1.0))
    assert sample(0) != sample(1)
    assert sample(0) != sample(0, temperature=3.0)
    assert sample(5, temperature=1e-4) == continued()  # so cold that only the likeliest is left
    assert generate(PROMPTS, sampling=Sampling(5.0, top_k=1)) == continued()


def test_prompts_of_one_length_class_share_a_compilation():
    generate([[1] * 5])
    before = _compiled["_prefill"]._cache_size(), _compiled["_decode"]._cache_size()
    for length in (1, 20, 33):
        generate([[1] * length], sampling=Sampling(0.0), stop_tokens=[7])
    assert (_compiled["_prefill"]._cache_size(), _compiled["_decode"]._cache_size()) == before


def test_a_model_on_its_device_needs_one_compilation_for_all_chunks_and_blocks(monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", 4)
    committed = jax.device_put(model(), jax.devices()[0])  # as weights are that were read
    before = _compiled["_prefill"]._cache_size(), _compiled["_decode"]._cache_size()
    generate_tokens(committed, [[1] * 9], 3)
    list(continuations(committed, [[1] * 9], 3, block=1))
    after = _compiled["_prefill"]._cache_size(), _compiled["_decode"]._cache_size()
    assert after == (before[0] + 1, before[1] + 2)  # one for each size of blocks


def test_each_call_uses_the_kernels_that_are_left_unless_a_placement_is_given(monkeypatch):
    target, used, compute = current_target(), [], decode._decode
    selections = [KernelSelection(target), KernelSelection(target, reasons={("attention", "pallas"): "it fails."})]
    left = iter(selections)
    monkeypatch.setattr(generate_placement, "validate_kernels", lambda *_, **__: next(left))

    def record(*arguments, placement, **options):
        used.append(placement.kernels)
        return compute(*arguments, placement=placement, **options)

    monkeypatch.setattr(decode, "_decode", record)
    expected = [generate(PROMPTS) for _ in selections]
    assert used == selections  # a kernel that was rejected between two calls is not used by the second
    placement = make_placement(ParallelConfig(), make_mesh(devices=jax.devices()[:1]), shapes(model()), roles(model()),
                               "float32", KernelSelection(target))  # fmt: skip
    assert generate(PROMPTS, placement=placement.replicated) == expected[0] == expected[1]
    assert used[2:] == [placement.kernels]  # and nothing is tried


def test_a_step_does_not_copy_the_cache():
    made, placement = unrolled(model()), generate_placement.decode_placement(model(), generate_placement.FIRST_DEVICE)
    branches = Sampling().branches
    state = decode._prefilled(made, [[1] * 9], 40, None, branches, placement)
    keys = jax.vmap(jax.random.key)(jnp.zeros(1, jnp.uint32))
    text = decode._decode.lower(
        made, state, keys, jax.tree.map(np.float32, Sampling()), np.array([7], np.int32), np.int32(2), size=2,
        branches=branches, placement=placement,
    ).compile().as_text()  # fmt: skip
    shape = ",".join(map(str, state.cache.layers[0].kv.k_btx.shape))
    assert f"f32[{shape}]" in text
    assert not re.findall(rf"= f32\[{shape}\]\S* (?:copy|transpose)\(.*", text)


def test_an_unrolled_model_generates_the_same_and_is_not_exported(tmp_path):
    made = unrolled(model())
    assert [row.tokens for row in generate_tokens(made, PROMPTS, STEPS)] == continued()
    assert unrolled(made) is made
    with pytest.raises(InputError, match="This model was unrolled to generate"):
        save_pretrained(made, tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_prompts_can_be_arrays():
    prompts = np.array([[5, 17, 250]])
    assert generate(jnp.array(prompts)) == generate(prompts) == [continued()[0]]


def test_a_prompt_may_fill_the_positions_of_the_model():
    longest = MODEL.max_positions - STEPS
    (row,) = generate([[5] * longest])
    assert len(row) == STEPS


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
        generate(prompts, steps, **options)
