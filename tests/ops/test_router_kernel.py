"""The router's kernels: interpreted against the reference in float64, lowered, refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import jit, seeds
from tests.kernel_helpers import kernel, lowered_kernels, shape
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.router import RouterWeights

EPS = 1e-5
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 3e-2}  # of a result's or a gradient's norm
SIZES = {"parts": (19, 64, 5), "one": (1, 16, 2), "tiles": (40, 32, 32)}  # tokens, width, classes; tiles of 16 × 16


def draw(seed, name):
    rng = np.random.default_rng(seed)
    t, r, classes = SIZES[name]

    def normal(*sizes, mean=0.0):
        return jnp.asarray(rng.normal(mean, 1, sizes), jnp.float32)

    weights = RouterWeights(normal(r), normal(r, mean=1), normal(r, mean=1), normal(r, r) / r**0.5, normal(r),
                            normal(r, r) / r**0.5, normal(r), normal(r, classes) / r**0.5)  # fmt: skip
    return (normal(t, r), normal(t, r), weights), (normal(t, classes), normal(t, r))


def both(operation, dtype, arrays, cotangents):
    """Results and gradients of the router with matrices in `dtype`."""

    def call(projected, state, weights):
        cast = RouterWeights(*(x.astype(dtype) if x.ndim == 2 else x for x in weights))
        return operation(projected, state, cast, EPS, dtype)

    out, back = jax.vjp(call, *arrays)
    return out, back(cotangents)


@functools.cache
def compiled(platform, dtype):
    return jit(functools.partial(both, kernel("router", platform), dtype))


def check(name, seed, dtype):
    inputs = draw(seed, name)
    got = compiled("interpret", dtype)(*inputs)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), inputs)
        wanted = jax.tree.map(np.asarray, compiled("cpu", jnp.float64)(*exact))
    for (path, y), x in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        error = np.linalg.norm(np.asarray(y, np.float64) - x) / max(np.linalg.norm(x), 1e-3 * x.size**0.5)
        assert error <= TOLERANCE[dtype], (jax.tree_util.keystr(path), error)


@settings(max_examples=4)
@given(seed=seeds())
def test_equals_the_reference(seed):
    check("parts", seed, jnp.float32)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SIZES)
@settings(max_examples=20)
@given(seed=seeds())
def test_equals_the_reference_widely(name, dtype, seed):
    check(name, seed, dtype)


@given(x=st.floats(-30, 30, width=32))
def test_probabilities_are_a_distribution_whatever_the_state(x):
    (projected, *rest), cotangents = draw(0, "parts")
    arrays = np.full_like(projected, x), *rest
    probability, state = jax.device_get(compiled("interpret", jnp.float32)(arrays, cotangents)[0])
    np.testing.assert_allclose(probability.sum(-1), 1, rtol=1e-6)
    assert np.isfinite(state).all()


def shapes(dtype, r=256, classes=17, hidden=2):
    f32 = functools.partial(shape, dtype=jnp.float32)
    matrix, vector = shape(r, r, dtype=dtype), f32(r)
    second = (matrix, vector) if hidden == 2 else (None, None)
    weights = RouterWeights(vector, vector, vector, matrix, vector, *second, shape(r, classes, dtype=dtype))
    return f32(1, 4096, r), f32(1, 4096, r), weights


def trained(projected, state, weights, *, platform):
    """The gradient under the rematerialization policy that saves the probabilities."""
    dtype = weights.hidden1_rr.dtype

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(MATMUL_OUTPUT))
    def run(*arrays):
        return kernel("router", platform)(*arrays, EPS, dtype)

    def loss(*arrays):
        probability, new = run(*arrays)
        return (probability * probability).sum() + new.sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(projected, state, weights)


def test_lowers_and_runs_once_forward_if_the_probabilities_are_saved():
    assert lowered_kernels(trained, *shapes(jnp.bfloat16), platform="cuda") == ["router_forward", "router_backward"]


@pytest.mark.parametrize(("dtype", "sizes", "words"), [
    (jnp.float16, {}, "in bfloat16 or all in float32"),
    (jnp.float32, {}, "needs matrices in bfloat16"),
    (jnp.bfloat16, {"r": 96}, "a power of two"),
    (jnp.bfloat16, {"r": 512}, "16 to 256 elements"),
    (jnp.bfloat16, {"classes": 33}, "at most 32 classes"),
    (jnp.bfloat16, {"hidden": 1}, "needs two hidden layers"),
])  # fmt: skip
def test_refuses(dtype, sizes, words):
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(trained, platform="cuda"), *shapes(dtype, **sizes))
