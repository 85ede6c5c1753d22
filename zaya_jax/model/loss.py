"""Cross-entropy of the tied head in chunks of tokens, without materialising all logits.

The head takes a third or more of the model's FLOPs, and its logits would be the largest array (docs/reference.md §1.1).
To compute them only once, the forward rule of the `custom_vjp` already returns dh and dW, and the backward pass only
scales them. It must therefore be outside of every `jax.checkpoint`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.ops.parts import part
from zaya_jax.ops.precision import accumulation_dtype

Bias = jax.Array | None
CHUNK = 512  # tokens, at least: on CPUs with small models, longer chunks leave the cache
TRANSPOSED_BYTES = 1e8  # of the head, at most, to be copied once: CPUs then multiply faster in each chunk
LOGITS_BYTES = 2.2e9  # of a chunk's logits in fp32, at most: 2,048 tokens with the 8B's vocabulary
SAMPLED_VOCABULARY = 32_768  # tokens, at least: with fewer, CPUs find the largest logit faster than a condition
SAMPLE = 1024  # tokens of such a vocabulary whose largest logit is what exponentials are relative to
LARGEST_SUM = 1e30  # of exponentials relative to it: neither they nor their reciprocals leave the range of bf16


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def chunked_loss(
    hidden_td: jax.Array, head_vd: jax.Array, bias_v: Bias, targets_t: jax.Array, weights_t: jax.Array,
    frozen_head: bool = False, earlier: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Compute the weighted cross-entropy of `hidden_td @ head_vd.T + bias_v`.

    The hidden states are the output of the final norm, in the compute dtype, to which the head, of any float dtype, is
    cast. Targets are int32; weights are fp32, and 0 excludes a token. A `frozen_head` and bias need no gradient.

    Returns the sum over tokens, an fp32 scalar in nats, differentiable in `hidden_td`, `head_vd` and `bias_v`; and its
    terms, fp32 [t], which are not differentiable.

    `earlier` is a sum of earlier gradients of `head_vd`, in its dtype, which the gradient continues and so includes,
    and the head in the dtype of `hidden_td`: to clear a sum, add it and cast the head costs four passes over the head.
    """
    del frozen_head, earlier
    head_vd = head_vd.astype(hidden_td.dtype)  # once, not in each chunk

    def body(total: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        h, targets, weights = arrays
        loss, _, _ = _chunk_loss(_chunk_logits(h, head_vd, bias_v), targets, weights, hidden_td.dtype)
        return total + loss.sum(), loss

    zero = jnp.zeros((), accumulation_dtype(hidden_td.dtype))
    chunk = chunk_tokens(len(hidden_td), *head_vd.shape, frozen_head=True)
    with part("loss"):
        total, losses = jax.lax.scan(body, zero, _chunks(chunk, hidden_td, targets_t, weights_t))
    return total, losses.reshape(-1)[: hidden_td.shape[0]]


def chunk_tokens(tokens: int, vocab_size: int, width: int, frozen_head: bool) -> int:
    """Return the number of tokens in a chunk of `tokens`.

    If the head is trained, each chunk reads and writes all of dW, 8·v·d bytes, and its logits several times, about 14·v
    bytes per token. A chunk of d tokens or more makes the first the smaller part.
    """
    chunk = CHUNK if frozen_head else max(CHUNK, 1 << (width - 1).bit_length())
    while chunk > 1 and 4 * chunk * vocab_size > LOGITS_BYTES:
        chunk //= 2
    return min(chunk, tokens)


def _chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Reshape each array [t, …] to [chunks, chunk, …], padded with zeros."""
    pad = -arrays[0].shape[0] % chunk
    return tuple(jnp.pad(a, ((0, pad), *[(0, 0)] * (a.ndim - 1))).reshape(-1, chunk, *a.shape[1:]) for a in arrays)


def _chunk_logits(h_td: jax.Array, head: jax.Array, bias_v: Bias, axes: str = "vd") -> jax.Array:
    z_tv = jnp.einsum(f"td,{axes}->tv", h_td, head, preferred_element_type=accumulation_dtype(h_td.dtype))
    return z_tv if bias_v is None else z_tv + bias_v.astype(z_tv.dtype)


def _chunk_loss(
    z_tv: jax.Array, targets_t: jax.Array, weights_t: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the loss of each token, and its gradient in the logits as a product: rows in `dtype`, and their factors.

    Multiplying rows of v elements would be a second pass over the logits. The caller multiplies rows of d elements.
    """
    rows_tv, sum_t, reference_t = _exponentials(z_tv, dtype)
    right_t = jnp.take_along_axis(z_tv, targets_t[:, None], axis=-1)[:, 0]
    loss_t = weights_t * (reference_t - right_t + jnp.log(sum_t))
    exact_t = jnp.exp(right_t - reference_t) - sum_t
    rounded_t = exact_t.astype(dtype)
    rows_tv = rows_tv.at[jnp.arange(len(targets_t)), targets_t].set(rounded_t, unique_indices=True)
    # The target's element is most of a row's norm: its product with the factor is not rounded.
    factor_t = weights_t / sum_t * jnp.where(exact_t == 0, 1, exact_t / rounded_t)
    return loss_t, rows_tv, factor_t


def _exponentials(z_tv: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return exp(z - r) in `dtype`, its sum over the vocabulary, and r [t], in one pass over the logits.

    The largest logit as r would take another pass. That of a few tokens will do, unless others exceed it by 69 nats.
    """

    def relative_to_largest(sample: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        reference_t = z_tv[:, :sample].max(-1)
        e_tv = jnp.exp(z_tv - reference_t[:, None])
        return e_tv.astype(dtype), e_tv.sum(-1), reference_t

    vocab_size = z_tv.shape[1]
    if vocab_size < SAMPLED_VOCABULARY:
        return relative_to_largest(vocab_size)
    sampled = relative_to_largest(SAMPLE)
    suffices = (sampled[1] < LARGEST_SUM).all()
    return jax.lax.cond(suffices, lambda: sampled, lambda: relative_to_largest(vocab_size))


def chunked_logprobs(
    hidden_td: jax.Array, head_vd: jax.Array, bias_v: Bias, index_q: jax.Array, targets_q: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute log-probabilities of single tokens, without a gradient.

    The time is that of `count` queries, rounded up to whole chunks; the shapes do not depend on it. A query is an int32
    row of `hidden_td` and an int32 token, its target; what follows the first `count` is padding. Returns the fp32 [q]
    log-probability of each target in nats, and bool [q], whether it is the most likely token; zeros for padding.
    """
    chunk = chunk_tokens(len(index_q), *head_vd.shape, frozen_head=True)
    index_nc, targets_nc = _chunks(chunk, index_q, targets_q)
    head_vd = head_vd.astype(hidden_td.dtype)

    def body(i: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        z = _chunk_logits(hidden_td[index_nc[i]], head_vd, bias_v)
        targets = targets_nc[i]
        loss, _, _ = _chunk_loss(z, targets, jnp.ones((), z.dtype), z.dtype)
        return out[0].at[i].set(-loss), out[1].at[i].set(z.argmax(-1) == targets)

    start = jnp.zeros(index_nc.shape, accumulation_dtype(hidden_td.dtype)), jnp.zeros(index_nc.shape, bool)
    with part("loss"):
        logprobs, greedy = jax.lax.fori_loop(0, (count + chunk - 1) // chunk, body, start)
    return logprobs.reshape(-1)[: len(index_q)], greedy.reshape(-1)[: len(index_q)]


def _forward(*arguments: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    hidden_td, head_vd, bias_v, targets_t, weights_t, frozen_head, earlier = arguments
    v, d = head_vd.shape
    dtype, sums = hidden_td.dtype, accumulation_dtype(hidden_td.dtype)
    chunk = chunk_tokens(len(hidden_td), v, d, frozen_head)
    earlier_vd, head = (None, head_vd.astype(dtype)) if earlier is None else earlier  # cast once, not in each chunk
    axes = "vd"
    if head.nbytes <= TRANSPOSED_BYTES:
        head, axes = jax.lax.optimization_barrier(head.T), "dv"

    def body(carry: tuple[Any, ...], arrays: tuple[jax.Array, ...]) -> tuple[tuple[Any, ...], tuple[jax.Array, ...]]:
        total, dw_dv, db_v = carry
        h, h_dt, targets, weights = arrays
        loss, dz, factors = _chunk_loss(_chunk_logits(h, head, bias_v, axes), targets, weights, dtype)
        dh = factors[:, None] * jnp.einsum(f"tv,{axes}->td", dz, head, preferred_element_type=sums)
        h_dt = (h_dt * factors).astype(dtype)
        # This layout (vocabulary innermost) needs no transposes.
        dw_dv = None if dw_dv is None else dw_dv + jnp.einsum("dt,tv->dv", h_dt, dz, preferred_element_type=sums)
        db_v = None if db_v is None else db_v + (factors[:, None] * dz.astype(sums)).sum(0)
        return (total + loss.sum(), dw_dv, db_v), (dh.astype(dtype), loss)

    dw_dv = None
    if not frozen_head:
        dw_dv = jnp.zeros((d, v), sums) if earlier_vd is None else earlier_vd.T.astype(sums)
    db_v = None if frozen_head or bias_v is None else jnp.zeros(v, sums)
    start = jnp.zeros((), sums), dw_dv, db_v
    h, targets, weights = _chunks(chunk, hidden_td, targets_t, weights_t)
    with part("loss"):
        (total, dw_dv, db_v), (dh, losses) = jax.lax.scan(body, start, (h, h.swapaxes(1, 2), targets, weights))
    dh_td = dh.reshape(-1, d)[: hidden_td.shape[0]]
    # The barrier keeps XLA from fusing sum and transpose of a single chunk into a matmul that CPUs lack in bf16.
    dw_vd = None if dw_dv is None else jax.lax.optimization_barrier(dw_dv).T.astype(head_vd.dtype)
    db_v = None if bias_v is None or db_v is None else db_v.astype(bias_v.dtype)
    return (total, losses.reshape(-1)[: hidden_td.shape[0]]), (dh_td, dw_vd, db_v, weights_t, earlier_vd)


def _backward(_frozen_head: bool, saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    # The gradients of a frozen head are None, which means zero.
    g, _ = cotangents
    dh_td, dw_vd, db_v, weights_t, earlier_vd = saved
    no_weights = jnp.zeros_like(weights_t)  # targets and weights are data
    dh_td, dw_scaled_vd, db_v = (None if x is None else (x * g).astype(x.dtype) for x in (dh_td, dw_vd, db_v))
    if earlier_vd is not None:  # compiled to `dw_vd`, as g is a constant 1 where the loss is what is differentiated
        dw_scaled_vd = jnp.where(g == 1, dw_vd, dw_scaled_vd + (earlier_vd * (1 - g)).astype(dw_vd.dtype))
    return dh_td, dw_scaled_vd, db_v, None, no_weights, None


chunked_loss.defvjp(_forward, _backward)
