"""Newton–Schulz: what it makes of singular values, and that it leaves the vectors alone."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import jit, seeds
from tests.kernel_helpers import kernel, kernel_names, lower, shape
from zaya_jax.ops.orthogonalize import COEFFICIENTS, orthogonalize

SHAPES = [(16, 16), (24, 8), (1, 12)]  # besides (8, 24)
BANDS = {  # the table in the docstring
    ("standard", jnp.float32): (0.681, 1.203),
    ("dion", jnp.float32): (0.977, 1.146),
    ("polar_express", jnp.float32): (0.869, 1.124),
    ("standard", jnp.bfloat16): (0.65, 1.21),
    ("dion", jnp.bfloat16): (0.85, 1.16),
    ("polar_express", jnp.bfloat16): (0.80, 1.14),
}
SMALLEST = 0.003  # of the Frobenius norm: from there on the bands hold
every_set = pytest.mark.parametrize("coefficients", COEFFICIENTS)
every_band = pytest.mark.parametrize(("coefficients", "dtype"), BANDS)


@functools.cache
def newton_schulz(dtype=jnp.float32, coefficients="standard", steps=5):
    return jit(functools.partial(orthogonalize, steps=steps, dtype=dtype, coefficients=coefficients))


def rotation(rng, size, columns):
    return np.linalg.qr(rng.normal(size=(size, columns)))[0]


def draw(seed, p, q, smallest=SMALLEST):
    """UΣVᵀ and its parts: Σ of norm 1, anything from all values equal to one that outweighs the others."""
    rng = np.random.default_rng(seed)
    rank = min(p, q)
    s = 10 ** rng.uniform(-rng.uniform(0, 3), 0, rank)
    s[0] *= rng.choice([1, 30])
    s = np.maximum(s / np.linalg.norm(s), 1.02 * smallest)
    s /= np.linalg.norm(s)
    u, v = rotation(rng, p, rank), rotation(rng, q, rank)
    return (u * s) @ v.T, u, s, v


def polynomial(s, coefficients, steps):
    """The published iteration on singular values of a matrix of norm 1, written out."""
    if coefficients == "standard":
        triples = [(3.4445, -4.7750, 2.0315)]
    elif coefficients == "dion":
        triples = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                   (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]  # fmt: skip
    else:  # algorithm 1 of arXiv 2505.16932
        triples = [
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
            (1.875, -1.25, 0.375),
        ]
        triples = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in triples[:-1]] + [triples[-1]]
        s = s / 1.01
    for a, b, c in (triples + steps * triples[-1:])[:steps]:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize(("coefficients", "steps"), [("standard", 3), ("dion", 3), ("dion", 10), ("polar_express", 10)])
def test_it_is_the_published_polynomial_of_the_singular_values(coefficients, steps):
    for seed in range(4):
        m, u, s, v = draw(seed, 8, 24)
        out = newton_schulz(jnp.float32, coefficients, steps)(7.0 * m)
        np.testing.assert_allclose(out, (u * polynomial(s, coefficients, steps)) @ v.T, atol=2e-4)


@every_set
def test_the_band_in_the_docstring_is_that_of_the_polynomial(coefficients):
    low, high = BANDS[coefficients, jnp.float32]
    inside = polynomial(np.geomspace(SMALLEST, 1, 100_001), coefficients, 5)
    assert low <= inside.min() < low + 0.002
    assert high - 0.002 < inside.max() <= high
    below = polynomial(np.linspace(0, SMALLEST, 10_001), coefficients, 5)
    assert below.min() == 0
    assert below.max() <= high


@pytest.mark.parametrize(
    ("shape", "coefficients", "dtype"),
    [*(((8, 24), *band) for band in BANDS), *((shape, "standard", jnp.float32) for shape in SHAPES)],
)
@given(seed=seeds())
def test_singular_values_end_in_the_band_and_vectors_stay(shape, coefficients, dtype, seed):
    low, high = BANDS[coefficients, dtype]
    m, u, _, v = draw(seed, *shape)
    out = np.asarray(newton_schulz(dtype, coefficients)(m), np.float64)
    inner = u.T @ out @ v  # diagonal, were the singular vectors kept exactly
    assert np.abs(inner - np.diag(np.diag(inner))).max() < (1e-3 if dtype == jnp.float32 else 0.15)
    values = np.linalg.svd(out, compute_uv=False)
    assert values.min() > low
    assert values.max() < high


@every_band
@given(seed=seeds())
def test_an_ill_conditioned_matrix_stays_under_the_band(coefficients, dtype, seed):
    m, *_ = draw(seed, 8, 24, smallest=0)
    m[:3] = 0  # of rank 5
    values = np.linalg.svd(np.asarray(newton_schulz(dtype, coefficients)(m), np.float64), compute_uv=False)
    assert values.max() < BANDS[coefficients, dtype][1]
    assert values[-3:].max() < 1e-6, "the rows of zeros are such still"


@given(seed=seeds(), factor=st.floats(-1e4, 1e4).filter(lambda x: abs(x) > 1e-5))
def test_it_commutes_with_rotations_and_transposition_and_takes_scale_out(seed, factor):
    m, *_ = draw(seed, 8, 24)
    rng = np.random.default_rng(seed)
    left, right = rotation(rng, 8, 8), rotation(rng, 24, 24)
    once = newton_schulz()
    out = np.asarray(once(m), np.float64)
    np.testing.assert_allclose(once(left @ m @ right), left @ out @ right, atol=3e-4)
    np.testing.assert_allclose(once(m.T), out.T, atol=3e-4)
    np.testing.assert_allclose(once(factor * m), np.sign(factor) * out, atol=3e-4)


@pytest.mark.parametrize(("coefficients", "dtype"), [("standard", jnp.float32), ("polar_express", jnp.bfloat16)])
@given(seed=seeds())
def test_a_stack_is_its_matrices(coefficients, dtype, seed):
    m = np.stack([draw(seed + index, 8, 24)[0] for index in range(6)]).reshape(2, 3, 8, 24)
    m[1, 2] *= 1e3  # each matrix has its own norm
    m[0, 1] = 0
    out = newton_schulz(dtype, coefficients)(m)
    for index in np.ndindex(2, 3):
        tolerance = 3e-4 if dtype == jnp.float32 else 0.02
        np.testing.assert_allclose(out[index], newton_schulz(dtype, coefficients)(m[index]), atol=tolerance)


@every_band
def test_a_zero_matrix_stays_zero_and_one_near_it_fades(coefficients, dtype):
    out = newton_schulz(dtype, coefficients)(np.zeros((8, 24), np.float32))
    chex.assert_type(out, jnp.float32)
    assert not np.any(out)
    m, *_ = draw(0, 8, 24)
    assert np.linalg.norm(newton_schulz(dtype, coefficients)(1e-7 * m)) > 1
    assert np.linalg.norm(newton_schulz(dtype, coefficients)(1e-12 * m)) < 0.1


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", jnp.float32), ("interpret", jnp.bfloat16)])
def test_the_scale_is_taken_out_over_all_of_fp32(dtype, platform):
    """Powers of two change no rounding: the result is the same to the last bit."""
    m = np.stack([1.3 * draw(seed, 8, 24)[0] for seed in range(2)]).astype(dtype)  # of norm 1.3
    run = jit(functools.partial(kernel("orthogonalize", platform), steps=2, dtype=dtype))
    # A norm just over 1e-7; a root mean square of over 1e15; and a norm whose inverse has a square below fp32's range.
    for power in (-23, 54, 63):
        np.testing.assert_array_equal(run(m * m.dtype.type(2.0**power)), run(m))
    assert np.linalg.norm(run(m)[0]) > 1


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.soak), jnp.bfloat16])
def test_a_large_matrix_may_have_tiny_elements(dtype):
    """As many elements as an expert's projection has: of a root mean square of 5e-11 its norm is over 1e-7."""
    m = np.random.default_rng(0).normal(size=(2, 2**21)).astype(np.float32)
    run = jit(functools.partial(orthogonalize, steps=1, dtype=dtype))
    found, exact = run(m * np.float32(5e-11)), run(m)
    assert np.abs(exact).max() > 1e-4
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(found, exact, rtol=0, atol=tolerance * np.abs(exact).max())


