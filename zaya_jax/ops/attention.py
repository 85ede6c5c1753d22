"""Causal grouped-query attention over packed sequences.

The reference processes blocks of keys (`ops.blockwise`). There is one kernel for the forward pass, one that splits the
keys for the few queries of a decode step, and two for the gradient. Rematerialization does not rerun the forward kernel
if its output and log-sum-exp, named `MATMUL_OUTPUT`, are saved. Sums and statistics are in fp32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import attention_forward
from pallas_kernels.attention_backward import attention_backward, backward_ranges
from pallas_kernels.decode import attention_decode, decodes
from pallas_kernels.tiles import Architecture
from zaya_jax.config import ModelConfig
from zaya_jax.ops.blockwise import FLOOR, backward, blockwise, fold, fold_queries, forward, unfold
from zaya_jax.ops.few_queries import MAX_QUERIES, few_queries
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.operation import ROWS, Check, Input, Kernel, Operation, documents, other_dtypes

HEAD_SIZES = (16, 32, 64, 128, 256)


def attention(
    q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, *, query_segments_bs: jax.Array | None = None,
    key_segments_bt: jax.Array | None = None, query_offset: jax.Array | int = 0, window: int | None = None,
) -> jax.Array:  # fmt: skip
    """Causal attention of every query to the keys of its document (docs/reference.md §1.3).

    Args:
      q_bshc: queries, float; the scale 1/√c is applied here.
      k_btkc: keys; each key head is shared by h / k query heads.
      v_btkc: values.
      query_segments_bs: int32 document of each query; 0 is padding, which attends to nothing. None, with
        `key_segments_bt`, for one document per row.
      key_segments_bt: int32 document of each key.
      query_offset: index of the first query among the keys; query i sees key j if j <= query_offset + i.
      window: number of keys that a query sees, its own included; None for all.

    Returns:
      [b, s, h, c] in the dtype of the queries; softmax and sums are in fp32. Rows of padding are 0.
    """
    if (query_segments_bs is None) != (key_segments_bt is None):
        raise ValueError("Pass both query_segments_bs and key_segments_bt, or neither.")
    if query_segments_bs is None or key_segments_bt is None:
        query_segments_bs = jnp.ones(q_bshc.shape[:2], jnp.int32)
        key_segments_bt = jnp.ones(k_btkc.shape[:2], jnp.int32)
    if q_bshc.shape[1] <= MAX_QUERIES:
        o, _ = few_queries(q_bshc, k_btkc, v_btkc, query_segments_bs, key_segments_bt, query_offset, window)
        return o.astype(q_bshc.dtype)
    blocks, q, k, v, q_seg, k_seg = fold(q_bshc, k_btkc, v_btkc, query_segments_bs, key_segments_bt, window)
    o_bkgsc: jax.Array = blockwise(blocks, q, k, v, q_seg, k_seg, jnp.asarray(query_offset, jnp.int32))
    return unfold(o_bkgsc, q_bshc.shape)


class PartialAttention(NamedTuple):
    """Attention to a part of the keys: the output `o_bshc`, and the log-sum-exp of the scores, `lse_bsh`.

    Both are fp32 (float64 for float64 inputs). A query that sees no key has output 0 and log-sum-exp `FLOOR`.
    `combine` merges two parts.
    """

    o_bshc: jax.Array
    lse_bsh: jax.Array


def partial_attention(
    q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, query_segments_bs: jax.Array, key_segments_bt: jax.Array,
    query_offset: jax.Array | int, window: int | None,
) -> PartialAttention:  # fmt: skip
    """Compute `attention` to some of the keys; not differentiable, see `partial_attention_gradient`.

    `query_offset` is negative if the keys come after the queries.
    """
    if q_bshc.shape[1] <= MAX_QUERIES:
        return PartialAttention(
            *few_queries(q_bshc, k_btkc, v_btkc, query_segments_bs, key_segments_bt, query_offset, window)
        )
    blocks, q, k, v, q_seg, k_seg = fold(q_bshc, k_btkc, v_btkc, query_segments_bs, key_segments_bt, window)
    o, lse = forward(blocks, q, k, v, q_seg, k_seg, jnp.asarray(query_offset, jnp.int32))
    return PartialAttention(unfold(o, q_bshc.shape), unfold(lse[..., None], (*q_bshc.shape[:3], 1))[..., 0])


def partial_attention_gradient(
    q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, query_segments_bs: jax.Array, key_segments_bt: jax.Array,
    query_offset: jax.Array | int, window: int | None, whole: PartialAttention, do_bshc: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Compute the contribution of some of the keys to the gradients of q, k and v, in fp32.

    The arguments are those of `partial_attention`, then the attention to all keys and the gradient of its output.
    """
    blocks, q, k, v, q_seg, k_seg = fold(q_bshc, k_btkc, v_btkc, query_segments_bs, key_segments_bt, window)
    o, lse, do = (fold_queries(x, k.shape[1], q.shape[3]) for x in (whole.o_bshc, whole.lse_bsh[..., None], do_bshc))
    saved = (q, k, v, q_seg, k_seg, jnp.asarray(query_offset, jnp.int32), o, lse[..., 0])
    dq, dk, dv = backward(blocks, saved, do)
    t = k_btkc.shape[1]
    return unfold(dq, q_bshc.shape), dk[:, :, :t].transpose(0, 2, 1, 3), dv[:, :, :t].transpose(0, 2, 1, 3)


