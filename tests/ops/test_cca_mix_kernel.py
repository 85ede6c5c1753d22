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
from tests.kernel_helpers import kernel, lowered_kernels, shape, traced_kernels
from zaya_jax.ops.cca_mix import Halo, MixInputs, MixWeights, cca_mix
from zaya_jax.ops.names import MATMUL_OUTPUT

# Kernel of the operation → what it launches, forward and backward.
LAUNCHES = {
    name: [forward, "cca_mix_backward_norm", "cca_mix_backward_rows", "cca_mix_backward_matrices"]
    for name, forward in (("pallas", "cca_mix"), ("pallas_by_head", "cca_mix_by_head"))
}
each_kernel = pytest.mark.parametrize("implementation", LAUNCHES)
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

    If three divides the seed, there is no halo; if two divides it, no delayed value at the start of documents.
    """
    b, s, h, k, c, pairs, k0, k1 = SIZES[name]
    rng = np.random.default_rng(seed)

    def normal(*sizes):
        return rng.normal(0, 1, sizes).astype(np.float32)

    n, x, before = h + k, k * c // 2, max(k0 + k1 - 2, 1)
    weights = MixWeights(normal(k0, n, c), normal(n, c), normal(k1, n, c, c) / c**0.5, normal(n, c), normal(k))
    halo = Halo(normal(b, k0 + k1 - 2, n, c), segments[:, :before], normal(b, 1, x))
    angle = rng.uniform(0, 6, (b, s, pairs)).astype(np.float32)
    given_ = (normal(b, s, n * c + 2 * x), weights, (halo.u_bwnc, halo.delayed_b1x) if seed % 3 else None,
              normal(x) if seed % 2 else None)  # fmt: skip
    rest = (halo.segments_bw, segments[:, before:], (np.cos(angle), np.sin(angle)))
    return given_, rest, (normal(b, s, h, c), normal(b, s, k, c), normal(b, s, k, c))


def both(mix, dtype, given_, rest, cotangents):
    """Results and gradients of all that is differentiated, of the mix in `dtype`, parameters kept as they are."""

    def call(packed, weights, before, start):
        halo = None if before is None else Halo(before[0].astype(dtype), rest[0], before[1].astype(dtype))
        return mix(MixInputs(packed.astype(dtype), halo, rest[1], rest[2], weights, start))

    out, back = jax.vjp(call, *given_)
    return out, back(tuple(g.astype(y.dtype) for g, y in zip(cotangents, out, strict=True)))


@functools.cache
def ours(implementation, dtype):
    return jit(functools.partial(both, kernel("cca_mix", "interpret", implementation), dtype))


@functools.cache
def expected():
    return jit(functools.partial(both, cca_mix, jnp.float64))


def check(implementation, name, seed, segments, dtype):
    inputs = jax.tree.map(jnp.asarray, draw(name, seed, segments))
    got = ours(implementation, dtype)(*inputs)
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


@each_kernel
@settings(max_examples=3)
@given(data=st.data(), seed=seeds())
def test_equals_the_reference(implementation, data, seed):
    """Three tiles, parts of the tokens, three taps, and channels that are taken in turns."""
    check(implementation, "taps", 6 * seed + 1, data.draw(rows("taps")), jnp.float32)


@each_kernel
def test_a_first_token_without_a_halo_takes_the_delayed_value_of_a_start(implementation):
    check(implementation, "taps", 3, np.ones((2, 40), np.int32), jnp.float32)


@each_kernel
def test_nothing_is_before_a_sequence_without_a_halo_in_bfloat16(implementation):
    """As in fp32 behind the halo of another document, and with zeros for the delayed value at the start."""
    segments = np.tile(np.repeat([9, 1, 2], [3, 20, 17]).astype(np.int32), (2, 1))
    (packed, weights, halo, start), rest, cotangents = draw("taps", 1, segments)
    packed = packed.astype(jnp.bfloat16)
    found = jit(kernel("cca_mix", "interpret", implementation))(MixInputs(packed, None, rest[1], rest[2], weights))
    chex.assert_type([*found], jnp.bfloat16)
    inputs = (packed.astype(np.float32), weights, halo, np.zeros_like(start)), rest, cotangents
    expected, _ = ours(implementation, jnp.float32)(*jax.tree.map(jnp.asarray, inputs))
    assert_close(jax.tree.map(np.float32, tuple(found)), tuple(expected), 3e-2)


@each_kernel
def test_a_temperature_of_zero_has_a_gradient(implementation):
    given_, rest, cotangents = jax.tree.map(jnp.asarray, draw("released", 3, np.ones((2, 39), np.int32)))
    temperatures = jnp.array([0.0, 0.5])
    given_ = (given_[0], given_[1]._replace(temperature_k=temperatures), *given_[2:])
    _, (_, found, *_) = ours(implementation, jnp.float32)(given_, rest, cotangents)
    _, (_, expected, *_) = jit(functools.partial(both, cca_mix, jnp.float32))(given_, rest, cotangents)
    assert_close(found, expected, 1e-4)


@pytest.mark.soak
@each_kernel
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SIZES)
@settings(max_examples=30)
@given(data=st.data(), seed=seeds())
def test_equals_the_reference_widely(implementation, name, dtype, data, seed):
    check(implementation, name, seed, data.draw(rows(name)), dtype)


def shapes(dtype, k0=2, k1=2, c=128, pairs=32):
    b, s, h, k = 1, 4096, 8, 2
    n, x, before = h + k, k * c // 2, max(k0 + k1 - 2, 0)
    f32, i32 = (functools.partial(shape, dtype=kind) for kind in (jnp.float32, jnp.int32))
    halo = Halo(shape(b, before, n, c, dtype=dtype), i32(b, max(before, 1)), shape(b, 1, x, dtype=dtype))
    weights = MixWeights(f32(k0, n, c), f32(n, c), f32(k1, n, c, c), f32(n, c), f32(k))
    tables = (f32(b, s, pairs), f32(b, s, pairs))
    return shape(b, s, n * c + 2 * x, dtype=dtype), halo, i32(b, s), tables, weights


def trained(packed, halo, segments, rotary, weights, *, platform, implementation="pallas", saved=()):
    """The gradient of a layer that saves what has these names for its backward pass."""

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*saved))
    def mix(packed, weights):
        results = kernel("cca_mix", platform, implementation)(MixInputs(packed, halo, segments, rotary, weights))
        return [jnp.square(x.astype(jnp.float32)).sum() for x in results]

    return jax.value_and_grad(lambda *given_: sum(mix(*given_)), argnums=(0, 1))(packed, weights)


@each_kernel
def test_lowers(implementation):
    """Forward once more where it is recomputed for those that use the results, but not where these are saved."""
    gradient, arrays = functools.partial(trained, implementation=implementation), shapes(jnp.bfloat16)
    launches = LAUNCHES[implementation]
    assert lowered_kernels(gradient, *arrays, platform="rocm") == [launches[0], *launches]
    assert traced_kernels(functools.partial(gradient, platform="rocm", saved=(MATMUL_OUTPUT,)), *arrays) == launches


@pytest.mark.soak
@each_kernel
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("sizes", [{}, {"pairs": 64}, {"k0": 4, "k1": 3}, {"c": 64, "pairs": 16}])
def test_lowers_widely(implementation, platform, dtype, sizes):
    gradient = functools.partial(trained, implementation=implementation)
    launches = lowered_kernels(gradient, *shapes(dtype, **sizes), platform=platform)
    assert launches[1:] == LAUNCHES[implementation]


@pytest.mark.parametrize(("dtype", "sizes", "words"), [
    (jnp.float16, {}, "in bfloat16 or all in float32"),
    (jnp.bfloat16, {"c": 96}, "powers of two"),
    (jnp.bfloat16, {"pairs": 8}, "128 channels with 8 pairs"),
    (jnp.bfloat16, {"pairs": 0}, "with 0 pairs"),
    (jnp.bfloat16, {"k0": 8, "k1": 4}, "8 and 4 taps"),
    (jnp.bfloat16, {"k0": 0, "k1": 0}, "need convolutions"),
])  # fmt: skip
def test_refuses(dtype, sizes, words):
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(trained, platform="cuda"), *shapes(dtype, **sizes))
