"""The CCA mix of one token of each row of a batch, with the writes to the cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cca_mix_step as step_kernel
from pallas_kernels.tiles import Architecture
from zaya_jax.config import ModelConfig
from zaya_jax.ops.cached_attention import count_kept, last_rows, write_slots
from zaya_jax.ops.cca_mix import CCA_MIX, Halo, MixInputs, MixParts, MixWeights, cca_mix, mix_arrays, unpacked
from zaya_jax.ops.operation import Check, Input, Kernel, Operation
from zaya_jax.ops.precision import accumulation_dtype

Stepped = tuple[jax.Array, tuple[jax.Array, ...]]


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


def _unsupported(architecture: str, x: MixInputs, parts: MixParts, *_cache: jax.Array) -> str:
    if x.halo is None or not x.halo.u_bwnc.shape[1] or x.packed_bsy.shape[1] != 1:
        return "The cca_mix_step kernel needs one token a row, and convolutions that reach at least one token back."
    return CCA_MIX.kernels[0].supports(architecture, x, parts).replace("cca_mix kernel", "cca_mix_step kernel")


def _kernel(architecture: Architecture, x: MixInputs, _parts: MixParts, *cache: jax.Array) -> Stepped:
    halo, arrays = x.halo, mix_arrays(x)
    arrays = arrays._replace(grouped_wncc=arrays.grouped_wncc.astype(x.packed_bsy.dtype))
    if halo is not None:  # as it is, to be advanced in place
        arrays = arrays._replace(halo_u_bwnc=halo.u_bwnc, halo_delayed_b1x=halo.delayed_b1x)
    return step_kernel.cca_mix_step(arrays, *cache, architecture=architecture)


def _checks(model: ModelConfig, _training: bool) -> dict[str, Check]:
    """Return a check of rows with other documents before them, with padding, and with a full cache."""
    h, k, c = model.num_query_heads, model.num_kv_heads, model.head_dim
    taps0, taps1 = (model.depthwise_kernel, model.grouped_kernel) if model.convolutions else (0, 0)
    b, t, reach, n, row = 32, 24, model.convolution_reach, h + k, np.arange(32, dtype=np.int32)
    before, segments = (row[:, None] % 3 == np.arange(max(reach, 1))) + 1, np.where(row % 4 == 1, 0, 1)
    angle = row[:, None, None] / 100.0 ** (np.arange(model.rotary_size // 2) / max(model.rotary_size // 2, 1))

    def run(step: Any, *arrays: jax.Array) -> Any:
        packed, u, delayed, keys, values, depthwise, grouped, vectors = arrays
        exact, bias = accumulation_dtype(packed.dtype), vectors[:n]
        halo = Halo(u.astype(exact), jnp.asarray(before, jnp.int32), delayed.astype(exact))
        weights = MixWeights(depthwise, bias, grouped, bias, 1 + 0.1 * vectors[n, :k])
        tables = jnp.asarray(np.cos(angle), exact), jnp.asarray(np.sin(angle), exact)
        x = MixInputs(packed, halo, jnp.asarray(segments, jnp.int32)[:, None], tables, weights)
        return step(x, MixParts(model.query_key_mean, model.value_shift), keys, values, jnp.asarray(row % (t + 2)))

    state = Input((b, 1, (n + k) * c)), Input((b, reach, n, c)), Input((b, 1, k * c // 2)), *[Input((b, t, k * c))] * 2
    weights = Input((taps0, n, c)), Input((taps1, n, c, c), c**-0.5), Input((n + 1, c))
    return {"cca_mix_step": Check(run, (*state, *weights), 0, gradient=False)}


_KERNEL = Kernel("pallas", _kernel, _unsupported, ("cca_mix_step",))
CCA_MIX_STEP = Operation("cca_mix_step", cca_mix_step, _checks, (_KERNEL,), shape=CCA_MIX.shape)
