"""Polynomials of Gram matrices: kernels against the formula, and the half of the work that they do."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.symmetric import upper_tiles
from pallas_kernels.tiles import tile
from tests.helpers import jit, seeds
from tests.kernel_helpers import TARGETS, equations, kernel, lowered_kernels, shape

B, C = -4.7750, 2.0315
BOTH = (jnp.float32, jnp.bfloat16)
# A layer's experts; those of all 40 layers, whose addresses want 64 bits.
EXPERTS, ALL_EXPERTS = (16, 2048, 4096), (40 * 16, 2048, 4096)


def polynomial(x, platform="cpu"):
    return kernel("gram_polynomial", platform)(x, jnp.float32(B), jnp.float32(C), jnp.ones(x.shape[:-2]))


@functools.cache
def compiled(platform):
    return jit(functools.partial(polynomial, platform=platform))


def draw(seed, sizes, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=sizes) / math.sqrt(sizes[-1]), dtype)


def formula(x):
    """In float64, with G rounded where it is said to be."""
    wide = np.asarray(x, np.float64)
    gram = wide @ np.swapaxes(wide, -1, -2)
    low = np.asarray(gram.astype(x.dtype), np.float64)
    return B * gram + C * low @ low


def check(sizes, seed, dtype):
    x = draw(seed, sizes, dtype)
    found, expected = jax.device_get(compiled("interpret")(x)), formula(x)
    chex.assert_type(found, dtype)
    # Two roundings to bf16: that of the result, and one of G that falls to the other side.
    tolerance = 1e-5 if dtype == jnp.float32 else 2 * 2.0**-8
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=tolerance * np.abs(expected).max())
    # Emulated, a tile is made once for each of its two stores, which may round apart; on a GPU it is made once.
    mirrored = np.swapaxes(found, -1, -2).astype(np.float32)
    apart = float(jnp.finfo(dtype).eps) * np.abs(expected).max()
    np.testing.assert_allclose(found.astype(jnp.float32), mirrored, rtol=0, atol=apart)


@pytest.mark.parametrize(("sizes", "dtype"), [((2, 2, 20, 33), jnp.bfloat16), ((1, 37, 7), jnp.float32)])
@settings(max_examples=3)
@given(seed=seeds())
def test_kernels_give_the_polynomial_symmetric(sizes, dtype, seed):
    check(sizes, seed, dtype)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", BOTH)
@settings(max_examples=40)
@given(sizes=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 70)), seed=seeds())
def test_kernels_give_the_polynomial_of_any_shape(dtype, sizes, seed):
    check(sizes, seed, dtype)


@pytest.mark.parametrize("dtype", BOTH)
def test_the_reference_is_two_plain_products(dtype):
    x = draw(0, (2, 7, 9), dtype)
    np.testing.assert_allclose(np.asarray(polynomial(x), np.float64), formula(x), atol=0.02)
    assert "pallas_call" not in str(jax.make_jaxpr(polynomial)(x))


def launches(sizes, dtype, platform):
    """Of each kernel, its programs and the bytes of its outputs."""
    found = equations(functools.partial(polynomial, platform=platform), shape(*sizes, dtype=dtype))
    return [(math.prod(one.params["grid_mapping"].grid), sum(v.aval.size * v.aval.dtype.itemsize for v in one.outvars))
            for one in found if one.primitive.name == "pallas_call"]  # fmt: skip


@pytest.mark.parametrize("platform", TARGETS)
def test_half_of_the_work_is_done(platform):
    """Multiply–adds and bytes, counted from the programs that are launched."""
    (n, p, q), cut = EXPERTS, tile("symmetric", platform, jnp.bfloat16)
    size, tiles = cut.sizes[0], p // cut.sizes[0]
    assert p % size == q % cut.sizes[1] == 0, "so that what follows counts nothing of the edges"
    first, second = launches(EXPERTS, jnp.bfloat16, platform)
    assert first[0] == second[0] == n * tiles * (tiles + 1) // 2
    done = first[0] * size * size * q + second[0] * size * size * p
    assert done / (n * p * p * (q + p)) == (tiles + 1) / (2 * tiles) == 17 / 32
    # Beside the operands a Gram matrix' element costs its two roundings, and half of them are kept in fp32 and read
    # once. Plain products write it twice in fp32, read it three times so, and write the two roundings: 24 bytes.
    kept = 4 * first[0] * size * size
    assert (first[1], second[1]) == (2 * n * p * p + kept, 2 * n * p * p)
    assert (first[1] + kept + second[1]) / (n * p * p) == 4 + 2 * 4 * 17 / 32


@given(p=st.integers(1, 1000))
def test_every_pair_of_tiles_is_done_once(p):
    cut = tile("symmetric", "cuda", jnp.float32)
    first, second = upper_tiles(p, cut)
    pairs = set(zip(first.tolist(), second.tolist(), strict=True))
    tiles = math.ceil(p / cut.sizes[0])
    assert len(pairs) == len(first) == tiles * (tiles + 1) // 2
    assert all(0 <= i <= j < tiles for i, j in pairs)


@pytest.mark.parametrize(
    ("platform", "sizes", "dtype"), [("cuda", EXPERTS, jnp.bfloat16), ("rocm", ALL_EXPERTS, jnp.float32)]
)
def test_the_kernels_are_lowered(sizes, dtype, platform):
    names = lowered_kernels(polynomial, shape(*sizes, dtype=dtype), platform=platform)
    assert names == ["gram", "gram_polynomial"]


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="support bfloat16 or float32 with sums in float32, not float16"):
        polynomial(jnp.ones((4, 4), jnp.float16), "interpret")
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"not float64 with sums in float64\.$"):
        kernel("gram_polynomial", "interpret")(jnp.ones((4, 4)), *(jnp.ones(()),) * 3)
