"""Attention by kernels: the signatures of `ops.attention`, and the platform to run on."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import attention_forward
from pallas_kernels.attention_backward import attention_backward
from pallas_kernels.decode import attention_decode, decodes
from zaya_jax.ops.attention import Part
from zaya_jax.ops.names import MATMUL_OUTPUT

HEAD_SIZES = (16, 32, 64, 128, 256)


def attention_kernel(
    q_bshc: jax.Array,
    k_btkc: jax.Array,
    v_btkc: jax.Array,
    *,
    query_segments_bs: jax.Array | None = None,
    key_segments_bt: jax.Array | None = None,
    query_offset: jax.Array | int = 0,
    window: int | None = None,
    platform: str,
) -> jax.Array:
    """`ops.attention.attention` by kernels.

    A few queries, as a decode has them, are attended to by a kernel that splits the keys; where a gradient is asked
    for, by that of a forward pass. The gradient does not run the forward kernel again if output and logarithms of
    sums, named `MATMUL_OUTPUT`, are kept.

    Args:
      q_bshc: bf16 or fp32, as are keys and values; heads of 16, 32, 64, 128 or 256 channels.
      k_btkc: keys.
      v_btkc: values.
      query_segments_bs: as in `attention`.
      key_segments_bt: as in `attention`.
      query_offset: as in `attention`.
      window: as in `attention`.
      platform: of `pallas_kernels.launch`.

    Returns:
      [b, s, h, c] in the dtype of the queries. Sums and statistics are in fp32.

    Raises:
      ValueError: the dtypes, shapes or segments are not such.
    """
    if (query_segments_bs is None) != (key_segments_bt is None):
        raise ValueError("Segments of queries and of keys are given together or not at all.")
    _check(q_bshc, k_btkc, v_btkc, query_segments_bs, key_segments_bt)
    static = _Static(window, platform)
    return _attention(static, q_bshc, k_btkc, v_btkc, _segments(query_segments_bs, key_segments_bt),
                      jnp.asarray(query_offset, jnp.int32))  # fmt: skip


def attention_part_kernel(
    q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, query_segments_bs: jax.Array, key_segments_bt: jax.Array,
    query_offset: jax.Array | int, window: int | None, *, platform: str,
) -> Part:  # fmt: skip
    """`ops.attention.attention_part` by kernels: fp32, not differentiable.

    Raises:
      ValueError: as `attention_kernel`.
    """
    _check(q_bshc, k_btkc, v_btkc, query_segments_bs, key_segments_bt)
    segments, offset = _segments(query_segments_bs, key_segments_bt), jnp.asarray(query_offset, jnp.int32)
    run = attention_decode if decodes(q_bshc, k_btkc) else attention_forward
    return Part(*run(q_bshc, k_btkc, v_btkc, segments, offset, window=window, dtype=jnp.float32, platform=platform))


def attention_part_gradient_kernel(
    q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, query_segments_bs: jax.Array, key_segments_bt: jax.Array,
    query_offset: jax.Array | int, window: int | None, whole: Part, do_bshc: jax.Array, *, platform: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """`ops.attention.attention_part_gradient` by kernels: fp32.

    Raises:
      ValueError: as `attention_kernel`.
    """
    _check(q_bshc, k_btkc, v_btkc, query_segments_bs, key_segments_bt)
    segments, offset = _segments(query_segments_bs, key_segments_bt), jnp.asarray(query_offset, jnp.int32)
    return _gradient(_Static(window, platform), q_bshc, k_btkc, v_btkc, segments, offset, whole, do_bshc, jnp.float32)


class _Static(NamedTuple):
    window: int | None
    platform: str


def _segments(queries: jax.Array | None, keys: jax.Array | None) -> tuple[jax.Array, jax.Array] | None:
    if queries is None or keys is None:
        return None
    return queries.astype(jnp.int32), keys.astype(jnp.int32)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, q_seg: jax.Array | None, k_seg: jax.Array | None) -> None:
    if q.dtype not in (jnp.bfloat16, jnp.float32) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"The kernels of attention take queries, keys and values all of bfloat16 or all of float32, not {q.dtype}, "
            f"{k.dtype} and {v.dtype}."
        )
    b, s, h, c = q.shape
    if c not in HEAD_SIZES:
        raise ValueError(f"The kernels of attention take heads of {HEAD_SIZES} channels, not {c}.")
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (b, c) or h % k.shape[2]:
        raise ValueError(f"Queries {q.shape} do not fit keys {k.shape} and values {v.shape}.")
    if not (s and k.shape[1]):
        raise ValueError("The kernels of attention take at least one query and one key.")
    if q_seg is not None and k_seg is not None and (q_seg.shape, k_seg.shape) != (q.shape[:2], k.shape[:2]):
        raise ValueError(f"Segments {q_seg.shape} and {k_seg.shape} do not fit queries {q.shape} and keys {k.shape}.")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any,
               offset: jax.Array) -> jax.Array:  # fmt: skip
    run = attention_decode if decodes(q, k) else attention_forward
    return run(q, k, v, segments, offset, window=static.window, dtype=q.dtype, platform=static.platform)[0]


def _forward_rule(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any,
                  offset: jax.Array) -> tuple[jax.Array, Any]:  # fmt: skip
    o, lse = attention_forward(q, k, v, segments, offset, window=static.window, dtype=q.dtype, platform=static.platform)
    o, lse = checkpoint_name(o, MATMUL_OUTPUT), checkpoint_name(lse, MATMUL_OUTPUT)
    return o, (q, k, v, segments, offset, o, lse)


def _backward_rule(static: _Static, saved: Any, do: jax.Array) -> tuple[Any, ...]:
    q, k, v, segments, offset, o, lse = saved
    gradients = _gradient(static, q, k, v, segments, offset, Part(o, lse), do, q.dtype)
    return (*gradients, *jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (segments, offset)))


def _gradient(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, offset: jax.Array, whole: Part,
              do: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    delta = (do.astype(jnp.float32) * whole.o_bshc.astype(jnp.float32)).sum(-1)
    return attention_backward(q, k, v, segments, offset, whole.lse_bsh, delta, do.astype(q.dtype),
                              window=static.window, dtype=dtype, platform=static.platform)  # fmt: skip


_attention.defvjp(_forward_rule, _backward_rule)
