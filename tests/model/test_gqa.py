"""Grouped-query attention as a whole layer, against the formulas in float64; decoding stands in test_zaya.py."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_close, jit, packed_rows, seeds, tiny_config
from zaya_jax.model.attention import Context
from zaya_jax.model.layers import rotary_table, segment_positions
from zaya_jax.model.zaya import ATTENTION
from zaya_jax.ops import LOCAL, Ops
from zaya_jax.ops.attention import attention

B, S = 2, 11
CONFIGS = {
    "full": tiny_config(attention="gqa", num_query_heads=6),
    "sliding": tiny_config("gqa", rotary_fraction=0.25),  # with biases
    "normed": tiny_config("normed"),
}
KINDS = {name: config.layer_kinds[name == "sliding"] for name, config in CONFIGS.items()}
every_kind = pytest.mark.parametrize("kind", CONFIGS)


@functools.cache
def layer(kind):
    """A layer with nothing at its neutral start."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(ATTENTION[KINDS[kind].attention], CONFIGS[kind], KINDS[kind]),
                            jax.random.key(0))  # fmt: skip
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape), jnp.float32), shapes)


def context(kind, segments):
    segments = jnp.asarray(segments)
    return Context(
        segments,
        segments,
        {KINDS[kind].rope_base: rotary_table(segment_positions(segments), CONFIGS[kind].rotary_size, 1.0e3)},
    )


@functools.cache
def program(kind):
    return jit(lambda gqa, h, segments: gqa(h, context(kind, segments), None, LOCAL)[0])


def draw(kind, seed):
    return np.random.default_rng(seed).normal(size=(B, S, CONFIGS[kind].hidden_size)).astype(np.float32)


def wide(variable):
    return np.asarray(variable.get_raw_value(), np.float64)


def reference(kind, gqa, h, segments):
    """Attention document by document, query by query."""
    config = CONFIGS[kind]
    heads, num_kv, c, size = config.num_query_heads, config.num_kv_heads, config.head_dim, config.rotary_size
    bias = wide(gqa.projection_bias) if config.attention_bias else np.zeros(config.query_size + 2 * config.kv_size)
    parts = np.split(bias, [config.query_size, config.query_size + config.kv_size])
    out = np.zeros((B, S, heads, c))

    def turn(x):  # one document's rows from its start
        angle = np.arange(len(x))[:, None] * 1.0e3 ** (-np.arange(0, size, 2) / size)
        pairs = (x[..., : size // 2] + 1j * x[..., size // 2 : size]) * np.exp(1j * angle)[:, None]
        return np.concatenate([pairs.real, pairs.imag, x[..., size:]], -1)

    for row, number in ((r, n) for r in range(B) for n in np.unique(segments[r][segments[r] > 0])):
        places = np.flatnonzero(segments[row] == number)
        x = h[row, places].astype(np.float64)
        q = (x @ wide(gqa.query) + parts[0]).reshape(-1, heads, c)
        k = (x @ wide(gqa.key) + parts[1]).reshape(-1, num_kv, c)
        if kind == "normed":
            q, k = (y * np.sqrt(c) / np.linalg.norm(y, axis=-1, keepdims=True) for y in (q, k))
            k = k * wide(gqa.temperature)[:, None]
        q, k = turn(q), turn(k)
        v = (x @ wide(gqa.value) + parts[2]).reshape(-1, num_kv, c)
        for t, place in enumerate(places):
            first = max(0, t + 1 - (config.sliding_window or S)) if kind == "sliding" else 0
            for n in range(heads):
                shared = n // (heads // num_kv)
                scores = k[first : t + 1, shared] @ q[t, n] / np.sqrt(c)
                p = np.exp(scores - scores.max())
                out[row, place, n] = p / p.sum() @ v[first : t + 1, shared]
    last = wide(gqa.output_bias) if config.attention_bias else 0
    return out.reshape(B, S, -1) @ wide(gqa.output) + last


@every_kind
@settings(max_examples=5)
@given(data=st.data(), seed=seeds())
def test_equals_the_formulas_for_each_document_by_itself(kind, data, seed):
    segments = data.draw(packed_rows(B, S)) if seed % 2 else np.ones((B, S), np.int32)
    h = draw(kind, seed)
    ours, theirs = np.asarray(program(kind)(layer(kind), h, segments)), reference(kind, layer(kind), h, segments)
    real = segments > 0
    assert_close(ours[real], theirs[real], 1e-4)


@every_kind
def test_queries_keys_and_values_have_the_dtype_of_the_input(kind):
    seen = []

    def spy(q, k, v, **more):
        seen.extend((q, k, v))
        return attention(q, k, v, **more)

    segments = np.ones((B, S), np.int32)
    h = jax.ShapeDtypeStruct((B, S, CONFIGS[kind].hidden_size), jnp.bfloat16)
    out = jax.eval_shape(lambda h: layer(kind)(h, context(kind, segments), None, Ops(attention=spy))[0], h)
    chex.assert_type([*seen, out], jnp.bfloat16)


def test_it_has_no_parameters_of_the_mix():
    config = tiny_config("gqa")
    gqa = jax.eval_shape(functools.partial(ATTENTION["gqa"], config, config.layer_kinds[0]), jax.random.key(0))
    sizes = sorted(x.size for x in jax.tree.leaves(gqa))
    d, q, kv = config.hidden_size, config.query_size, config.kv_size
    assert sizes == sorted([d * q, d * kv, d * kv, q * d, q + 2 * kv, d])
