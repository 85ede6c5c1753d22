"""The mix's kernels: interpreted against the reference in float64, lowered, refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_close, jit, packed_rows, seeds
from tests.kernel_helpers import kernel, lowered_kernels, shape
from zaya_jax.ops.cca_mix import Halo, MixWeights, cca_mix

KERNELS = ["cca_mix", "cca_mix_backward"]
# (rows, tokens, query heads, key heads, channels, pairs, k0, k1); tiles are of 16 tokens and 16 channels.
SIZES = {
    "released": (2, 37, 4, 2, 16, 4, 2, 2),
    "decode": (2, 1, 2, 1, 16, 8, 2, 2),
    "one": (1, 18, 2, 2, 16, 4, 1, 1),
    "long": (1, 35, 3, 1, 32, 16, 4, 3),
    "chunks": (1, 16, 2, 1, 64, 16, 3, 1),
    "heads": (1, 20, 3, 3, 16, 8, 2, 1),
    "taps": (2, 37, 4, 2, 64, 16, 2, 3),
}
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 3e-2}  # of a result's or a gradient's norm


def draw(name, seed, segments):
    """Everything that is differentiated, and what is not; `segments` has the halo's before the piece's.

    If three divides the seed, there is neither a halo nor a delayed value at the start of documents.
    """
    b, s, h, k, c, pairs, k0, k1 = SIZES[name]
    rng = np.random.default_rng(seed)

    def normal(*sizes):
        return rng.normal(0, 1, sizes).astype(np.float32)

    n, x, before = h + k, k * c // 2, max(k0 + k1 - 2, 1)
    weights = MixWeights(normal(k0, n, c), normal(n, c), normal(k1, n, c, c) / c**0.5, normal(n, c), normal(k))
    halo = Halo(normal(b, k0 + k1 - 2, n, c), segments[:, :before], normal(b, 1, x))
    angle = rng.uniform(0, 6, (b, s, pairs)).astype(np.float32)
    given_ = (normal(b, s, n * c + 2 * x), weights, *((halo.u_bwnc, halo.delayed_b1x, normal(x)) if seed % 3 else ()))
    rest = (halo.segments_bw, segments[:, before:], (np.cos(angle), np.sin(angle)))
    return given_, rest, (normal(b, s, h, c), normal(b, s, k, c), normal(b, s, k, c))


def both(mix, dtype, given_, rest, cotangents):
    """Results and gradients of all that is differentiated, of the mix in `dtype`, parameters kept as they are."""

    def call(packed, weights, *before):
        if not before:
            return mix(packed.astype(dtype), None, rest[1], rest[2], weights, None)
        halo_u, halo_delayed, start = before
        halo = Halo(halo_u.astype(dtype), rest[0], halo_delayed.astype(dtype))
        return mix(packed.astype(dtype), halo, rest[1], rest[2], weights, start)

    out, back = jax.vjp(call, *given_)
    return out, back(tuple(g.astype(y.dtype) for g, y in zip(cotangents, out, strict=True)))


@functools.cache
def ours(dtype):
    return jit(functools.partial(both, kernel("cca_mix", "interpret"), dtype))


@functools.cache
def expected():
    return jit(functools.partial(both, cca_mix, jnp.float64))


def check(name, seed, segments, dtype):
    inputs = jax.tree.map(jnp.asarray, draw(name, seed, segments))
    got = ours(dtype)(*inputs)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64 if x.dtype == np.float32 else x.dtype), inputs)
        wanted = jax.tree.map(np.asarray, expected()(*exact))
    # A temperature's gradient is one number, whose addends, one per token and channel, may cancel: its error is that of
    # theirs.
    (_, keys, _), temperature = wanted[0], inputs[0][1].temperature_k
    addends = keys * np.asarray(inputs[2][1], np.float64) / np.asarray(temperature, np.float64)[:, None]
    for (path, y), x in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        leaf = jax.tree_util.keystr(path)
        norm = max(np.linalg.norm(addends if leaf.endswith("temperature_k") else x), 1e-3 * x.size**0.5)
        error = np.linalg.norm(np.asarray(y, np.float64) - x)
        assert error <= TOLERANCE[dtype] * norm, (leaf, error / norm)


def rows(name):
    b, s, _, _, _, _, k0, k1 = SIZES[name]
    return packed_rows(b, s + max(k0 + k1 - 2, 1))


@settings(max_examples=3)
@given(data=st.data(), seed=seeds())
def test_equals_the_reference(data, seed):
    """Three tiles, two parts of the tokens, two programs for three taps, and channels that are taken in turns."""
    check("taps", 3 * seed + 1, data.draw(rows("taps")), jnp.float32)


def test_nothing_is_before_a_sequence_without_a_halo_in_bfloat16():
    """As in fp32 behind the halo of another document, and with zeros for the delayed value at the start."""
    segments = np.tile(np.repeat([9, 1, 2], [3, 20, 17]).astype(np.int32), (2, 1))
    (packed, weights, *halo, start), rest, cotangents = draw("taps", 1, segments)
    packed = packed.astype(jnp.bfloat16)
    found = jit(kernel("cca_mix", "interpret"))(packed, None, rest[1], rest[2], weights, None)
    chex.assert_type([*found], jnp.bfloat16)
    inputs = (packed.astype(np.float32), weights, *halo, np.zeros_like(start)), rest, cotangents
    expected, _ = ours(jnp.float32)(*jax.tree.map(jnp.asarray, inputs))
    assert_close(jax.tree.map(np.float32, tuple(found)), tuple(expected), 3e-2)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SIZES)
@settings(max_examples=30)
@given(data=st.data(), seed=seeds())
def test_equals_the_reference_widely(name, dtype, data, seed):
    check(name, seed, data.draw(rows(name)), dtype)


def shapes(dtype, k0=2, k1=2, c=128, pairs=32):
    b, s, h, k = 1, 4096, 8, 2
    n, x, before = h + k, k * c // 2, max(k0 + k1 - 2, 0)
    f32, i32 = (functools.partial(shape, dtype=kind) for kind in (jnp.float32, jnp.int32))
    halo = Halo(shape(b, before, n, c, dtype=dtype), i32(b, max(before, 1)), shape(b, 1, x, dtype=dtype))
    weights = MixWeights(f32(k0, n, c), f32(n, c), f32(k1, n, c, c), f32(n, c), f32(k))
    tables = (f32(b, s, pairs), f32(b, s, pairs))
    return shape(b, s, n * c + 2 * x, dtype=dtype), halo, i32(b, s), tables, weights


def trained(packed, halo, segments, rotary, weights, *, platform):
    """The gradient as the model takes it: the mix computed again in the backward pass."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def mix(packed, weights):
        return kernel("cca_mix", platform)(packed, halo, segments, rotary, weights, None)

    def loss(*given_):
        return sum(x.astype(jnp.float32).sum() for x in mix(*given_))

    return jax.value_and_grad(loss, argnums=(0, 1))(packed, weights)


def test_lowers():
    """Once forward although it is recomputed: nothing that the backward kernels take comes from the forward one."""
    assert lowered_kernels(trained, *shapes(jnp.bfloat16), platform="rocm") == KERNELS


@pytest.mark.soak
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("sizes", [{}, {"pairs": 64}, {"k0": 4, "k1": 3}, {"c": 64, "pairs": 16}])
def test_lowers_widely(platform, dtype, sizes):
    assert lowered_kernels(trained, *shapes(dtype, **sizes), platform=platform) == KERNELS


@pytest.mark.parametrize(("dtype", "sizes", "words"), [
    (jnp.float16, {}, "in bfloat16 or all in float32"),
    (jnp.bfloat16, {"c": 96}, "powers of two"),
    (jnp.bfloat16, {"pairs": 8}, "128 channels with 8 pairs"),
    (jnp.bfloat16, {"pairs": 0}, "with 0 pairs"),
    (jnp.bfloat16, {"k0": 8, "k1": 4}, "8 and 4 taps"),
    (jnp.bfloat16, {"k0": 0, "k1": 0}, "needs convolutions"),
])  # fmt: skip
def test_refuses(dtype, sizes, words):
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(trained, platform="cuda"), *shapes(dtype, **sizes))
