"""Grouped matmul: rows sorted by group times the matrix of their group, dropless for any group sizes.

Group e has `sizes_e[e]` consecutive rows. Rows past the sum of the sizes (skip, padding) are ignored and give zeros.
The product and its two gradients are separate operations, each with its own kernel. The references loop over blocks of
rows to do only the necessary work; `jax.lax.ragged_dot` multiplies every row by every matrix on CPUs and on most GPUs.
"""

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_matmul as kernels
from pallas_kernels.tiles import Architecture
from zaya_jax.config import ModelConfig
from zaya_jax.ops.operation import ROWS, Check, Input, Kernel, Operation, other_dtypes
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.stacked import Matrices, in_stack, matrix_gradient

# Sizes of blocks, descending, for up to so many rows in all. XLA:CPU sums products of few rows in another order. Up to
# `ONE_SIZE` rows, which can be of as many requests, a row's result may not depend on the number that chose its expert.
ONE_SIZE = 256
ROW_BLOCKS = {ONE_SIZE: (16,), 512: (128, 64, 48, 32, 16), 2**31: (256, 128, 64)}
OUTER_BLOCKS = (256, 64)
Product = Callable[..., jax.Array]


def grouped_product(x_tp: jax.Array, w_epq: Matrices, sizes_e: jax.Array) -> jax.Array:
    """Compute `x_tp[rows of e] @ w_epq[e]` for every group e; not differentiable.

    `x_tp` are float rows sorted by group, `w_epq` one matrix for each group (here and below also a `StackedLayer`),
    `sizes_e` the int32 numbers of rows of the groups, whose sum is at most t. Returns [t, q] in the dtype of `x_tp`,
    sums in fp32; zero in rows past the groups.
    """
    matrices = in_stack(w_epq)
    return _blocks_times_matrix(x_tp, matrices.stack, matrices.layer, sizes_e)


def grouped_product_transposed(x_tq: jax.Array, w_epq: Matrices, sizes_e: jax.Array) -> jax.Array:
    """Compute `x_tq[rows of e] @ w_epq[e].T` for every group e, [t, p]; otherwise like `grouped_product`."""
    matrices = in_stack(w_epq)
    return _blocks_times_matrix(x_tq, matrices.stack, matrices.layer, sizes_e, transpose=True)


def grouped_outer(
    x_tp: jax.Array, y_tq: jax.Array, sizes_e: jax.Array, *, total_lepq: jax.Array | None = None, layer: Any = 0
) -> jax.Array:
    """Compute `x_tp[rows of e].T @ y_tq[rows of e]` for every group e, with rows sorted by group.

    Returns [1, e, p, q] in the dtype of `x_tp`, sums in fp32; with `total_lepq`, the fp32 sum of the gradients of all
    layers, its sum with the result in the layer of that index.
    """
    if total_lepq is not None:
        return _add_outer_products(x_tp, y_tq, sizes_e, total_lepq, layer)
    zeros = jnp.zeros((1, len(sizes_e), x_tp.shape[1], y_tq.shape[1]), accumulation_dtype(x_tp.dtype))
    return _add_outer_products(x_tp, y_tq, sizes_e, zeros, 0).astype(x_tp.dtype)


def grouped_matmul(x_tp: jax.Array, w_epq: Matrices, sizes_e: jax.Array, **implementations: Product) -> jax.Array:
    """Differentiable `grouped_product`; takes implementations of the three operations by name, or uses these here."""
    references = (grouped_product, grouped_product_transposed, grouped_outer)
    products = {reference.__name__: reference for reference in references} | implementations
    if len(products) > len(references):
        raise TypeError(f"grouped_matmul takes {[*products][:3]}, not {[*implementations]}")
    return _grouped_matmul(tuple(products.values()), x_tp, w_epq, sizes_e)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(products: tuple[Product, ...], x_tp: jax.Array, w_epq: Matrices, sizes_e: jax.Array) -> jax.Array:
    return products[0](x_tp, w_epq, sizes_e)


def _forward(products: tuple[Product, ...], x_tp: jax.Array, w_epq: Matrices, sizes_e: jax.Array) -> tuple[Any, Any]:
    return products[0](x_tp, w_epq, sizes_e), (x_tp, w_epq, sizes_e)


def _backward(products: tuple[Product, ...], saved: Any, dout_tq: jax.Array) -> tuple[Any, ...]:
    x_tp, w_epq, sizes_e = saved
    dx_tp = products[1](dout_tq, w_epq, sizes_e)
    dw_epq = matrix_gradient(functools.partial(products[2], x_tp, dout_tq, sizes_e), w_epq)
    return dx_tp, dw_epq, None  # None means zero