def combine(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Merge the attention to two disjoint parts of the keys."""
    lse = jnp.logaddexp(first.lse_bsh, second.lse_bsh)
    o = sum(part.o_bshc * jnp.exp(part.lse_bsh - lse)[..., None] for part in (first, second))
    return PartialAttention(jnp.asarray(o), lse)


# --- the kernels -----------------------------------------------------------------------------------------------


def _unsupported(
    _architecture: str, q: jax.Array, k: jax.Array, v: jax.Array, query_segments_bs: jax.Array | None = None,
    key_segments_bt: jax.Array | None = None, *_: Any, **_options: Any,
) -> str:  # fmt: skip
    if why := other_dtypes("attention", q, k, v):
        return why
    b, s, h, c = q.shape
    if c not in HEAD_SIZES:
        return f"The attention kernels support heads of {', '.join(map(str, HEAD_SIZES))} channels, not {c}."
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (b, c) or h % k.shape[2]:
        return f"Queries {q.shape} do not match keys {k.shape} and values {v.shape}."
    if not (s and k.shape[1]):
        return "The attention kernels need at least one query and one key."
    if (query_segments_bs is None) != (key_segments_bt is None):
        return "Pass both query_segments_bs and key_segments_bt, or neither."
    if query_segments_bs is None or key_segments_bt is None:
        return ""
    fits = (query_segments_bs.shape, key_segments_bt.shape) == (q.shape[:2], k.shape[:2])
    return "" if fits else (f"Segments {query_segments_bs.shape} and {key_segments_bt.shape} do not match queries "
                            f"{q.shape} and keys {k.shape}.")  # fmt: skip


def _attention_kernel(
    architecture: Architecture, q: jax.Array, k: jax.Array, v: jax.Array, *, query_segments_bs: jax.Array | None = None,
    key_segments_bt: jax.Array | None = None, query_offset: jax.Array | int = 0, window: int | None = None,
) -> jax.Array:  # fmt: skip
    segments, offset = _integers(query_segments_bs, key_segments_bt, query_offset)
    return _attention(_Static(window, architecture), q, k, v, segments, offset)


def _partial_kernel(
    architecture: Architecture, q: jax.Array, k: jax.Array, v: jax.Array, query_segments_bs: jax.Array,
    key_segments_bt: jax.Array, query_offset: jax.Array | int, window: int | None,
) -> PartialAttention:  # fmt: skip
    integers = _integers(query_segments_bs, key_segments_bt, query_offset)
    run = attention_decode if decodes(q, k) else attention_forward
    return PartialAttention(*run(q, k, v, *integers, window=window, dtype=jnp.float32, architecture=architecture))


def _partial_gradient_kernel(
    architecture: Architecture, q: jax.Array, k: jax.Array, v: jax.Array, query_segments_bs: jax.Array,
    key_segments_bt: jax.Array, query_offset: jax.Array | int, window: int | None, whole: PartialAttention,
    do_bshc: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    integers = _integers(query_segments_bs, key_segments_bt, query_offset)
    bounds = backward_ranges(q, k, *integers, window=window, architecture=architecture)
    return _gradient(_Static(window, architecture), q, k, v, *integers, bounds, whole, do_bshc, jnp.float32)


class _Static(NamedTuple):
    window: int | None
    architecture: Architecture


def _integers(queries: jax.Array | None, keys: jax.Array | None, offset: jax.Array | int) -> tuple[Any, jax.Array]:
    """Convert segments (or None) and offset to int32."""
    segments = None if queries is None or keys is None else (queries.astype(jnp.int32), keys.astype(jnp.int32))
    return segments, jnp.asarray(offset, jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any,
               offset: jax.Array) -> jax.Array:  # fmt: skip
    run = attention_decode if decodes(q, k) else attention_forward
    return run(q, k, v, segments, offset, window=static.window, dtype=q.dtype, architecture=static.architecture)[0]


def _forward_rule(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any,
                  offset: jax.Array) -> tuple[jax.Array, Any]:  # fmt: skip
    o, lse = attention_forward(
        q, k, v, segments, offset, window=static.window, dtype=q.dtype, architecture=static.architecture
    )
    bounds = backward_ranges(q, k, segments, offset, window=static.window, architecture=static.architecture)
    # The bounds are the same for all layers: saved, they are computed once, before the loop over layers.
    o, lse, bounds = checkpoint_name((o, lse, bounds), MATMUL_OUTPUT)
    return o, (q, k, v, segments, offset, bounds, o, lse)


def _backward_rule(static: _Static, saved: Any, do: jax.Array) -> tuple[Any, ...]:
    q, k, v, segments, offset, bounds, o, lse = saved
    gradients = _gradient(static, q, k, v, segments, offset, bounds, PartialAttention(o, lse), do, q.dtype)
    return (*gradients, *jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (segments, offset)))


def _gradient(
    static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, offset: jax.Array,
    bounds: tuple[jax.Array, jax.Array], whole: PartialAttention, do: jax.Array, dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    delta = (do.astype(jnp.float32) * whole.o_bshc.astype(jnp.float32)).sum(-1)
    return attention_backward(q, k, v, segments, offset, bounds, whole.lse_bsh, delta, do.astype(q.dtype),
                              window=static.window, dtype=dtype, architecture=static.architecture)  # fmt: skip


_attention.defvjp(_forward_rule, _backward_rule)


# --- the checks ------------------------------------------------------------------------------------------------


def _checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(window: int | None, attention: Callable[..., jax.Array], *qkv: jax.Array) -> jax.Array:
        segments = documents(qkv[0].shape[0])
        return attention(*qkv, query_segments_bs=segments, key_segments_bt=segments, window=window)

    def decode(attention: Callable[..., jax.Array], *qkv: jax.Array) -> jax.Array:
        segments, place = documents(qkv[0].shape[0]), 349
        return attention(*qkv, query_segments_bs=segments[:, [place]], key_segments_bt=segments, query_offset=place)

    queries, keys = _heads(model)
    checks = {name: Check(functools.partial(run, window), (queries, keys, keys), 3)
              for name, window in (("attention", None), ("attention, window", 100))}  # fmt: skip
    if not training:
        token = Input((2, 1, *queries.shape[2:]))
        checks["attention, decode"] = Check(decode, (token, keys, keys), 3, gradient=False)
    return checks


def _heads(model: ModelConfig) -> tuple[Input, Input]:
    """Return the shapes of queries and keys."""
    heads = (model.num_query_heads, model.num_kv_heads)
    queries, keys = (Input((2, ROWS, number, model.head_dim)) for number in heads)
    return queries, keys


def _partial_checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(partial_attention: Callable[..., PartialAttention], *qkv: jax.Array) -> tuple[jax.Array, ...]:
        segments = documents(qkv[0].shape[0])
        o, lse = partial_attention(*qkv, segments, segments, 0, None)
        return o, jnp.where(lse > FLOOR / 2, lse, 0)

    def decode(partial_attention: Callable[..., PartialAttention], *qkv: jax.Array) -> tuple[jax.Array, ...]:
        segments, place = documents(qkv[0].shape[0]), 349
        return partial_attention(*qkv, segments[:, [place]], segments, place, None)

    queries, keys = _heads(model)
    if training:
        return {"partial_attention": Check(run, (queries, keys, keys), 3, gradient=False)}
    token = Input((2, 1, *queries.shape[2:]))
    return {"partial_attention, decode": Check(decode, (token, keys, keys), 3, gradient=False)}


def _partial_gradient_checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(gradient: Callable[..., Any], *arrays: jax.Array) -> Any:
        arguments: Any = (*arrays[:3], *(documents(arrays[0].shape[0]),) * 2, 0, None)
        return gradient(*arguments, partial_attention(*arguments), arrays[3])

    queries, keys = _heads(model)
    check = Check(run, (queries, keys, keys, queries), 4, gradient=False)
    return {"partial_attention_gradient": check} if training else {}


def _shape(
    q: jax.Array, k: jax.Array, _v: Any, _queries: Any = None, _keys: Any = None, _offset: Any = None,
    window: int | None = None, *_: Any, **options: Any,
) -> tuple[int, ...]:  # fmt: skip
    queries, seen = q.shape[1], options.get("window", window) or q.shape[1]
    return min(queries, seen), q.shape[2], k.shape[2], q.shape[3]


_FORWARD, _BACKWARD = ("attention", "decode"), ("attention_backward_keys", "attention_backward_queries")
ATTENTION = Operation(
    "attention", attention, _checks,
    (Kernel("pallas", _attention_kernel, _unsupported, (*_FORWARD, *_BACKWARD)),), shape=_shape,
)  # fmt: skip
PARTIAL_ATTENTION = Operation(
    "partial_attention", partial_attention, _partial_checks,
    (Kernel("pallas", _partial_kernel, _unsupported, (*_FORWARD, *_BACKWARD)),), shape=_shape, measured_as="attention",
)  # fmt: skip
PARTIAL_ATTENTION_GRADIENT = Operation(
    "partial_attention_gradient", partial_attention_gradient, _partial_gradient_checks,
    (Kernel("pallas", _partial_gradient_kernel, _unsupported, (*_FORWARD, *_BACKWARD)),), shape=_shape,
    measured_as="attention",
)  # fmt: skip
