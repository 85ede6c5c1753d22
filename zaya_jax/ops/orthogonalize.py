"""Newton–Schulz iteration: approximately orthogonalize matrices with matmuls only (docs/reference.md §3.1)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from zaya_jax.config import ModelConfig
from zaya_jax.config.optimizer import Coefficients
from zaya_jax.ops.gram_polynomial import gram_polynomial, product
from zaya_jax.ops.operation import Check, Input, Operation
from zaya_jax.ops.precision import accumulation_dtype

Triple = tuple[float, float, float]

SMALLEST_NORM = 1e-7


def _shrunk(triple: Triple, factor: float) -> Triple:
    """Return the coefficients of the quintic `triple` applied to x / factor."""
    a, b, c = triple
    return a / factor, b / factor**3, c / factor**5


_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01

# The paper divides all triples but the last by the safety factor, and also the initial x, which is the same as dividing
# the first triple twice. Without it, the sequence diverges for σ > 1.001, to which bf16 may round a σ of 1.
COEFFICIENTS: dict[Coefficients, tuple[Triple, ...]] = {
    "standard": ((3.4445, -4.7750, 2.0315),),
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        _shrunk(_POLAR_EXPRESS[0], _SAFETY**2),
        *(_shrunk(triple, _SAFETY) for triple in _POLAR_EXPRESS[1:-1]),
        _POLAR_EXPRESS[-1],
    ),
}


def orthogonalize(
    m_xpq: jax.Array, *, steps: int, dtype: jax.typing.DTypeLike, coefficients: Coefficients = "standard",
    gram_polynomial: Callable[..., jax.Array] = gram_polynomial,
) -> jax.Array:  # fmt: skip
    """Approximate UVᵀ of each matrix's singular value decomposition UΣVᵀ.

    After five steps, singular values of at least 0.003 times the Frobenius norm are in the range below (for comparison:
    2,048 equal singular values are 0.022 each). Smaller ones end between 0 and the upper bound. The fp32 range is that
    of the polynomial. The bf16 range was measured on 46,000 matrices of up to 128 × 128; its lower bound comes from
    rounding the matrix, which can shrink small singular values.

    ================  ==================  ====================
    coefficients      fp32 iterates       bf16 iterates
    ================  ==================  ====================
    standard          0.681 to 1.203      0.65 to 1.21
    dion              0.977 to 1.146      0.85 to 1.16
    polar_express     0.869 to 1.124      0.80 to 1.14
    ================  ==================  ====================

    Args:
      m_xpq: matrices in the last two axes, after any batch axes. No normalized copy is written: the Gram matrices are
        scaled instead. A copy is only needed for another dtype than `dtype`, or for matrices that are taller than wide.
      steps: number of iterations X ← aX + (bA + cA²)X with A = XXᵀ, at least 1. Fewer steps than the sequence has
        triples use the first ones; more repeat the last one.
      dtype: dtype of the iterates; sums are always in fp32.
      coefficients: 'standard' is one triple for every step (Jordan's Muon, docs/reference.md §3.1); 'dion' is five
        (Dion, arXiv 2504.05295, as in Optax); 'polar_express' is eight (arXiv 2505.16932, algorithm 1, with its
        safety factor of 1.01).
      gram_polynomial: implementation of that operation.

    Returns:
      fp32, of the same shape. The scale of a matrix does not matter, unless its norm is below 1e-7, where the result
      goes to 0 with it, or above 1.8e19, whose square overflows fp32.

    Raises:
      ValueError: `m_xpq` has fewer than two axes, or `steps` is below 1.
    """
    if m_xpq.ndim < 2 or steps < 1:
        raise ValueError(f"Newton–Schulz needs matrices and at least 1 step, not shape {m_xpq.shape}, {steps} steps")
    sums = accumulation_dtype(m_xpq.dtype)
    triples = COEFFICIENTS[coefficients]
    table = jnp.array([triples[min(step, len(triples) - 1)] for step in range(steps)], sums)

    def step(carry: tuple[jax.Array, jax.Array], triple: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        # With X = sY, aX + PX = sa(Y + (P / a)Y): the matmul can add Y, and `a` only changes the scale.
        (y, scale_x), (a, b, c) = carry, triple
        return (y + product(gram_polynomial(y, b / a, c / a, scale_x), y, dtype), a * scale_x), None

    p, q = m_xpq.shape[-2:]
    y = m_xpq.astype(dtype)
    if p > q:  # so that the Gram matrix is that of the shorter side
        y = jnp.swapaxes(y, -1, -2)
    norm_x = jnp.linalg.norm(y.astype(sums), axis=(-2, -1))
    (y, scale_x), _ = jax.lax.scan(step, (y, 1 / jnp.maximum(norm_x, SMALLEST_NORM)), table)
    x = scale_x[..., None, None] * y.astype(sums)
    return jnp.swapaxes(x, -1, -2) if p > q else x


def _checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(orthogonalize: Callable[..., jax.Array], m: jax.Array) -> jax.Array:
        return orthogonalize(m, steps=5, dtype=m.dtype)

    # Rounding errors of small singular values grow by up to 3.4 in each of the five steps.
    tolerance = {"float32": 1e-3, "bfloat16": 1e-1}
    matrix = Input((2, model.hidden_size, 2 * model.expert_size))
    return {"orthogonalize": Check(run, (matrix,), 1, gradient=False, tolerance=tolerance)} if training else {}


ORTHOGONALIZE = Operation("orthogonalize", orthogonalize, _checks, uses=("gram_polynomial",))
