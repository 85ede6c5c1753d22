"""The mixing step of CCA: from packed projections to the queries, keys and values of attention.

Two convolutions run along the sequence over the `n = h + k` heads of queries and keys, without a nonlinearity between
them. For each token, inputs before the start of its document count as 0, so that the depthwise output there is its bias
(docs/reference.md §1.3), and packed documents give exactly the results of separate ones.

Of two kernels, `pallas` has a program for each key head, and `pallas_by_head` for each head. Both compute the gradient
from the results, which attention saves, too. If rematerialization saves these, named `MATMUL_OUTPUT`, the forward
kernel does not run again. RoPE tables get no gradient, since they depend on positions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.cca_mix import MixArrays
from pallas_kernels.cca_mix import cca_mix as mix_forward
from pallas_kernels.cca_mix_backward import cca_mix_backward
from pallas_kernels.cca_mix_by_head import cca_mix_by_head
from pallas_kernels.cca_mix_step import cca_mix_step as step_kernel
from pallas_kernels.tiles import Architecture
from zaya_jax.config import ModelConfig
from zaya_jax.ops.cached_attention import count_kept, last_rows, write_slots
from zaya_jax.ops.names import MATMUL_OUTPUT, recomputed
from zaya_jax.ops.operation import ROWS, Check, Input, Kernel, Operation, documents, other_dtypes
from zaya_jax.ops.precision import accumulation_dtype

_MOST_ROWS = 8  # of the halo: half of the smallest tile; more would be read repeatedly


class MixParts(NamedTuple):
    """Which parts of the mix an ablation keeps."""

    query_key_mean: bool = True
    value_shift: bool = True


ALL_PARTS = MixParts()


class MixWeights(NamedTuple):
    """Parameters of the mix. With zero taps, it applies neither convolutions nor their biases."""

    depthwise_wnc: jax.Array  # [k0, n, c]; tap w acts on the token k0 − 1 − w back
    depthwise_bias_nc: jax.Array  # [n, c]
    grouped_wncc: jax.Array  # [k1, n, c in, c out], with taps in the same order
    grouped_bias_nc: jax.Array  # [n, c]
    temperature_k: jax.Array  # [k], scales the keys


class Halo(NamedTuple):
    """The rows before the first token of this device's piece of the sequence."""

    u_bwnc: jax.Array  # the last k0 + k1 − 2 rows of the packed query and key projections
    segments_bw: jax.Array  # int32 segment ids of these rows; 0 before the start of the sequence and in padding
    delayed_b1x: jax.Array  # the last row of the delayed value projection


def unpacked(packed_bsy: jax.Array, heads: int, kv_heads: int, channels: int) -> tuple[jax.Array, ...]:
    """Split the packed projection, whose channels are those of the n heads, then both halves of the value.

    Returns heads [b, s, n, c], those of queries first; the half of the value that is this token's, and the half that
    the next token uses, [b, s, k·c / 2] each.
    """
    half = kv_heads * channels // 2
    u_bsx, current_bsx, delayed_bsx = jnp.split(packed_bsy, [heads * channels, heads * channels + half], axis=-1)
    return u_bsx.reshape(*packed_bsy.shape[:2], heads, channels), current_bsx, delayed_bsx


class MixInputs(NamedTuple):
    """Inputs of the mix."""

    packed_bsy: jax.Array  # the packed projection, see `unpacked`
    halo: Halo | None  # the rows before the first token; None if it is the first of the sequence
    segments_bs: jax.Array  # int32 document of each token
    rotary: tuple[jax.Array, jax.Array]  # cos and sin, [b, s, rotated channels / 2] each, fp32
    weights: MixWeights
    delayed_start_x: jax.Array | None = None  # delayed value at the start of a document; None for zero


Heads = tuple[jax.Array, jax.Array, jax.Array]  # queries, keys and values
Stepped = tuple[jax.Array, tuple[jax.Array, ...]]  # queries, and the new decode state


def cca_mix(x: MixInputs, parts: MixParts = ALL_PARTS) -> Heads:
    """Apply convolutions, QK-mean, QK-norm, temperature, partial RoPE and value shift; those of `parts` alone.

    Returns q [b, s, h, c], k and v [b, s, k, c] in the dtype of `packed_bsy`.
    """
    return recomputed(functools.partial(_mix_reference, parts))(x)


