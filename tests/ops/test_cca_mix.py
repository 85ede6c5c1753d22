"""The mix against docs/reference.md §1.3 written out token by token, in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close, jit, packed_rows, seeds
from zaya_jax.ops.cca_mix import ALL_PARTS, Halo, MixInputs, MixParts, MixWeights, cca_mix, rotate

B, S, C = 2, 13, 4
# (k0, k1, query heads, key heads)
SHAPES = {"released": (2, 2, 4, 2), "long": (4, 3, 3, 1), "one": (1, 1, 2, 2)}
ALL_SHAPES = SHAPES | {"none": (0, 0, 4, 2)}  # no convolutions


def one_document(u, current, delayed, cos, sin, weights, start, parts=ALL_PARTS):
    """float64 q, k, v of a document that stands alone, by the two convolutions of docs/reference.md §1.3."""
    depthwise, beta, grouped, gamma, temperature = (np.asarray(w, np.float64) for w in weights)
    k0, k1, num_kv = len(depthwise), len(grouped), len(temperature)
    s, n, c = u.shape
    h = n - num_kv

    def depthwise_at(t):  # before the start u is 0, so that the bias alone remains
        return beta + sum(depthwise[w] * u[t - (k0 - 1 - w)] for w in range(k0) if t - (k0 - 1 - w) >= 0)

    z = np.stack([
        gamma + sum(np.einsum("nx,nxc->nc", depthwise_at(t - (k1 - 1 - w)), grouped[w]) for w in range(k1))
        for t in range(s)
    ]) if k1 else u  # fmt: skip
    q_mean = 0.5 * (u[:, :h] + np.repeat(u[:, h:], h // num_kv, 1)) * parts.query_key_mean
    k_mean = q_mean.reshape(s, num_kv, h // num_kv, c).mean(2)

    def unit(x):
        return x * np.sqrt(c) / np.linalg.norm(x, axis=-1, keepdims=True)

    def turn(x):
        r = 2 * cos.shape[-1]
        rotated = np.concatenate([-x[..., r // 2 : r], x[..., : r // 2]], -1)  # rotate_half
        cos2, sin2 = (np.concatenate([a, a], -1)[:, None] for a in (cos, sin))
        return np.concatenate([x[..., :r] * cos2 + rotated * sin2, x[..., r:]], -1)

    q = turn(unit(z[:, :h] + q_mean))
    k = turn(unit(z[:, h:] + k_mean) * temperature[:, None])
    v = np.concatenate([current, np.concatenate([[start], delayed[:-1]]) if parts.value_shift else delayed], -1)
    return q, k, v.reshape(s, num_kv, c)


def draw(seed, name):
    k0, k1, h, kv = ALL_SHAPES[name]
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(0, 1, shape).astype(np.float32)

    n = h + kv
    weights = MixWeights(normal(k0, n, C), normal(n, C), normal(k1, n, C, C), normal(n, C), normal(kv))
    x = kv * C // 2
    angle = rng.uniform(0, 6, (B, S, 1)).astype(np.float32)
    return normal(B, S, n, C), normal(B, S, x), normal(B, S, x), (np.cos(angle), np.sin(angle)), weights, normal(x)


def pack(u, current, delayed):
    return jnp.concatenate([u.reshape(*current.shape[:2], -1), current, delayed], -1)


def on_host(function):
    """Compiled, with NumPy arrays for results: of a JAX array each slice of another size is compiled."""
    compiled = jit(function)
    return lambda *arguments: jax.device_get(compiled(*arguments))


def mixed(halo, u, current, delayed, segments, rotary, weights, start, parts=ALL_PARTS):
    return cca_mix(MixInputs(pack(u, current, delayed), halo, segments, rotary, weights, start), parts)


whole = on_host(functools.partial(mixed, None))
reduced = {parts: on_host(functools.partial(mixed, None, parts=parts)) for parts in map(MixParts, (0, 1), (1, 0))}


@pytest.mark.parametrize(("name", "parts"), [*((name, ALL_PARTS) for name in SHAPES), ("released", MixParts(0, 1)),
                                             ("long", MixParts(1, 0)), ("none", MixParts(0, 1))])  # fmt: skip
@given(data=st.data(), seed=seeds())
def test_equals_each_document_alone(name, parts, data, seed):
    u, current, delayed, rotary, weights, start = draw(seed, name)
    segments = data.draw(packed_rows(B, S))
    program = reduced.get(parts, whole)
    q, k, v = program(u, current, delayed, segments, rotary, weights, start if seed % 2 else np.zeros_like(start))
    for row in range(B):
        for number in np.unique(segments[row][segments[row] > 0]):
            at = np.flatnonzero(segments[row] == number)
            arrays = [np.asarray(x[row, at], np.float64) for x in (u, current, delayed, *rotary)]
            expected = one_document(*arrays, weights, start if seed % 2 else np.zeros_like(start), parts)
            for ours, theirs in zip((q, k, v), expected, strict=True):
                assert_close(ours[row, at], theirs, 1e-3)


def test_values_are_this_tokens_and_the_one_befores():
    u, current, delayed, rotary, weights, start = draw(4, "released")
    segments = np.array([[1] * 5 + [2] * 8, [0] * 2 + [7] + [8] * 10], np.int32)
    _, _, v = whole(u, current, delayed, segments, rotary, weights, start)
    assert v.shape == (B, S, 2, C)
    np.testing.assert_array_equal(v[:, :, 0], current)  # two heads: the first is current, the second delayed
    np.testing.assert_array_equal(v[0, 1:5, 1], delayed[0, :4])
    np.testing.assert_array_equal(v[0, 5, 1], start)
    np.testing.assert_array_equal(v[0, 6:, 1], delayed[0, 5:12])
    np.testing.assert_array_equal(v[1, 2, 1], start)
    np.testing.assert_array_equal(v[1, 3, 1], start)
    _, _, v = whole(u, current, delayed, segments, rotary, weights, None)
    assert not np.any(v[0, [0, 5], 1]), "zero where the projection has no bias"


@pytest.mark.parametrize("name", SHAPES)
@given(data=st.data(), seed=seeds())
def test_a_halo_stands_for_the_rows_before(name, data, seed):
    k0, k1, _, _ = SHAPES[name]
    u, current, delayed, rotary, weights, start = draw(seed, name)
    segments = data.draw(packed_rows(B, S))
    expected = whole(u, current, delayed, segments, rotary, weights, start)
    cut, rows = 6, k0 + k1 - 2
    halo = Halo(u[:, cut - rows : cut], segments[:, cut - max(rows, 1) : cut], delayed[:, cut - 1 : cut])
    tail = piece(halo, u[:, cut:], current[:, cut:], delayed[:, cut:], segments[:, cut:],
                 tuple(x[:, cut:] for x in rotary), weights, start)  # fmt: skip
    real = segments[:, cut:] > 0
    for ours, theirs in zip(tail, expected, strict=True):
        assert_close(np.asarray(ours)[real], np.asarray(theirs[:, cut:])[real], 1e-5)


piece = on_host(mixed)


def test_a_head_of_zeros_has_a_finite_gradient():
    _, current, delayed, rotary, weights, start = draw(5, "released")
    zero = jax.tree.map(np.zeros_like, weights)
    segments = np.ones((B, S), np.int32)

    def loss(u, weights):
        q, k, _ = mixed(None, u, current, delayed, segments, rotary, weights, start)
        return q.sum() + k.sum()

    value, gradients = jit(jax.value_and_grad(loss, argnums=(0, 1)))(jnp.zeros((B, S, 6, C)), zero)
    assert value == 0
    chex.assert_tree_all_finite(gradients)


rotated = jax.jit(rotate)


@given(seed=seeds())
def test_rotation_keeps_lengths_and_leaves_the_rest(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 1, 3, 8)).astype(np.float32)
    angle = rng.uniform(-9, 9, (1, 3, 3)).astype(np.float32)
    out = jax.device_get(rotated(x, np.cos(angle), np.sin(angle)))
    np.testing.assert_array_equal(out[..., 6:], x[..., 6:])
    for pair in range(3):  # channels pair + 0 and pair + 3 turn as one complex number
        turned = (x[..., pair] + 1j * x[..., pair + 3]) * np.exp(1j * angle[:, :, pair])
        assert_close(out[..., pair] + 1j * out[..., pair + 3], turned, 1e-5)