@pytest.mark.parametrize(("shape", "steps"), [((8,), 5), ((8, 8), 0)])
def test_what_is_no_matrix_or_no_iteration_is_refused(shape, steps):
    with pytest.raises(ValueError, match="needs matrices and at least 1 step"):
        orthogonalize(jnp.ones(shape), steps=steps, dtype=jnp.float32)


def test_kernels_give_the_same_matrices():
    m = np.stack([draw(seed, 33, 20)[0] for seed in range(2)])
    by_kernels = functools.partial(kernel("orthogonalize", "interpret"), steps=5, dtype=jnp.float32)
    out = jit(functools.partial(by_kernels, coefficients="dion"))(m)
    chex.assert_type(out, jnp.float32)
    np.testing.assert_allclose(out, newton_schulz(jnp.float32, "dion")(m), atol=3e-4)


def test_on_gpus_a_step_has_two_kernels():
    platform = "cuda"  # and for the other, tests/parallel/test_muon.py
    by_platform = functools.partial(kernel("orthogonalize", platform), steps=5, dtype=jnp.bfloat16)
    lowered = lower(by_platform, shape(2, 256, 512, dtype=jnp.float32), platform=platform)
    assert kernel_names(lowered) == ["gram", "gram_polynomial"], "in the loop over steps"


def test_kernels_have_no_double_precision():
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match="gram_polynomial kernels support"),
    ):
        jax.eval_shape(
            functools.partial(kernel("orthogonalize", "interpret"), steps=1, dtype=jnp.float64), np.ones((4, 6))
        )