def _mix_reference(parts: MixParts, x: MixInputs) -> Heads:
    packed_bsy, halo, segments_bs, rotary, weights, delayed_start_x = x
    num_kv, (heads, c) = weights.temperature_k.shape[0], weights.depthwise_bias_nc.shape
    u_bsnc, current_bsx, delayed_bsx = unpacked(packed_bsy, heads, num_kv, c)
    if halo is None:  # zeros of no document, with at least one row of segments, since the value shift looks one back
        rows = max(weights.depthwise_wnc.shape[0] + weights.grouped_wncc.shape[0] - 2, 0)
        before = jnp.zeros((len(u_bsnc), max(rows, 1)), segments_bs.dtype)
        u = jnp.zeros((len(u_bsnc), rows, heads, c), u_bsnc.dtype)
        halo = Halo(u, before, jnp.zeros_like(delayed_bsx[:, :1]))
    # Heads first from here on: the grouped convolution then multiplies all tokens of a head at once.
    exact = accumulation_dtype(u_bsnc.dtype)
    u_nbsc = u_bsnc.transpose(2, 0, 1, 3)
    x_nbsc = (_convolve(u_nbsc, segments_bs, halo, weights) if weights.grouped_wncc.size else u_nbsc).astype(exact)
    if parts.query_key_mean:
        x_nbsc = x_nbsc + _query_key_mean(u_nbsc.astype(exact), num_kv)
    temperature_n = jnp.concatenate([jnp.ones(heads - num_kv, exact), weights.temperature_k.astype(exact)])
    x_nbsc = rotate(unit(x_nbsc) * temperature_n[:, None, None, None], *rotary).astype(u_bsnc.dtype)
    q, k = (x.transpose(1, 2, 0, 3) for x in jnp.split(x_nbsc, [heads - num_kv]))
    if parts.value_shift:
        delayed_bsx = _previous(delayed_bsx, segments_bs, halo, delayed_start_x)
    v = jnp.concatenate([current_bsx, delayed_bsx], -1)
    return q, k, v.reshape(*v.shape[:2], num_kv, -1)


def _query_key_mean(u_nbsc: jax.Array, num_kv: int) -> jax.Array:
    """Return the mean of each query and its key, and for each key the mean of these over its queries.

    It is one small matrix for all channels: on a CPU a product of matrices is faster than a sum over heads, and so is
    its gradient.
    """
    queries = u_nbsc.shape[0] - num_kv
    own_hk = np.repeat(np.eye(num_kv), queries // num_kv, axis=0)
    mean_hn = 0.5 * np.concatenate([np.eye(queries), own_hk], axis=1)
    mean_nn = np.concatenate([mean_hn, own_hk.T @ mean_hn * (num_kv / queries)])
    return jnp.einsum("mn,nbsc->mbsc", mean_nn.astype(u_nbsc.dtype), u_nbsc, precision=jax.lax.Precision.HIGHEST)


def _convolve(u_nbsc: jax.Array, segments_bs: jax.Array, halo: Halo, weights: MixWeights) -> jax.Array:
    taps0, taps1 = weights.depthwise_wnc.shape[0], weights.grouped_wncc.shape[0]
    s = u_nbsc.shape[2]
    dtype, sums = u_nbsc.dtype, accumulation_dtype(u_nbsc.dtype)
    u = jnp.concatenate([halo.u_bwnc.astype(dtype).transpose(2, 0, 1, 3), u_nbsc], 2)
    rows_before = taps0 + taps1 - 2  # if 0, the halo's segments still have one row
    segments = jnp.concatenate([halo.segments_bw, segments_bs], 1)[:, -(s + rows_before) :]
    bias_n11c = weights.depthwise_bias_nc.astype(sums)[:, None, None]
    length = s + taps1 - 1  # the intermediate starts taps1 − 1 rows before the first token
    own = segments[:, taps0 - 1 :]
    y = bias_n11c
    for tap in range(taps0):
        same = segments[:, tap : tap + length] == own
        part = u[:, :, tap : tap + length].astype(sums) * weights.depthwise_wnc[tap].astype(sums)[:, None, None]
        y = y + jnp.where(same[:, :, None], part, 0.0)
    rows = []
    for tap in range(taps1):
        same = own[:, tap : tap + s] == segments_bs
        rows.append(jnp.where(same[:, :, None], y[:, :, tap : tap + s], bias_n11c).astype(dtype))
    # One matmul over taps and channels together, with inner dimension taps1 · c instead of c.
    x_nbsx, kernel_nxc = jnp.concatenate(rows, -1), jnp.concatenate(list(weights.grouped_wncc.astype(dtype)), axis=1)
    return jnp.einsum("nbsx,nxc->nbsc", x_nbsx, kernel_nxc) + weights.grouped_bias_nc.astype(dtype)[:, None, None]


def unit(x: jax.Array) -> jax.Array:
    """Scale each head to norm √c; ε inside the root keeps a zero head and its gradient finite."""
    return x * (jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-12) * x.shape[-1] ** 0.5)