_grouped_matmul.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames="transpose")
def _blocks_times_matrix(
    x_tp: jax.Array, w_lepq: jax.Array, layer: jax.Array | int, sizes_e: jax.Array, transpose: bool = False
) -> jax.Array:
    equation = "tq,pq->tp" if transpose else "tp,pq->tq"
    rows, width = x_tp.shape[0], w_lepq.shape[2 if transpose else 3]

    def one_block(out: jax.Array, group: jax.Array, first: jax.Array, inside: jax.Array) -> jax.Array:
        x, sums = jax.lax.dynamic_slice_in_dim(x_tp, first, inside.shape[0]), accumulation_dtype(out.dtype)
        part = jnp.einsum(equation, x, w_lepq[layer, group], preferred_element_type=sums).astype(out.dtype)
        old = jax.lax.dynamic_slice_in_dim(out, first, inside.shape[0])
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(inside[:, None], part, old), first, 0)

    return _over_blocks(one_block, jnp.zeros((rows, width), x_tp.dtype), sizes_e, rows, _covering_blocks(rows))


@jax.jit
def _add_outer_products(
    x_tp: jax.Array, dout_tq: jax.Array, sizes_e: jax.Array, total_lepq: jax.Array, layer: jax.Array | int
) -> jax.Array:
    x_pt = x_tp.T  # transposed once here instead of in each block's matmul
    rows = x_tp.shape[0]

    def one_block(total: jax.Array, group: jax.Array, first: jax.Array, inside: jax.Array) -> jax.Array:
        rows_pt = jnp.where(inside, jax.lax.dynamic_slice_in_dim(x_pt, first, inside.shape[0], 1), 0)
        dout = jax.lax.dynamic_slice_in_dim(dout_tq, first, inside.shape[0])
        dw = jnp.einsum("pt,tq->pq", rows_pt, dout, preferred_element_type=total.dtype)
        return total.at[layer, group].add(dw)

    large, small = OUTER_BLOCKS
    return _over_blocks(one_block, total_lepq, sizes_e, rows, [(large, large - 1), (small, 0)])


def _covering_blocks(rows: int) -> list[tuple[int, int]]:
    """Return blocks of which one covers the rest of a group: each product has a fixed cost, as has each extra row."""
    sizes = next(sizes for most, sizes in ROW_BLOCKS.items() if rows <= most)
    return list(zip(sizes, (*sizes[1:], 0), strict=True))


def _over_blocks(
    body: Callable[..., Any], carry: Any, sizes_e: jax.Array, rows: int, blocks: Iterable[tuple[int, int]]
) -> Any:
    """Call `body(carry, group, first row of a block, mask of the group's rows)` over the rows of all groups.

    `blocks` are sizes, descending, each with the most rows of a group that it leaves to smaller ones. Each size is
    compiled.
    """
    # XLA:CPU cannot multiply bf16 in a loop that it has unrolled, since constant sizes tell that it runs once.
    sizes_e = jax.lax.optimization_barrier(sizes_e)
    starts_e, done_e = jnp.cumsum(sizes_e) - sizes_e, jnp.zeros_like(sizes_e)
    for size, rest in blocks:
        if rest >= rows:
            continue
        block = min(size, rows)
        count_e = (jnp.maximum(sizes_e - done_e - rest, 0) + block - 1) // block
        ends_e, first_e = jnp.cumsum(count_e), starts_e + done_e

        def one(
            index: jax.Array, carry: Any, block: int = block, count_e: jax.Array = count_e,
            ends_e: jax.Array = ends_e, first_e: jax.Array = first_e,
        ) -> Any:  # fmt: skip
            group = (ends_e <= index).sum()
            # A block past the last row is moved back; the mask excludes rows of the block before.
            next_row = first_e[group] + (index - ends_e[group] + count_e[group]) * block
            first = jnp.minimum(next_row, rows - block)
            row = first + jnp.arange(block)
            return body(carry, group, first, (row >= next_row) & (row < starts_e[group] + sizes_e[group]))

        carry = jax.lax.fori_loop(0, ends_e[-1], one, carry)
        done_e += count_e * block
    return carry


# --- the kernels -----------------------------------------------------------------------------------------------


def _unsupported(inner: int, _architecture: str, x: jax.Array, w: Matrices, sizes: jax.Array) -> str:
    """Return why the kernel does not support the arguments, or ''; `inner` is the contracted axis of the matrices."""
    if reason := other_dtypes("grouped products", x, w):
        return reason
    if x.ndim == 2 and len(w.shape) == 3 and sizes.shape == w.shape[:1] and x.shape[1] == w.shape[inner]:
        return ""
    shapes = f"{x.shape}, {w.shape} and {sizes.shape}"
    return f"The grouped-matmul kernels need rows [t, p], matrices [e, p, q] and sizes [e], not {shapes}."


def _outer_unsupported(_architecture: str, x: jax.Array, y: jax.Array, _sizes: jax.Array, **_into: Any) -> str:
    return other_dtypes("grouped products", x, y)


def _kernel(
    transpose: bool, architecture: Architecture, x: jax.Array, w_epq: Matrices, sizes_e: jax.Array
) -> jax.Array:
    return kernels.grouped_product(x, in_stack(w_epq).pair, sizes_e, transpose, architecture=architecture)


