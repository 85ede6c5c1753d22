"""Causal grouped-query attention over packed sequences.

The reference processes blocks of keys (`ops.blockwise`). There are two sets of kernels to choose from, with one for the
forward pass and two for the gradient each; another one splits the keys for the few queries of a decode step.
Rematerialization does not rerun the forward kernel if its output and log-sum-exp, named `MATMUL_OUTPUT`, are saved.
Sums and statistics are in fp32.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import attention_forward
from pallas_kernels.attention_backward import attention_backward, backward_ranges
from pallas_kernels.attention_tiles import AttentionInputs
from pallas_kernels.decode import attention_decode, decodes
from pallas_kernels.tiles import Architecture, tile
from zaya_jax.config import ModelConfig
from zaya_jax.ops.blockwise import (
    FLOOR,
    MAX_QUERIES,
    backward,
    blockwise,
    few_queries,
    fold,
    fold_queries,
    forward,
    unfold,
)
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.operation import ROWS, Check, Input, Kernel, Operation, documents, other_dtypes

HEAD_SIZES = (16, 32, 64, 128, 256)


def attention(q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, **options: Any) -> jax.Array:
    """Causal attention of every query to the keys of its document (docs/reference.md §1.3).

    `options` are the other fields of `AttentionInputs`. Returns [b, s, h, c] in the dtype of the queries; softmax and
    sums are in fp32. Rows of padding are 0.
    """
    x = AttentionInputs(q_bshc, k_btkc, v_btkc, **options)
    if why := _other_segments(x):
        raise ValueError(why)
    x = with_segments(x)
    if q_bshc.shape[1] <= MAX_QUERIES:
        return few_queries(x)[0].astype(q_bshc.dtype)
    o_bkgsc: jax.Array = blockwise(*fold(x))
    return unfold(o_bkgsc, q_bshc.shape)


def _other_segments(x: AttentionInputs) -> str:
    """Return '' if there are segments of queries and keys, or neither, else a sentence."""
    both = (x.query_segments_bs is None) == (x.key_segments_bt is None)
    return "" if both else "Pass both query_segments_bs and key_segments_bt, or neither."


def with_segments(x: AttentionInputs) -> AttentionInputs:
    """Give each row one document if the inputs have none."""
    if x.query_segments_bs is not None:
        return x
    ones = (jnp.ones(array.shape[:2], jnp.int32) for array in (x.q_bshc, x.k_btkc))
    return dataclasses.replace(x, **dict(zip(("query_segments_bs", "key_segments_bt"), ones, strict=True)))


class PartialAttention(NamedTuple):
    """Attention to a part of the keys: the output `o_bshc`, and the log-sum-exp of the scores, `lse_bsh`.

    Both are fp32 (float64 for float64 inputs). A query that sees no key has output 0 and log-sum-exp `FLOOR`.
    `combine` merges two parts.
    """

    o_bshc: jax.Array
    lse_bsh: jax.Array


def partial_attention(x: AttentionInputs) -> PartialAttention:
    """Compute `attention` to some of the keys; not differentiable, see `partial_attention_gradient`.

    `query_offset` is negative if the keys come after the queries.
    """
    shape = x.q_bshc.shape
    if shape[1] <= MAX_QUERIES:
        return PartialAttention(*few_queries(x))
    o, lse = forward(*fold(x))
    return PartialAttention(unfold(o, shape), unfold(lse[..., None], (*shape[:3], 1))[..., 0])


def partial_attention_gradient(
    x: AttentionInputs, whole: PartialAttention, do_bshc: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the contribution of some of the keys to the gradients of q, k and v, in fp32.

    `whole` is the attention to all keys, `do_bshc` the gradient of its output.
    """
    blocks, folded = fold(x)
    num_kv, length = folded.k.shape[1], folded.q.shape[3]
    o, lse, do = (fold_queries(x, num_kv, length) for x in (whole.o_bshc, whole.lse_bsh[..., None], do_bshc))
    dq, dk, dv = backward(blocks, folded, o, lse[..., 0], do)
    t = x.k_btkc.shape[1]
    return unfold(dq, x.q_bshc.shape), dk[:, :, :t].transpose(0, 2, 1, 3), dv[:, :, :t].transpose(0, 2, 1, 3)