def rotate(x_nbsc: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply RoPE to the first 2·cos.shape[-1] channels of each head, rotate-half style (docs/reference.md §1.3)."""
    half = cos.shape[-1]
    first, second, rest = jnp.split(x_nbsc, [half, 2 * half], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _previous(delayed_bsx: jax.Array, segments_bs: jax.Array, halo: Halo, start_x: jax.Array | None) -> jax.Array:
    """Return the row of each previous token, `start_x` at the start of a document."""
    before = jnp.concatenate([halo.delayed_b1x.astype(delayed_bsx.dtype), delayed_bsx[:, :-1]], 1)
    segment_before = jnp.concatenate([halo.segments_bw[:, -1:], segments_bs[:, :-1]], 1)
    start = jnp.zeros((), before.dtype) if start_x is None else start_x.astype(before.dtype)
    return jnp.where((segment_before == segments_bs)[:, :, None], before, start)


def _unsupported(architecture: str, x: MixInputs, parts: MixParts = ALL_PARTS) -> str:
    if reason := other_dtypes("the mix", x.packed_bsy):
        return reason
    weights, c, pairs = x.weights, x.weights.depthwise_bias_nc.shape[1], x.rotary[0].shape[2]
    # Channel ranges are matmul dimensions, which tensor cores need in multiples of 16; emulation needs powers of two.
    least = 1 if architecture == "interpret" else 16
    rest = c - 2 * pairs
    if any(size & (size - 1) for size in (c, pairs, rest)) or c < 16 or pairs < least or 0 < rest < least:
        needs = f"at least 16 channels, {least} pairs, and 0 or {least} unrotated channels"
        kinds = "channels, rotary pairs and unrotated channels"
        return f"The kernels of cca_mix need {kinds} to be powers of two: {needs}, not {c} channels with {pairs} pairs."
    taps = weights.depthwise_wnc.shape[0], weights.grouped_wncc.shape[0]
    if not (all(taps) and all(parts)):
        return "The kernels of cca_mix need convolutions, QK-mean and value shift."
    if sum(taps) - 2 > _MOST_ROWS:
        reach = f"not {sum(taps) - 2} (with {taps[0]} and {taps[1]} taps)"
        return f"The kernels of cca_mix support convolutions that together reach {_MOST_ROWS} tokens back, {reach}."
    return ""


def mix_arrays(x: MixInputs) -> MixArrays:
    """Return the arrays as kernels take them."""
    packed_bsy, halo, segments_bs, rotary, weights, delayed_start_x = x
    dtype = packed_bsy.dtype
    rows = weights.depthwise_wnc.shape[0] + weights.grouped_wncc.shape[0] - 2
    before: tuple[jax.Array | None, ...] = (None, None, None)
    if halo is not None:
        u_before = halo.u_bwnc.astype(dtype)
        if rows == 0:  # kernels do not support empty arrays; this one is not read
            u_before = jnp.zeros((packed_bsy.shape[0], 1, *weights.depthwise_bias_nc.shape), dtype)
        before = u_before, halo.delayed_b1x.astype(dtype), halo.segments_bw[:, -max(rows, 1) :].astype(jnp.int32)
    start = None if delayed_start_x is None else delayed_start_x.astype(dtype)
    cos, sin = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in rotary)
    packed_bsmc = packed_bsy.reshape(*packed_bsy.shape[:2], -1, weights.depthwise_bias_nc.shape[1])
    return MixArrays(packed_bsmc, *before, segments_bs.astype(jnp.int32), cos, sin, *weights, start)


def _kernel(
    forward: Callable[..., Any], architecture: Architecture, x: MixInputs, _parts: MixParts = ALL_PARTS
) -> Heads:
    return _mix(architecture, forward, mix_arrays(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mix(architecture: Architecture, forward: Callable[..., Any], x: MixArrays) -> Heads:
    return _mix_forward(architecture, forward, x)[0]


def _rounded(x: MixArrays) -> MixArrays:
    """Cast the grouped convolution's weights to the dtype of the projections, since matmuls need equal dtypes."""
    return x._replace(grouped_wncc=x.grouped_wncc.astype(x.packed_bsmc.dtype))


def _mix_forward(architecture: Architecture, forward: Callable[..., Any], x: MixArrays) -> tuple[Any, Any]:
    results = forward(_rounded(x), architecture=architecture)
    q, k, v, inverse = checkpoint_name(results, MATMUL_OUTPUT)
    return (q, k, v), (x, (q, k, inverse))


def _mix_backward(
    architecture: Architecture, _forward: Any, saved: tuple[MixArrays, Any], cotangents: tuple[jax.Array, ...]
) -> tuple[MixArrays]:
    x, results = saved
    gradients = cca_mix_backward(_rounded(x), results, cotangents, architecture=architecture)
    # None means zero: for documents, and for the RoPE tables, whose gradient is not needed.
    rounded: Any = (None if g is None or part is None else g.astype(part.dtype)
                    for g, part in zip(gradients, x, strict=True))  # fmt: skip
    return (MixArrays(*rounded),)


_mix.defvjp(_mix_forward, _mix_backward)


def _weights(model: ModelConfig) -> tuple[tuple[Input, ...], Callable[..., MixWeights]]:
    """Return the arrays of the weights in a check, and the function that makes the weights of them."""
    k, c = model.num_kv_heads, model.head_dim
    taps0, taps1 = (model.depthwise_kernel, model.grouped_kernel) if model.convolutions else (0, 0)
    n = model.num_query_heads + k

    def weights(depthwise: jax.Array, bias: jax.Array, grouped: jax.Array, vectors: jax.Array) -> MixWeights:
        return MixWeights(depthwise, bias, grouped, vectors[:n], 1 + 0.1 * vectors[n, :k])

    # The temperatures are part of the bias array: the gradient of so few numbers may cancel to almost 0, and its
    # relative error would be large.
    return (Input((taps0, n, c)), Input((n, c)), Input((taps1, n, c, c), c**-0.5), Input((n + 1, c))), weights


def _checks(model: ModelConfig, _training: bool) -> dict[str, Check]:
    pairs, parts = model.rotary_size // 2, MixParts(model.query_key_mean, model.value_shift)
    (inputs, weights), y = _weights(model), (model.num_query_heads + 2 * model.num_kv_heads) * model.head_dim
    angle = np.arange(ROWS)[None, :, None] / 100.0 ** (np.arange(pairs) / max(pairs, 1))

    def run(mix: Any, packed: jax.Array, *arrays: jax.Array) -> Any:
        segments, shape = documents(packed.shape[0]), (packed.shape[0], ROWS, pairs)
        exact = accumulation_dtype(packed.dtype)
        cos, sin = (jnp.broadcast_to(jnp.asarray(f(angle), exact), shape) for f in (np.cos, np.sin))
        return mix(MixInputs(packed, None, segments, (cos, sin), weights(*arrays)), parts)

    return {"cca_mix": Check(run, (Input((2, ROWS, y)), *inputs), 1)}


def _shape(x: MixInputs, *_parts: Any) -> tuple[int, ...]:
    (b, s, _y), weights = x.packed_bsy.shape, x.weights
    taps = weights.depthwise_wnc.shape[0], weights.grouped_wncc.shape[0]
    return b * s, *weights.depthwise_bias_nc.shape, weights.temperature_k.shape[0], *taps


_BACKWARD = "cca_mix_backward_norm", "cca_mix_backward_rows", "cca_mix_backward_matrices"
_FORWARD = {"pallas": ("cca_mix", mix_forward), "pallas_by_head": ("cca_mix_by_head", cca_mix_by_head)}
_KERNELS = [Kernel(name, functools.partial(_kernel, forward), _unsupported, (tiles, *_BACKWARD))
            for name, (tiles, forward) in _FORWARD.items()]  # fmt: skip
CCA_MIX = Operation("cca_mix", cca_mix, _checks, tuple(_KERNELS), shape=_shape)


# --- one token of each row of a batch ----------------------------------------------------------------------------


def cca_mix_step(x: MixInputs, parts: MixParts, k_btx: jax.Array, v_btx: jax.Array, slot_b: jax.Array) -> Stepped:
    """Apply `cca_mix` to one token a row, and keep what later tokens need of it.

    The halo of `x` is the state before the token, fp32. `k_btx` and `v_btx` are a layer's cache, whose slot of each
    token is `slot_b`, int32 [b]; a slot that it does not have is not written. Returns the queries [b, 1, h, c]; and the
    new `k_btx`, `v_btx` and arrays `u_bwnc` and `delayed_b1x` of the halo, which padding leaves as they are. It has no
    gradient.
    """
    q, *new = cca_mix(x, parts)
    halo: Any = x.halo
    num_kv, (heads, c) = x.weights.temperature_k.shape[0], x.weights.depthwise_bias_nc.shape
    u, _, delayed = unpacked(x.packed_bsy, heads, num_kv, c)
    k_btx, v_btx = (write_slots(old, y.reshape(*y.shape[:2], -1), slot_b[:, None])
                    for old, y in zip((k_btx, v_btx), new, strict=True))  # fmt: skip
    states, kept_b = ((halo.u_bwnc, u), (halo.delayed_b1x, delayed)), count_kept(x.segments_bs)
    return q, (k_btx, v_btx, *(last_rows(*state, kept_b) for state in states))


def _step_unsupported(architecture: str, x: MixInputs, parts: MixParts, *_cache: jax.Array) -> str:
    if x.halo is None or not x.halo.u_bwnc.shape[1] or x.packed_bsy.shape[1] != 1:
        return "The cca_mix_step kernel needs one token a row, and convolutions that reach at least one token back."
    c = x.weights.depthwise_bias_nc.shape[1]
    if x.packed_bsy.dtype == jnp.float32 and c > 128:
        return f"The cca_mix_step kernel supports 128 channels in float32, not {c}, for which registers would spill."
    return _unsupported(architecture, x, parts)


def _step(architecture: Architecture, x: MixInputs, _parts: MixParts, *cache: jax.Array) -> Stepped:
    halo: Any = x.halo  # as it is, to be advanced in place
    arrays = _rounded(mix_arrays(x))._replace(halo_u_bwnc=halo.u_bwnc, halo_delayed_b1x=halo.delayed_b1x)
    return step_kernel(arrays, *cache, architecture=architecture)


def _step_checks(model: ModelConfig, _training: bool) -> dict[str, Check]:
    """Return a check of rows with other documents before them, with padding, and with a full cache."""
    k, c, pairs, b, t = model.num_kv_heads, model.head_dim, model.rotary_size // 2, 32, 24
    (inputs, weights), n = _weights(model), model.num_query_heads + k
    reach = max(inputs[0].shape[0] + inputs[2].shape[0] - 2, 0)  # not the model's: it may have another attention

    def run(step: Any, *arrays: jax.Array) -> Any:
        packed, u, delayed, keys, values, *others = arrays
        exact, row = accumulation_dtype(packed.dtype), jnp.repeat(jnp.arange(b), packed.shape[0] // b)
        before = (row[:, None] % 3 == jnp.arange(max(reach, 1))).astype(jnp.int32) + 1
        halo, segments = Halo(u.astype(exact), before, delayed.astype(exact)), jnp.where(row % 4 == 1, 0, 1)[:, None]
        angle = row[:, None, None].astype(exact) / 100.0 ** (np.arange(pairs) / max(pairs, 1)).astype(exact)
        x = MixInputs(packed, halo, segments.astype(jnp.int32), (jnp.cos(angle), jnp.sin(angle)), weights(*others))
        slot = (row % (t + 2)).astype(jnp.int32)
        return step(x, MixParts(model.query_key_mean, model.value_shift), keys, values, slot)

    state = Input((b, 1, (n + k) * c)), Input((b, reach, n, c)), Input((b, 1, k * c // 2)), *[Input((b, t, k * c))] * 2
    return {"cca_mix_step": Check(run, (*state, *inputs), len(state), gradient=False)}


_STEP = Kernel("pallas", _step, _step_unsupported, ("cca_mix_step",))
CCA_MIX_STEP = Operation("cca_mix_step", cca_mix_step, _step_checks, (_STEP,), shape=_shape, step_of="cca_mix")
