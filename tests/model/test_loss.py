"""The chunked loss against logits that all exist at once."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close, blocks_of, jit, seeds
from zaya_jax.model import loss
from zaya_jax.model.loss import chunk_tokens, chunked_loss

T, D, V = 13, 6, 23


def dense(hidden, head, bias, targets, weights):
    z = hidden.astype(jnp.float32) @ head.astype(jnp.float32).T + (0 if bias is None else bias)
    return -(jnp.take_along_axis(jax.nn.log_softmax(z), targets[:, None], 1)[:, 0] * weights).sum()


def total(*arguments):
    """The sum alone."""
    return chunked_loss(*arguments)[0]


@functools.cache
def compiled(function, biased):
    if biased:
        return jit(jax.value_and_grad(function, argnums=(0, 1, 2)))
    return jit(
        jax.value_and_grad(lambda h, w, targets, weights: function(h, w, None, targets, weights), argnums=(0, 1))
    )


def draw(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    hidden, head = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((T, D), (V, D)))
    weights = rng.choice([0, 0, 0.5, 1, 2], T).astype(np.float32)
    return hidden, head, jnp.asarray(rng.normal(size=V), jnp.float32), rng.integers(0, V, T).astype(np.int32), weights


@given(seed=seeds())
def test_equals_the_dense_loss(seed):
    hidden, head, bias, targets, weights = draw(seed)
    for arguments in ((hidden, head, bias, targets, weights), (hidden, head, targets, weights)):
        biased = len(arguments) == 5
        ours = compiled(total, biased)(*arguments)
        assert_close(ours, compiled(dense, biased)(*arguments), 1e-5, least=1.0)
        assert not np.any(np.asarray(ours[1][0])[weights == 0]), "a token of weight zero has no gradient"


@pytest.mark.parametrize(("most", "expected"), [(2 * V * D, f"{D},{V}"), (2 * V * D - 1, f"{V},{D}")])
def test_a_small_head_is_transposed_once_and_a_large_one_is_not_copied(most, expected, monkeypatch):
    monkeypatch.setattr(loss, "TRANSPOSED_BYTES", most)
    hidden, head, bias, targets, weights = draw(0)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(total))(hidden.astype(jnp.bfloat16), head, bias, targets, weights)
    (body,) = [str(equation.params["jaxpr"]) for equation in _walk(jaxpr.jaxpr) if equation.primitive.name == "scan"]
    assert [layout for layout in (f"{V},{D}", f"{D},{V}") if f"bf16[{layout}]" in body] == [expected]


def _walk(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in equation.params.values():
            if hasattr(inner, "eqns"):
                yield from _walk(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize(
    ("vocab_size", "width", "frozen", "chunk"),
    [(262_272, 2048, False, 2048), (262_272, 2048, True, 512), (262_272, 4096, False, 2048), (4096, 256, False, 512),
     (1_000_000, 2048, False, 512)],
)  # fmt: skip
def test_chunks_are_as_long_as_the_width_unless_logits_are_too_large(vocab_size, width, frozen, chunk):
    assert chunk_tokens(16_384, vocab_size, width, frozen) == chunk
    assert chunk_tokens(100, vocab_size, width, frozen) == 100


def test_the_gradient_is_scaled_by_what_comes_after():
    hidden, head, bias, targets, weights = draw(2)
    gradient = compiled(total, True)(hidden, head, bias, targets, weights)[1]
    tripled = jit(jax.grad(lambda *a: 3 * total(*a, targets, weights), argnums=(0, 1, 2)))(hidden, head, bias)
    assert_close(tripled, jax.tree.map(lambda x: 3 * np.asarray(x), gradient), 1e-5)


def test_bfloat16_hidden_with_a_float32_head():
    hidden, head, bias, targets, weights = draw(3)
    low = hidden.astype(jnp.bfloat16)
    loss, gradient = compiled(total, True)(low, head, bias, targets, weights)
    chex.assert_type([loss, *gradient], [jnp.float32, jnp.bfloat16, jnp.float32, jnp.float32])
    expected, wide = compiled(dense, True)(hidden, head, bias, targets, weights)
    np.testing.assert_allclose(loss, expected, rtol=0.02)
    for ours, theirs in zip(gradient, wide, strict=True):
        assert np.linalg.norm(np.asarray(ours, np.float32) - theirs) < 0.03 * np.linalg.norm(theirs)


def test_one_chunk_in_bfloat16_computes_where_it_is_compiled_and_rounds_no_more_than_its_operands():
    """A product that is transposed at once is one that XLA's CPU code lacks in bf16."""
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=shape) / 8, jnp.bfloat16) for shape in ((512, 32), (300, 32)))
    targets, weights = rng.integers(0, 300, 512).astype(np.int32), np.ones(512, np.float32)
    arguments = (hidden, head.astype(jnp.float32), targets, weights)
    loss, gradients = compiled(total, False)(*arguments)
    expected, wide = compiled(dense, False)(arguments[0].astype(jnp.float32), *arguments[1:])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for ours, theirs in zip(gradients, wide, strict=True):
        assert np.linalg.norm(np.asarray(ours, np.float32) - theirs) < 2**-9 * np.linalg.norm(theirs)


def test_large_logits_stay_finite():
    hidden, head, bias, targets, weights = draw(4)
    loss, gradient = compiled(total, True)(1e4 * hidden, head, bias, targets, weights)
    chex.assert_tree_all_finite((loss, gradient))
    expected, theirs = compiled(dense, True)(1e4 * hidden, head, bias, targets, weights)
    assert_close((loss, gradient), (expected, theirs), 1e-5)


@functools.cache
def sampled(function):
    """The same, with exponentials relative to the largest of four logits, as in large vocabularies."""

    def patched(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss, "SAMPLED_VOCABULARY", 0)
            patch.setattr(loss, "SAMPLE", 4)
            return function(*arguments)

    return jit(patched)


