"""`grouped_matmul` by kernels: the product, and one launch for each gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import grouped_outer, grouped_product

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def grouped_matmul_kernel(x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array, *, platform: str) -> jax.Array:
    """As `ops.grouped_matmul.grouped_matmul`.

    Args:
      x_tp: rows sorted by group, bf16 or fp32.
      w_epq: one matrix a group, of the same dtype.
      sizes_e: int32 rows of each group; their sum is at most t.
      platform: 'cuda', 'rocm' or 'interpret'.

    Returns:
      [t, q] in the dtype of `x_tp`, sums in fp32; zero in rows past the groups.

    Raises:
      ValueError: dtypes are others, or differ; or shapes do not fit.
    """
    check_dtypes(x_tp, w_epq)
    if x_tp.ndim != 2 or w_epq.ndim != 3 or sizes_e.shape != w_epq.shape[:1] or x_tp.shape[1] != w_epq.shape[1]:
        raise ValueError(
            "A grouped product takes rows [t, p], matrices [e, p, q] and sizes [e], "
            f"not {x_tp.shape}, {w_epq.shape} and {sizes_e.shape}."
        )
    return _product(platform, x_tp, w_epq, sizes_e)


def check_dtypes(*arrays: jax.Array) -> None:
    """ValueError unless all are bf16, or all fp32."""
    found = [jnp.dtype(array.dtype) for array in arrays]
    if found[0] not in DTYPES or len(set(found)) > 1:
        names = ", ".join(dtype.name for dtype in found)
        raise ValueError(f"The kernel of grouped products multiplies bfloat16 or float32, of one dtype, not {names}.")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(platform: str, x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array) -> jax.Array:
    return grouped_product(x_tp, w_epq, sizes_e, platform=platform)


def _forward(platform: str, x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array) -> tuple[jax.Array, Any]:
    return _product(platform, x_tp, w_epq, sizes_e), (x_tp, w_epq, sizes_e)


def _backward(platform: str, saved: Any, dout_tq: jax.Array) -> tuple[Any, ...]:
    x_tp, w_epq, sizes_e = saved
    dx_tp = grouped_product(dout_tq, w_epq, sizes_e, transpose=True, platform=platform)
    dw_epq = grouped_outer(x_tp, dout_tq, sizes_e, dtype=w_epq.dtype, platform=platform)
    return dx_tp, dw_epq, np.zeros(sizes_e.shape, jax.dtypes.float0)


_product.defvjp(_forward, _backward)
