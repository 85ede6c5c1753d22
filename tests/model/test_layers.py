import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close, jit, packed_rows, seeds
from zaya_jax.model.layers import (
    Carrier,
    ResidualScaling,
    RMSNorm,
    fused_merge,
    matrix,
    rotary_table,
    segment_positions,
)
from zaya_jax.ops import LOCAL
from zaya_jax.ops.residual_norm import MergeVectors, merge

positions_of = jax.jit(segment_positions)


@given(data=st.data())
def test_positions_count_from_the_start_of_each_document(data):
    segments = data.draw(packed_rows(2, 12))
    positions = jax.device_get(positions_of(segments))
    chex.assert_type(positions, jnp.int32)
    for row, ours in zip(segments, positions, strict=True):
        for number in np.unique(row[row > 0]):
            np.testing.assert_array_equal(ours[row == number], np.arange((row == number).sum()))


def test_a_run_is_a_document_though_its_id_came_before():
    segments = np.array([[1, 1, 2, 1, 1, 0, 0]], np.int32)
    np.testing.assert_array_equal(positions_of(segments), [[0, 1, 0, 0, 1, 0, 1]])


def test_rotary_tables_are_cosines_of_positions_times_inverse_frequencies():
    positions = np.array([[0, 1, 7, 5000]])
    cos, sin = jax.device_get(rotary_table(jnp.asarray(positions), 8, 1.0e4))
    angle = positions[..., None] * 1.0e4 ** (-np.arange(4) / 4)
    chex.assert_type([cos, sin], jnp.float32)
    np.testing.assert_allclose(cos, np.cos(angle), atol=2e-3)  # 5000 radians in fp32 are known to 1e-3
    np.testing.assert_allclose(sin, np.sin(angle), atol=2e-3)
    np.testing.assert_allclose(cos[:, :3], np.cos(angle[:, :3]), atol=1e-5)
    assert rotary_table(jnp.asarray(positions), 0, 1.0e4)[0].shape == (1, 4, 0)


@given(seed=seeds())
def test_residual_scaling_adds_before_it_scales(seed):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: ResidualScaling(6))
    drawn = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)
    out, stream = (jnp.asarray(rng.normal(size=(2, 3, 6)), jnp.float32) for _ in range(2))
    expected = (out + drawn.hidden_bias[...]) * drawn.hidden_scale[...]
    expected += (stream + drawn.residual_bias[...]) * drawn.residual_scale[...]
    assert_close(merge(out, stream, drawn.vectors), expected, 1e-6)


@given(seed=seeds())
def test_a_plain_sum_is_residual_scaling_at_its_start(seed):
    rng = np.random.default_rng(seed)
    out, stream = rng.normal(size=(2, 2, 3, 6)).astype(np.float32)
    for output in (jnp.asarray(out), jnp.asarray(out, jnp.bfloat16)):
        merged = merge(output, jnp.asarray(stream), None)
        chex.assert_type(merged, jnp.float32)
        np.testing.assert_array_equal(merged, merge(output, jnp.asarray(stream), ResidualScaling(6).vectors))


@given(seed=seeds(), rows=st.integers(1, 5), width=st.integers(1, 40), scaled=st.booleans())
def test_a_merge_computes_the_gradient_of_the_norm_after_it(seed, rows, width, scaled):
    """In layers one after the other, that use each stream and its norm."""
    rng = np.random.default_rng(seed)

    def total(fused, weights, outputs, vectors, x):
        structure, value = jax.tree.structure(RMSNorm(width, 1e-5)), 0.0
        norms = [jax.tree.unflatten(structure, [weight]) for weight in weights]
        carrier = Carrier(norms[0](x, x.dtype)) if fused else None
        for norm, output, following in zip(norms, outputs, weights[1:], strict=False):
            value += (jnp.sin(norm(x, x.dtype, carrier)) * x).sum()
            terms = output, x, vectors
            merged: Any = fused_merge(LOCAL, 1e-5, terms, following, carrier, ()) if fused else (merge(*terms), None)
            x, carrier = merged
        return value + jnp.sin(norms[-1](x, x.dtype, carrier)).sum()

    with jax.enable_x64(True):
        weights, outputs, x, vectors = (
            jnp.asarray(rng.normal(size=size)) for size in ((3, width), (2, rows, width), (rows, width), (4, width))
        )
        arrays = weights, outputs, MergeVectors(*vectors) if scaled else None, x
        ours, theirs = (jit(jax.value_and_grad(functools.partial(total, fused), (0, 1, 2, 3)))(*arrays)
                        for fused in (True, False))  # fmt: skip
    assert_close(ours, theirs, 1e-9)


def test_a_norm_has_its_weight_and_epsilon():
    norm = RMSNorm(4, 0.5)
    np.testing.assert_array_equal(norm.weight[...], 1)
    x = jnp.asarray([[1.0, -1.0, 1.0, 1.0]])
    np.testing.assert_allclose(norm(x, jnp.float32), x / 1.5**0.5, rtol=1e-6)


def test_a_matrix_keeps_the_variance_of_its_input():
    x = matrix(jax.random.key(0), (2, 400, 100))
    chex.assert_type(x, jnp.float32)
    assert abs(np.std(x) * 400**0.5 - 1) < 0.02
