"""Kernels of decode steps, emulated, against their references in float64; a row does not depend on the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers import jit, seeds
from tests.kernel_helpers import kernel
from zaya_jax.ops.cached_attention import NOWHERE
from zaya_jax.ops.cca_mix import Halo, MixInputs, MixParts, MixWeights
from zaya_jax.ops.experts import MOST_UNSORTED
from zaya_jax.ops.router import RouterWeights

WITHIN = {"float32": 1e-5, "bfloat16": 3e-2}  # of the largest value of a result
DTYPES = pytest.mark.parametrize("dtype", WITHIN)


@functools.cache
def compiled(operation, platform):
    """The operation without its static arguments."""
    function = kernel(operation, platform)
    if operation == "router_step":
        return jit(lambda x, state, weights, *more: function(x, state, weights, 1e-5, weights.output_rc.dtype, *more))
    if operation == "cca_mix_step":
        return jit(lambda x, *cache: function(x, MixParts(), *cache))
    return jit(function)


def results(operation, *arguments):
    """What the kernel and the reference compute, the latter in float64."""
    ours = compiled(operation, "interpret")(*arguments)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x if x.dtype.kind in "bi" else jnp.asarray(np.asarray(x, np.float64)), arguments)
        theirs = compiled(operation, "cpu")(*exact)
    return jax.tree.leaves(ours), [np.asarray(x) for x in jax.tree.leaves(theirs)]


def check(operation, dtype, *arguments):
    ours, theirs = results(operation, *arguments)
    for one, other in zip(ours, theirs, strict=True):
        error = np.abs(np.asarray(one, np.float64) - other).max()
        assert error <= WITHIN[dtype] * max(np.abs(other).max(), 1e-30), (one.shape, error)
    return ours


def drawn(seed, dtype, *shapes):
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.normal(size=shape) / (shape[-2] ** 0.5 if len(shape) > 2 else 1), dtype) for shape in shapes
    ]


@DTYPES
@settings(max_examples=2)
@given(seed=seeds(), rows=st.sampled_from((1, 19)), allowed=st.lists(st.integers(0, 4), min_size=1, max_size=3))
@example(seed=0, rows=MOST_UNSORTED, allowed=[3])  # all skip
@example(seed=0, rows=MOST_UNSORTED, allowed=[1])  # several tiles of one expert
def test_experts_of_few_tokens(dtype, seed, rows, allowed):
    h, gate_up, down = drawn(seed, dtype, (rows, 20), (3, 20, 96), (3, 48, 20))
    expert = np.random.default_rng(seed).choice(allowed, rows).astype(np.int32)
    weight = jnp.linspace(0.1, 1, rows)
    (out,) = check("experts", dtype, h, expert, weight, gate_up, down)
    assert not np.asarray(out)[expert >= 3].any()
    # What other rows hold, be it NaN, and where they go, changes no bit.
    other = h.at[1:].set(jnp.nan), np.append(expert[:1], (expert[1:] + 1) % 4).astype(np.int32), weight
    again = compiled("experts", "interpret")(*other, gate_up, down)
    np.testing.assert_array_equal(out[0], again[0])


def router_arguments(seed, dtype, rows, classes, r=32):
    vectors = drawn(seed, "float32", *[(r,)] * 5)
    hidden1, hidden2, output = drawn(seed + 1, dtype, (1, r, r), (1, r, r), (1, r, classes))
    bias, scale, norm, bias1, bias2 = vectors
    weights = RouterWeights(bias, scale, norm, hidden1[0], bias1, hidden2[0], bias2, output[0])
    projected, state = drawn(seed + 2, "float32", (rows, 1, r), (rows, 1, r))
    return projected, state, weights


@DTYPES
@settings(max_examples=2)
@given(seed=seeds(), rows=st.sampled_from((1, 19)), classes=st.integers(2, 20))
def test_the_router(dtype, seed, rows, classes):
    rng = np.random.default_rng(seed)
    arguments, bias = router_arguments(seed, dtype, rows, classes), rng.permutation(classes).astype(np.float32)
    real = rng.random((rows, 1)) < 0.8
    expert, weight, state = check("router_step", dtype, *arguments, bias, real)  # the bias decides, not rounding
    np.testing.assert_array_equal(expert, np.where(real, bias.argmax(), classes - 1))
    assert (expert.dtype, weight.dtype, state.dtype) == ("int32", "float32", "float32")
    other = jax.tree.map(lambda x: x.at[1:].set(jnp.nan), arguments[:2])
    again = compiled("router_step", "interpret")(*other, arguments[2], bias, real)
    for one, more in zip((expert, weight, state), again, strict=True):
        np.testing.assert_array_equal(one[0], more[0])


def test_what_is_not_finite_reaches_the_weight():
    projected, *others = router_arguments(0, "float32", 3, 5)
    arguments = projected.at[1].set(jnp.nan), *others, np.zeros(5, np.float32), np.ones((3, 1), bool)
    ours, theirs = results("router_step", *arguments)
    for one, other in zip(ours[:2], theirs, strict=False):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert np.isnan(ours[1]).ravel().tolist() == [False, True, False]


def test_probabilities_decide_and_ties_go_to_the_lowest_class():
    projected, state, weights = router_arguments(0, "float32", 40, 6)
    real = np.ones((40, 1), bool)
    (expert, *_), theirs = results("router_step", projected, state, weights, np.zeros(6, np.float32), real)
    assert len({*np.asarray(expert).ravel()}) > 2
    np.testing.assert_array_equal(expert, theirs[0])
    even = weights._replace(output_rc=jnp.zeros_like(weights.output_rc))
    for bias, lowest in (([0, 0, 0, 0, 0, 0], 0), ([-1, 0, 0, 0, 0, -1], 1)):
        (expert, *_), _ = results("router_step", projected, state, even, np.array(bias, np.float32), real)
        assert (np.asarray(expert) == lowest).all()


@DTYPES
@settings(max_examples=2)
@given(seed=seeds(), rows=st.sampled_from((1, 19)), bias=st.booleans(),
       taps=st.tuples(*[st.integers(1, 3)] * 2).filter(lambda x: sum(x) > 2))  # fmt: skip
def test_the_mix_and_its_cache(dtype, seed, rows, taps, bias):
    h, k, c, slots, rng = 4, 2, 16, 6, np.random.default_rng(seed)
    n, reach = h + k, sum(taps) - 2
    packed, keys, values = drawn(seed, dtype, (rows, 1, (n + k) * c), (rows, slots, k * c), (rows, slots, k * c))
    u, delayed = (x.astype(jnp.float32) for x in drawn(seed + 1, dtype, (rows, reach, n, c), (rows, 1, k * c // 2)))
    depthwise, grouped, bias0, bias1 = drawn(seed + 2, dtype, (taps[0], n, c), (taps[1], n, c, c), (n, c), (n, c))
    weights = MixWeights(depthwise, bias0, grouped, bias1, jnp.linspace(0.5, 2, k))
    segments = rng.integers(0, 3, (rows, 1)).astype(np.int32)
    slot = np.where(segments[:, 0] == 0, NOWHERE, rng.integers(-2, slots + 2, rows)).astype(np.int32)
    angle = rng.random((rows, 1, c // 4))
    tables = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    start = drawn(seed, dtype, (k * c // 2,))[0] if bias else None
    before = rng.integers(0, 3, (rows, reach)).astype(np.int32)
    x = MixInputs(packed, Halo(u, before, delayed), segments, tables, weights, start)
    out = check("cca_mix_step", dtype, x, keys, values, slot)
    for new, old in zip(out[1:3], (keys, values), strict=True):  # nothing but the slots is written
        changed = {(int(row), int(at)) for row, at in np.argwhere((np.asarray(new) != np.asarray(old)).any(-1))}
        assert changed <= {(row, at) for row, at in enumerate(slot) if 0 <= at < slots}
    for new, old in zip(out[3:], (u, delayed), strict=True):  # padding leaves the state as it is
        np.testing.assert_array_equal(new[segments[:, 0] == 0], old[segments[:, 0] == 0])
    other = x._replace(packed_bsy=packed.at[1:].set(jnp.nan), halo=Halo(u.at[1:].set(jnp.nan), before, delayed))
    again = compiled("cca_mix_step", "interpret")(other, keys, values, slot)
    for one, more in zip(out, jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one[0], more[0])
