"""The decode state's shapes and bookkeeping; that decoding equals the whole sequence stands in test_zaya.py."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.devices_helpers import ROOT
from tests.helpers import tiny_config
from zaya_jax.config import load_config
from zaya_jax.model.attention import KeyValues
from zaya_jax.model.cca import CCACache
from zaya_jax.model.zaya import init_cache


@pytest.mark.parametrize(
    ("variant", "dtype"), [("biased", jnp.float32), ("sliding", jnp.bfloat16), ("gqa", jnp.bfloat16)]
)
def test_an_empty_cache_is_zeros_of_the_right_shapes(variant, dtype):
    config = tiny_config(variant)
    cache = init_cache(config, 3, 16, dtype)
    assert cache.capacity == 16
    assert len(cache.layers) == config.num_layers
    assert not any(np.any(x) for x in jax.tree.leaves(cache))
    heads, c = config.num_kv_heads, config.head_dim
    for layer, kind in zip(cache.layers, config.layer_kinds * config.num_groups, strict=True):
        slots = 16 if kind.window is None else min(16, kind.window)
        kv = layer.kv if config.attention == "cca" else layer  # other attention keeps nothing else
        chex.assert_shape(list(kv), (3, slots, heads * c))
        chex.assert_type(list(kv), dtype)
        if config.attention == "cca":
            chex.assert_shape(layer.u_bwnc, (3, config.convolution_reach, config.num_query_heads + heads, c))
            chex.assert_shape(layer.delayed_b1x, (3, 1, config.kv_size // 2))
            chex.assert_type([layer.u_bwnc, layer.delayed_b1x], float)


def test_layers_have_buffers_of_their_own():
    cache = init_cache(tiny_config("sliding"), 1, 8)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.layers)]
    assert len(set(pointers)) == len(pointers), "so that they can be donated"


def filled(rows):
    rng = np.random.default_rng(0)
    k, v, u, delayed = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in
                        ((2, 9, 4), (2, 9, 4), (2, rows, 3, 4), (2, 1, 2)))  # fmt: skip
    return CCACache(KeyValues(k, v), u, delayed)


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
@pytest.mark.parametrize("new", [1, 2, 4])
def test_advance_keeps_the_last_rows(rows, new):
    rng = np.random.default_rng(1)
    before = filled(rows)
    u, delayed = rng.normal(size=(2, new, 3, 4)).astype(np.float32), rng.normal(size=(2, new, 2)).astype(np.float32)
    kept = rng.integers(0, new + 1, 2)  # of each row
    after = before.advance(before.kv, u, delayed, kept)
    assert after.kv is before.kv
    for row, count in enumerate(kept):
        seen = np.concatenate([before.u_bwnc[row], u[row, :count]])
        np.testing.assert_array_equal(after.u_bwnc[row], seen[len(seen) - rows :])
        last = np.concatenate([before.delayed_b1x[row], delayed[row, :count]])[-1:]
        np.testing.assert_array_equal(after.delayed_b1x[row], last)


def test_the_tail_stays_float32():
    low = jnp.ones((2, 1, 3, 4), jnp.bfloat16)
    before = filled(2)
    after = before.advance(before.kv, low, low[:, :, 0, :2], np.ones(2, int))
    chex.assert_type(jax.tree.leaves(after), jnp.float32)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_the_halo_holds_the_documents_of_its_rows(rows):
    segments = jnp.asarray([[1, 1, 2, 2, 3, 0, 0, 0, 0], [0, 4, 4, 4, 4, 0, 0, 0, 0]])
    layer = filled(rows)
    width = max(rows, 1)  # the value shift looks one token back whatever the kernels
    for length in (0, 1, 2, 5):
        lengths = [length, 5 - length]
        halo = layer.halo(segments, jnp.asarray(lengths))
        padded = np.pad(segments, ((0, 0), (width, 0)))
        expected = [row[start : start + width] for row, start in zip(padded, lengths, strict=True)]
        np.testing.assert_array_equal(halo.segments_bw, expected)
        np.testing.assert_array_equal(halo.u_bwnc, layer.u_bwnc)
        np.testing.assert_array_equal(halo.delayed_b1x, layer.delayed_b1x)


def test_the_cache_of_the_8b_takes_an_eighth_of_full_attention():
    config = load_config(ROOT / "configs/zaya1_8b.yaml").model

    def layer_bytes(config, capacity):
        cache = jax.eval_shape(lambda: init_cache(config, 1, capacity, jnp.bfloat16))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))

    def per_token(config):
        return (layer_bytes(config, 1024) - layer_bytes(config, 512)) / 512

    assert per_token(config) == 40_960
    heads = config.hidden_size // config.head_dim  # with keys and values of the model's width
    full = dataclasses.replace(config, num_query_heads=heads, num_kv_heads=heads)
    assert per_token(full) == 8 * per_token(config)
