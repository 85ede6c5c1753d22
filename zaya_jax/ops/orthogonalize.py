"""Newton–Schulz: the nearest matrix with orthonormal rows, by products alone (zaya1.md §3.1)."""

import jax
import jax.numpy as jnp

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(m_xpq: jax.Array, *, steps: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """UVᵀ of each matrix's singular value decomposition UΣVᵀ, approximately.

    Args:
      m_xpq: matrices in the last two axes, any axes before.
      steps: of the quintic iteration X ← aX + (bA + cA²)X, A = XXᵀ.
      dtype: of the iterates; sums are in fp32 whatever it is.

    Returns:
      fp32, of the same shape; singular values lie around 1, between about 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    p, q = m_xpq.shape[-2:]
    x = m_xpq.astype(jnp.float32)
    if p > q:  # the Gram matrix is taken of the shorter side
        x = jnp.swapaxes(x, -1, -2)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    x = x.astype(dtype)

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)

    def step(_: int, x: jax.Array) -> jax.Array:
        gram = product(x, jnp.swapaxes(x, -1, -2))
        low = gram.astype(dtype)
        polynomial = b * gram + c * product(low, low)
        return (a * x.astype(jnp.float32) + product(polynomial.astype(dtype), x)).astype(dtype)

    x = jax.lax.fori_loop(0, steps, step, x).astype(jnp.float32)
    return jnp.swapaxes(x, -1, -2) if p > q else x