def combine(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Merge the attention to two disjoint parts of the keys."""
    lse = jnp.logaddexp(first.lse_bsh, second.lse_bsh)
    o = sum(part.o_bshc * jnp.exp(part.lse_bsh - lse)[..., None] for part in (first, second))
    return PartialAttention(jnp.asarray(o), lse)


# --- the kernels -----------------------------------------------------------------------------------------------


def _unsupported(_architecture: str, x: AttentionInputs, *_: Any) -> str:
    q, k, v, queries, keys = x.q_bshc, x.k_btkc, x.v_btkc, x.query_segments_bs, x.key_segments_bt
    if why := other_dtypes("attention", q, k, v):
        return why
    b, s, h, c = q.shape
    if c not in HEAD_SIZES:
        return f"The attention kernels support heads of {', '.join(map(str, HEAD_SIZES))} channels, not {c}."
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (b, c) or h % k.shape[2]:
        return f"Queries {q.shape} do not match keys {k.shape} and values {v.shape}."
    if not (s and k.shape[1]):
        return "The attention kernels need at least one query and one key."
    if queries is None or keys is None or (queries.shape, keys.shape) == (q.shape[:2], k.shape[:2]):
        return _other_segments(x)
    return f"Segments {queries.shape} and {keys.shape} do not match queries {q.shape} and keys {k.shape}."


class _Passes(NamedTuple):
    """The kernels of both passes, as in `pallas_kernels.attention` and `attention_backward`."""

    forward: Callable[..., tuple[jax.Array, jax.Array]] = attention_forward
    ranges: Callable[..., tuple[jax.Array, jax.Array]] = backward_ranges
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] = attention_backward


_Choose = Callable[[AttentionInputs, Architecture], _Passes]


def _triton(_x: AttentionInputs, _architecture: Architecture) -> _Passes:
    return _Passes()


def _mosaic(x: AttentionInputs, architecture: Architecture) -> _Passes:
    """Return the Mosaic kernels, or the others for queries or keys that are not whole tiles."""
    sizes = [tile(name, architecture, x.q_bshc.dtype).sizes for name in _MOSAIC_TILES]
    if any(x.q_bshc.shape[1] % queries or x.k_btkc.shape[1] % keys for queries, keys in sizes):
        return _Passes()
    from pallas_kernels import attention_mosaic, attention_mosaic_backward  # take longer to import than all others

    backward = attention_mosaic_backward
    return _Passes(attention_mosaic.attention_forward, backward.backward_ranges, backward.attention_backward)


def _attention_kernel(choose: _Choose, architecture: Architecture, *qkv: Any, **options: Any) -> jax.Array:
    return _attention(choose, architecture, integers(AttentionInputs(*qkv, **options)))


def _partial_kernel(choose: _Choose, architecture: Architecture, x: AttentionInputs) -> PartialAttention:
    return PartialAttention(*_forward(choose, architecture, integers(x), jnp.float32))


def _partial_gradient_kernel(
    choose: _Choose, architecture: Architecture, x: AttentionInputs, whole: PartialAttention, do_bshc: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x = integers(x)
    passes = choose(x, architecture)
    bounds = passes.ranges(x, architecture=architecture)
    return gradient(architecture, x, bounds, whole, do_bshc, jnp.float32, passes.backward)


def integers(x: AttentionInputs) -> AttentionInputs:
    """Convert segments (or None) and offset to int32."""
    integers = (x.query_segments_bs, x.key_segments_bt, jnp.asarray(x.query_offset, jnp.int32))
    queries, keys, offset = jax.tree.map(lambda integer: integer.astype(jnp.int32), integers)
    return dataclasses.replace(x, query_segments_bs=queries, key_segments_bt=keys, query_offset=offset)


def _forward(
    choose: _Choose, architecture: Architecture, x: AttentionInputs, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    run = attention_decode if decodes(x) else choose(x, architecture).forward
    return run(x, dtype=dtype, architecture=architecture)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(choose: _Choose, architecture: Architecture, x: AttentionInputs) -> jax.Array:
    return _forward(choose, architecture, x, x.q_bshc.dtype)[0]


def _forward_rule(choose: _Choose, architecture: Architecture, x: AttentionInputs) -> tuple[jax.Array, Any]:
    passes = choose(x, architecture)
    o, lse = passes.forward(x, dtype=x.q_bshc.dtype, architecture=architecture)
    bounds = passes.ranges(x, architecture=architecture)
    # The bounds are the same for all layers: saved, they are computed once, before the loop over layers.
    o, lse, bounds = checkpoint_name((o, lse, bounds), MATMUL_OUTPUT)
    return o, (x, bounds, PartialAttention(o, lse))


def _backward_rule(choose: _Choose, architecture: Architecture, saved: Any, do: jax.Array) -> tuple[AttentionInputs]:
    x, bounds, whole = saved
    gradients = gradient(architecture, x, bounds, whole, do, x.q_bshc.dtype, choose(x, architecture).backward)
    return (AttentionInputs(*gradients, query_offset=None, window=x.window),)  # None means zero


def gradient(
    architecture: Architecture, x: AttentionInputs, bounds: Any, whole: PartialAttention, do: jax.Array, dtype: Any,
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] = attention_backward,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Compute the gradients of queries, keys and values with kernels; `bounds` are the `backward_ranges` of these."""
    delta = (do.astype(jnp.float32) * whole.o_bshc.astype(jnp.float32)).sum(-1)
    saved = do.astype(x.q_bshc.dtype), whole.lse_bsh, delta
    return backward(x, bounds, saved, dtype=dtype, architecture=architecture)


_attention.defvjp(_forward_rule, _backward_rule)


# --- the checks ------------------------------------------------------------------------------------------------


def _checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(window: int | None, attention: Callable[..., jax.Array], *qkv: jax.Array) -> jax.Array:
        segments = documents(qkv[0].shape[0])
        return attention(*qkv, query_segments_bs=segments, key_segments_bt=segments, window=window)

    def decode(attention: Callable[..., jax.Array], *qkv: jax.Array) -> jax.Array:
        x = _decoded(*qkv)
        return attention(*qkv, query_segments_bs=x.query_segments_bs, key_segments_bt=x.key_segments_bt,
                         query_offset=x.query_offset)  # fmt: skip

    token, queries, keys = _heads(model)
    checks = {name: Check(functools.partial(run, window), (queries, keys, keys), 3)
              for name, window in (("attention", None), ("attention, window", 100))}  # fmt: skip
    if not training:
        checks["attention, decode"] = Check(decode, (token, keys, keys), 3, gradient=False)
    return checks


def _packed(*qkv: Any) -> AttentionInputs:
    """Return the inputs of a check with several documents a row."""
    segments = documents(qkv[0].shape[0])
    return AttentionInputs(*qkv, query_segments_bs=segments, key_segments_bt=segments)


def _decoded(q: jax.Array, k: jax.Array, v: jax.Array) -> AttentionInputs:
    """Return the inputs of a check with one query a row."""
    segments, place = documents(q.shape[0]), 349
    return AttentionInputs(q, k, v, segments[:, [place]], segments, place)


def _heads(model: ModelConfig) -> tuple[Input, Input, Input]:
    """Return the shapes of one query a row, of queries and of keys."""
    sizes = ((1, model.num_query_heads), (ROWS, model.num_query_heads), (ROWS, model.num_kv_heads))
    token, queries, keys = (Input((2, *size, model.head_dim)) for size in sizes)
    return token, queries, keys


def _partial_checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(partial_attention: Callable[..., PartialAttention], *qkv: jax.Array) -> tuple[jax.Array, ...]:
        o, lse = partial_attention(_packed(*qkv))
        return o, jnp.where(lse > FLOOR / 2, lse, 0)

    def decode(partial_attention: Callable[..., PartialAttention], *qkv: jax.Array) -> tuple[jax.Array, ...]:
        return partial_attention(_decoded(*qkv))

    token, queries, keys = _heads(model)
    if training:
        return {"partial_attention": Check(run, (queries, keys, keys), 3, gradient=False)}
    return {"partial_attention, decode": Check(decode, (token, keys, keys), 3, gradient=False)}


def _partial_gradient_checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(gradient: Callable[..., Any], *arrays: jax.Array) -> Any:
        x = _packed(*arrays[:3])
        return gradient(x, partial_attention(x), arrays[3])

    _, queries, keys = _heads(model)
    check = Check(run, (queries, keys, keys, queries), 4, gradient=False)
    return {"partial_attention_gradient": check} if training else {}


def _shape(x: AttentionInputs, *_: Any) -> tuple[int, ...]:
    q, k = x.q_bshc, x.k_btkc
    return min(q.shape[1], x.window or q.shape[1]), q.shape[2], k.shape[2], q.shape[3]


_TILES = "attention", "decode", "attention_backward_keys", "attention_backward_queries"
_MOSAIC_TILES = "attention_mosaic", "attention_mosaic_keys", "attention_mosaic_queries"


def _mosaic_unsupported(architecture: str, x: AttentionInputs, *rest: Any) -> str:
    (*_, h, c), num_kv, dtype = x.q_bshc.shape, x.k_btkc.shape[2], jnp.dtype(x.q_bshc.dtype)
    if why := _unsupported(architecture, x, *rest):
        return why
    if architecture != "sm_90":
        return f"The Mosaic kernels of attention are for sm_90 (H100, H200), not {architecture}."
    if dtype != jnp.bfloat16:
        return f"The Mosaic kernels of attention need bfloat16, not {dtype.name}."
    if c not in (64, 128):
        return f"The Mosaic kernels of attention support heads of 64 or 128 channels, not {c}."
    if h // num_kv % 2:
        return f"The Mosaic kernels of attention need an even number of query heads per key head, not {h // num_kv}."
    return ""


def _from_inputs(function: Callable[..., Any], architecture: str, *qkv: Any, **options: Any) -> Any:
    return function(architecture, AttentionInputs(*qkv, **options))


def _attention_shape(*qkv: Any, **options: Any) -> tuple[int, ...]:
    return _shape(AttentionInputs(*qkv, **options))


def _kernels(run: Callable[..., Any], adapt: Callable[..., Any] = lambda f: f) -> tuple[Kernel, ...]:
    """Return the kernels of an operation; `adapt` makes what says why inputs are unsupported take its arguments."""
    triton = Kernel("pallas", functools.partial(run, _triton), adapt(_unsupported), _TILES)
    mosaic = functools.partial(run, _mosaic)
    return triton, Kernel("mosaic", mosaic, adapt(_mosaic_unsupported), (*_MOSAIC_TILES, "decode"), ("cuda",))


_KERNELS = _kernels(_attention_kernel, lambda function: functools.partial(_from_inputs, function))
ATTENTION = Operation("attention", attention, _checks, _KERNELS, shape=_attention_shape)


def _partial(reference: Callable[..., Any], checks: Callable[..., Any], run: Callable[..., Any]) -> Operation:
    name: str = reference.__name__  # pyright: ignore[reportFunctionMemberAccess]
    return Operation(name, reference, checks, _kernels(run), shape=_shape, measured_as="attention")


PARTIAL_ATTENTIONS = (
    _partial(partial_attention, _partial_checks, _partial_kernel),
    _partial(partial_attention_gradient, _partial_gradient_checks, _partial_gradient_kernel),
)