def _hipblaslt(
    transpose: bool, _architecture: Architecture, x: jax.Array, w_epq: Matrices, sizes_e: jax.Array
) -> jax.Array:
    """Use hipBLASLt's grouped matmul, to which XLA compiles this `ragged_dot` with a result in bf16 for gfx942."""
    matrices, contracted = in_stack(w_epq), 2 if transpose else 1
    axes = jax.lax.RaggedDotDimensionNumbers((((1,), (contracted,)), ((), ())), [0], [0])
    out = jax.lax.ragged_dot_general(x, matrices.stack[matrices.layer], sizes_e, axes)
    # It may leave rows past the groups unwritten.
    return jnp.where((jnp.arange(len(x)) < sizes_e.sum())[:, None], out, 0)


def _hipblaslt_outer(
    _architecture: Architecture, x: jax.Array, y: jax.Array, sizes_e: jax.Array, *, total_lepq: Any = None,
    layer: Any = 0,
) -> jax.Array:  # fmt: skip
    """Use hipBLASLt; rounds the result before it adds it to the total, since XLA has no such kernel in fp32."""
    axes = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    out = jax.lax.ragged_dot_general(x, y, sizes_e, axes)
    # It may leave the matrices of empty groups unwritten.
    out = jnp.where((sizes_e > 0)[:, None, None], out, 0)
    return out[None] if total_lepq is None else total_lepq.at[layer].add(out.astype(total_lepq.dtype))


def _hipblaslt_unsupported(
    general: Callable[..., str], architecture: str, x: jax.Array, *others: Any, **into: Any
) -> str:
    """Refuse whatever XLA would compile to a product of every row with every matrix."""
    if architecture != "gfx942" or x.dtype != jnp.bfloat16:
        return f"XLA uses hipBLASLt's grouped matmul for bfloat16 on gfx942, not for {x.dtype} on {architecture}."
    xla, of_jax = "xla_gpu_experimental_use_ragged_dot_grouped_gemm", "jax_ragged_dot_use_ragged_dot_instruction"
    flags = os.environ.get("XLA_FLAGS", "").lower()
    if any(f"{xla}={no}" in flags for no in ("false", "0")) or not getattr(jax.config, of_jax, False):
        return f"hipBLASLt's grouped matmul needs XLA's flag {xla} and jax's setting {of_jax}, one of which is off."
    return general(architecture, x, *others, **into)


def _outer_kernel(architecture: Architecture, *arrays: Any, **into: Any) -> jax.Array:
    return kernels.grouped_outer(*arrays, architecture=architecture, **into)


# --- the checks ------------------------------------------------------------------------------------------------


def split(groups: int, rows: int) -> np.ndarray:
    """Split rows into groups for a check: 30 % to the first, none to the last, 10 % to no group; int32 [groups]."""
    shares = [0.3, *[0.6 / max(groups - 2, 1)] * (groups - 2), 0.0][:groups]
    return (np.array(shares) * rows).astype(np.int32)


def _inputs(model: ModelConfig) -> tuple[Input, Input, Input]:
    """Return rows of width d, rows of width 2f, and the matrices between them."""
    d, f = model.hidden_size, 2 * model.expert_size
    return Input((ROWS, d)), Input((ROWS, f)), Input((min(model.num_experts, 4), d, f), d**-0.5)


def _operation(
    reference: Product,
    arrays: tuple[int, int],
    kernel: Callable[..., Any],
    supports: Callable[..., str],
    *further: Kernel,
) -> Operation:
    """Make one of the three operations; `arrays` are the indices of `_inputs` that its check takes."""
    name: str = reference.__name__  # pyright: ignore[reportFunctionMemberAccess]

    def checks(model: ModelConfig, _training: bool) -> dict[str, Check]:
        def run(product: Product, x: jax.Array, y: jax.Array) -> jax.Array:
            return product(x, y, jnp.asarray(split(min(model.num_experts, 4), ROWS) * (x.shape[0] // ROWS)))

        inputs = tuple(_inputs(model)[index] for index in arrays)
        return {name: Check(run, inputs, sum(x.shape[0] == ROWS for x in inputs), gradient=False)}

    return Operation(name, reference, checks, (Kernel("pallas", kernel, supports, (name,)), *further), shape=_shape)


def _shape(x: jax.Array, _y: Any, sizes: jax.Array, **_: Any) -> tuple[int, ...]:
    return (max(x.shape[0] // sizes.shape[0], 1),)


def _times_matrices(reference: Product, transpose: bool) -> Operation:
    kernel, supports = functools.partial(_kernel, transpose), functools.partial(_unsupported, 1 + transpose)
    vendor = _by_hipblaslt(functools.partial(_hipblaslt, transpose), supports)
    return _operation(reference, (transpose, 2), kernel, supports, vendor)


def _by_hipblaslt(run: Callable[..., jax.Array], supports: Callable[..., str]) -> Kernel:
    return Kernel("hipblaslt", run, functools.partial(_hipblaslt_unsupported, supports), (), platforms=("rocm",))


_OUTER = _by_hipblaslt(_hipblaslt_outer, _outer_unsupported)
GROUPED_PRODUCTS = (
    _times_matrices(grouped_product, False),
    _times_matrices(grouped_product_transposed, True),
    _operation(grouped_outer, (0, 1), _outer_kernel, _outer_unsupported, _OUTER),
)