@given(seed=seeds(), dtype=st.sampled_from(["float32", "bfloat16"]), above=st.sampled_from([0, 60, 86, 100, 1e4]))
def test_logits_far_above_those_of_a_sample(seed, dtype, above):
    hidden, head, bias, targets, weights = draw(seed, dtype)
    arguments = hidden, head, bias.at[V - 1].add(above), targets, weights
    ours = sampled(jax.value_and_grad(total, argnums=(0, 1, 2)))(*arguments)
    assert_close(ours, compiled(total, True)(*arguments), 1e-5 if dtype == "float32" else 0.02, least=1.0)
    alone, terms = sampled(chunked_loss)(*arguments)
    assert_close((alone, terms), jit(chunked_loss)(*arguments), 1e-5, least=1.0)


def test_a_frozen_head_changes_nothing_but_its_own_gradient():
    hidden, head, bias, targets, weights = draw(3)

    def value(hidden, head, bias, frozen):
        return total(hidden, head, bias, targets, weights, frozen)

    gradient = jit(jax.value_and_grad(value, argnums=(0, 1, 2)), static_argnums=3)
    whole, frozen = (gradient(hidden, head, bias, kind) for kind in (False, True))
    assert_close(whole[0], frozen[0], 1e-6)
    assert_close(whole[1][0], frozen[1][0], 1e-6)
    assert np.any(whole[1][1])
    assert not any(np.any(x) for x in frozen[1][1:])


def test_a_frozen_head_has_no_sum_of_its_size(monkeypatch):
    monkeypatch.setattr(loss, "TRANSPOSED_BYTES", 0)  # a copy of the head would have the shape of the sum
    hidden, head, bias, targets, weights = draw(3)

    def text(frozen):
        gradient = jax.grad(lambda h: total(h, head, bias, targets, weights, frozen))
        return str(jax.make_jaxpr(gradient)(hidden))

    assert f"f32[{D},{V}]" in text(False)
    assert f"f32[{D},{V}]" not in text(True)


# --- chunks of another size, last: what is compiled is forgotten for each ---------------------------------------


@pytest.mark.parametrize("size", [4, 64])
def test_any_size_of_chunk_gives_the_same(size):
    arguments = draw(1)
    hidden, head, bias, targets, weights = (np.asarray(x, np.float64) for x in arguments)
    z = hidden @ head.T + bias
    each = (np.log(np.exp(z).sum(-1)) - z[np.arange(T), targets.astype(int)]) * weights
    expected = compiled(dense, True)(*arguments)
    with blocks_of(size):
        (value, same), gradients = jit(jax.value_and_grad(chunked_loss, (0, 1, 2), has_aux=True))(*arguments)
        alone, terms = jit(chunked_loss)(*arguments)  # forward only, which evaluation uses
    assert_close((value, gradients), expected, 1e-5)
    np.testing.assert_allclose(alone, expected[0], rtol=1e-5)
    for actual in (terms, same):
        np.testing.assert_allclose(actual, each, rtol=1e-4, atol=1e-5)


def test_the_logits_of_all_tokens_never_exist():
    with blocks_of(4):
        jaxpr = str(jax.make_jaxpr(jax.value_and_grad(total, argnums=(0, 1, 2)))(*draw(0)))
    assert f"4,{V}]" in jaxpr
    for rows in (T, 16):
        assert f"[{rows},{V}]" not in jaxpr


def test_the_head_is_cast_once_for_all_chunks():
    hidden, head, bias, targets, weights = draw(0)

    def bodies(function):
        with blocks_of(4):
            jaxpr = jax.make_jaxpr(function)(hidden.astype(jnp.bfloat16), head, bias, targets, weights)
        return [str(equation.params["jaxpr"]) for equation in _walk(jaxpr.jaxpr) if equation.primitive.name == "scan"]

    for function in (total, jax.value_and_grad(total, argnums=(0, 1, 2))):
        (body,) = bodies(function)
        assert f"bf16[{V},{D}]" in body or f"bf16[{D},{V}]" in body
        assert f"f32[{V},{D}]" not in body


@given(seed=seeds(), factor=st.sampled_from([1.0, 3.0, 0.0]))
def test_the_gradient_of_the_head_continues_a_sum(seed, factor):
    """The sum is not scaled by what comes after the loss."""
    hidden, head, bias, targets, weights = draw(seed)
    earlier = jnp.asarray(np.random.default_rng(seed).normal(size=head.shape), jnp.float32)
    continued = _scaled_gradient(factor)(hidden, head, bias, targets, weights, earlier)
    alone = compiled(total, True)(hidden, head, bias, targets, weights)[1]
    expected = [factor * np.asarray(gradient) for gradient in alone]
    assert_close(continued, (expected[0], expected[1] + np.asarray(earlier), expected[2]), 1e-5, least=1.0)


@functools.cache
def _scaled_gradient(factor):
    def scaled(hidden, head, bias, targets, weights, earlier):
        return factor * total(hidden, head, bias, targets, weights, False, (earlier, head))

    return jit(jax.grad(scaled, argnums=(0, 1, 2)))


def test_a_continued_sum_is_not_scaled_where_the_loss_alone_is_differentiated():
    """Its gradient is a constant 1 then. A pass over the head would cost as much as the addition that it replaces."""
    hidden, head, bias, targets, weights = draw(0)

    def passes(factor):
        lowered = _scaled_gradient(factor).lower(hidden, head, bias, targets, weights, head)
        return re.findall(rf"f32\[(?:{V},{D}|{D},{V})\]\S* (?:select|multiply)\(", lowered.compile().as_text())

    assert passes(3.0)
    assert not passes(1.0)
