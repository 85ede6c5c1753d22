"""Calls of AITER's attention to packed documents through jax-aiter: causal, with a window, with grouped queries.

jax-aiter (https://github.com/ROCm/jax-aiter, `jax_aiter.ops.mha`) registers AITER's kernels with jax's FFI. It takes
documents one after the other, with the places of their first tokens.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_tiles import AttentionInputs
from zaya_jax.ops.packing import Packing, without_padding


@functools.cache
def unavailable() -> str:
    """Return '' if jax-aiter can be called, else a sentence that says why not."""
    try:
        importlib.import_module("jax_aiter.mha")  # raises if AITER's libraries are missing
        importlib.import_module("jax_aiter.ops.mha")
    except Exception as problem:  # whatever the package's modules raise
        return f"AITER's attention needs jax-aiter, whose import raised {type(problem).__name__}: {problem}."
    return ""


def aiter_forward(x: AttentionInputs, packing: Packing) -> tuple[jax.Array, jax.Array]:
    """Compute attention to documents that fit; returns the same as `cudnn.cudnn_forward`."""
    from jax_aiter.ops import mha  # pyright: ignore[reportMissingImports]

    b, s, h, _ = x.q_bshc.shape
    config = mha.MhaFwdConfig(
        **_settings(x), return_lse=True, return_randval=False, use_asm_v3=True, min_seqlen_q=0, logits_soft_cap=0.0
    )
    starts, none = packing.starts_n, _missing(x, 4)
    out, lse_ht, *_ = mha.mha_fwd(*_tokens(x.q_bshc, x.k_btkc, x.v_btkc), starts, starts, *none, config=config)
    if lse_ht.shape != (h, b * s):  # then only one document would have room
        raise ValueError(f"jax-aiter gives a log-sum-exp of shape {lse_ht.shape}, not {(h, b * s)}: it is too old.")
    return without_padding(x, out.reshape(x.q_bshc.shape)), lse_ht.T.reshape(b, s, h)


def aiter_backward(
    x: AttentionInputs, packing: Packing, o: jax.Array, lse_bsh: jax.Array, do: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of queries, keys and values in their dtype, from the results of `aiter_forward`.

    Composable Kernel computes them, since AMD's assembly adds those of queries with atomic operations.
    """
    from jax_aiter.ops import mha  # pyright: ignore[reportMissingImports]

    config = mha.MhaBwdConfig(**_settings(x), deterministic=True, use_asm_v3=False, is_v3_atomic_fp32=False)
    arrays = _tokens(without_padding(x, do), x.q_bshc, x.k_btkc, x.v_btkc, o)
    lse_ht, starts, none = lse_bsh.reshape(-1, lse_bsh.shape[2]).T, packing.starts_n, _missing(x, 7)
    dq, dk, dv, *_ = mha.mha_bwd(*arrays, lse_ht, starts, starts, *none, config=config)
    return dq.reshape(x.q_bshc.shape), dk.reshape(x.k_btkc.shape), dv.reshape(x.v_btkc.shape)


def _settings(x: AttentionInputs) -> dict[str, Any]:
    """Return what the configurations of both passes have in common."""
    (_, s, _, c), parallel = x.q_bshc.shape, {"cp_axis": None, "cp_size": 1, "cp_load_balanced": True}
    mask = {"is_causal": True, "wl": -1 if x.window is None else x.window - 1, "wr": -1}
    lengths = {"max_seqlen_q": s, "max_seqlen_k": s, "zero_tensors": False}
    rounding = {"how_v3_bf16_cvt": 0}  # of probabilities, to the nearest
    return {"dropout_p": 0.0, "softmax_scale": c**-0.5, **rounding, **mask, **lengths, **parallel}


def _tokens(*arrays: jax.Array) -> list[jax.Array]:
    """Return arrays [b, s, h, c] as [b · s, h, c]."""
    return [array.reshape(-1, *array.shape[2:]) for array in arrays]


def _missing(x: AttentionInputs, count: int) -> list[jax.Array]:
    """Return what stands for arrays that a call does not have, such as a bias."""
    return [jnp.zeros(0, x.q_bshc.dtype)] * count
