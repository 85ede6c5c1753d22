"""CCA as a whole layer, against docs/reference.md §1.3 in float64, with the composed taps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from tests.helpers import assert_close, jit, seeds, tiny_config
from zaya_jax.model.cca import CCA, Context
from zaya_jax.model.layers import rotary_table
from zaya_jax.ops import Ops
from zaya_jax.ops.attention import attention

B, S = 2, 11
CONFIGS = {"plain": tiny_config(), "biased": tiny_config(attention_bias=True, num_query_heads=6, rotary_fraction=0.25)}
every_config = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def layer(name, seed=0):
    """A layer with nothing at its neutral start."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(functools.partial(CCA, CONFIGS[name], CONFIGS[name].layer_kinds[0]), jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), jnp.float32), shapes)


@functools.cache
def program(name):
    """(layer, h) → output and the queries, keys and values that attention was given."""
    config = CONFIGS[name]

    def call(cca, h):
        seen = []

        def spy(q, k, v, **more):
            seen.extend((q, k, v))
            return attention(q, k, v, **more)

        positions = jnp.broadcast_to(jnp.arange(S), (B, S))
        rotary = {config.rope_base: rotary_table(positions, config.rotary_size, config.rope_base)}
        out, cache = cca(h, Context(*[jnp.ones((B, S), jnp.int32)] * 2, rotary), None, Ops(attention=spy))
        assert cache is None
        return out, *seen

    return jit(call)


def draw(config, seed):
    return np.random.default_rng(seed).normal(size=(B, S, config.hidden_size)).astype(np.float32)


def wide(variable):
    return np.asarray(variable[...], np.float64)


def projections(cca, h):
    """u of the packed heads, and both halves of the value."""
    config = cca.config
    bias = wide(cca.projection_bias) if config.attention_bias else np.zeros(config.query_size + 2 * config.kv_size)
    kernels = np.concatenate([wide(w) for w in (cca.query, cca.key, cca.value_current, cca.value_delayed)], 1)
    qk, half = config.query_size + config.kv_size, config.kv_size // 2
    u, current, delayed = np.split(h.astype(np.float64) @ kernels + bias, [qk, qk + half], -1)
    return u.reshape(B, S, -1, config.head_dim), current, delayed, bias[qk + half :]


def convolved(cca, u):
    """z_t = A2 u_{t−2} + A1 u_{t−1} + A0 u_t + b, u before the start 0."""
    (d0, d1), (w0, w1) = wide(cca.depthwise), wide(cca.grouped)
    taps = (d0[..., None] * w0, d1[..., None] * w0 + d0[..., None] * w1, d1[..., None] * w1)
    b = np.einsum("nx,nxc->nc", wide(cca.depthwise_bias), w0 + w1) + wide(cca.grouped_bias)
    padded = np.pad(u, ((0, 0), (2, 0), (0, 0), (0, 0)))
    return sum(np.einsum("bsnx,nxc->bsnc", padded[:, i : i + S], tap) for i, tap in enumerate(taps)) + b


def reference(cca, h):
    config = cca.config
    num_query, num_kv, c = config.num_query_heads, config.num_kv_heads, config.head_dim
    groups = num_query // num_kv
    u, current, delayed, start = projections(cca, h)
    z = convolved(cca, u)
    q_mean = 0.5 * (u[:, :, :num_query] + np.repeat(u[:, :, num_query:], groups, 2))
    k_mean = q_mean.reshape(B, S, num_kv, groups, c).mean(3)

    def unit(x):
        return x * np.sqrt(c) / np.linalg.norm(x, axis=-1, keepdims=True)

    size = config.rotary_size
    angle = np.arange(S)[:, None] * config.rope_base ** (-np.arange(0, size, 2) / size)

    def turn(x):
        pairs = (x[..., : size // 2] + 1j * x[..., size // 2 : size]) * np.exp(1j * angle)[:, None]
        return np.concatenate([pairs.real, pairs.imag, x[..., size:]], -1)

    q = turn(unit(z[:, :, :num_query] + q_mean))
    k = turn(unit(z[:, :, num_query:] + k_mean) * wide(cca.temperature)[:, None])
    before = np.concatenate([np.broadcast_to(start, (B, 1, delayed.shape[-1])), delayed[:, :-1]], 1)
    v = np.concatenate([current, before], -1).reshape(B, S, num_kv, c)
    scores = np.einsum("bshc,bthc->bhst", q, np.repeat(k, groups, 2)) / np.sqrt(c)
    scores = np.where(np.tri(S, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("bhst,bthc->bshc", p / p.sum(-1, keepdims=True), np.repeat(v, groups, 2))
    bias = wide(cca.output_bias) if config.attention_bias else 0
    return out.reshape(B, S, -1) @ wide(cca.output) + bias, q, k, v


@every_config
@settings(max_examples=5)
@given(seed=seeds())
def test_equals_the_formulas(name, seed):
    h = draw(CONFIGS[name], seed)
    ours, theirs = program(name)(layer(name), h), reference(layer(name), h)
    for array, expected in zip(ours, theirs, strict=True):
        assert_close(array, expected, 1e-3)
