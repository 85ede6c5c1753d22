"""The mixing half of CCA by kernels: that of `ops.cca_mix`, forward and backward."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cca_mix import MixArrays
from pallas_kernels.cca_mix import cca_mix as forward
from pallas_kernels.cca_mix_backward import cca_mix_backward as backward
from zaya_jax.ops.cca_mix import Halo, MixWeights

_MOST_ROWS = 8  # of the halo: half of the smallest tile, which more would read again and again


def cca_mix_kernel(
    u_bsnc: jax.Array,
    current_bsx: jax.Array,
    delayed_bsx: jax.Array,
    halo: Halo,
    segments_bs: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    weights: MixWeights,
    delayed_start_x: jax.Array | None,
    *,
    platform: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`ops.cca_mix.cca_mix`, whose arguments and results these are, by one kernel; its gradient by another.

    Nothing is kept for the gradient but what is given. The rotary tables have none: they are made of positions.

    Raises:
      ValueError: a dtype or a size that the kernels are not made for.
    """
    dtype, pairs = u_bsnc.dtype, rotary[0].shape[2]
    taps = weights.depthwise_wnc.shape[0], weights.grouped_wncc.shape[0]
    _check(u_bsnc, current_bsx, delayed_bsx, pairs, taps, platform)
    rows = sum(taps) - 2
    u_before = halo.u_bwnc.astype(dtype)
    if rows == 0:  # a kernel takes no empty array; nothing reads this one
        u_before = jnp.zeros((u_bsnc.shape[0], 1, *u_bsnc.shape[2:]), dtype)
    start = jnp.zeros(delayed_bsx.shape[2:], dtype) if delayed_start_x is None else delayed_start_x.astype(dtype)
    cos, sin = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in rotary)
    x = MixArrays(
        u_bsnc, current_bsx, delayed_bsx, u_before, halo.delayed_b1x.astype(dtype),
        halo.segments_bw[:, -max(rows, 1) :].astype(jnp.int32), segments_bs.astype(jnp.int32), cos, sin, *weights,
        start,
    )  # fmt: skip
    return _mix(platform, x)


def _check(u_bsnc: jax.Array, current_bsx: jax.Array, delayed_bsx: jax.Array, pairs: int, taps: tuple[int, int],
           platform: str) -> None:  # fmt: skip
    c = u_bsnc.shape[3]
    if u_bsnc.dtype not in (jnp.bfloat16, jnp.float32) or {current_bsx.dtype, delayed_bsx.dtype} != {u_bsnc.dtype}:
        raise ValueError(
            f"The mix's kernel takes projections all of bfloat16 or all of float32, not {u_bsnc.dtype}, "
            f"{current_bsx.dtype} and {delayed_bsx.dtype}."
        )
    # Ranges of channels are sides of products, which tensor cores do by 16; interpreted, any power of two does.
    least = 1 if platform == "interpret" else 16
    rest = c - 2 * pairs
    if any(size & (size - 1) for size in (c, pairs, rest)) or c < 16 or pairs < least or 0 < rest < least:
        raise ValueError(
            f"The mix's kernel takes heads of a power of two of channels, 16 at least, of which it rotates pairs and "
            f"leaves channels numbering powers of two, {least} at least (or leaves none); "
            f"not {c} channels with {pairs} pairs."
        )
    if sum(taps) - 2 > _MOST_ROWS:
        raise ValueError(
            f"The mix's kernel takes convolutions that reach {_MOST_ROWS} tokens back together, "
            f"not {sum(taps) - 2} as with {taps[0]} and {taps[1]} taps."
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(platform: str, x: MixArrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    return forward(_rounded(x), platform=platform)


def _rounded(x: MixArrays) -> MixArrays:
    """Products take both sides in one dtype, that of the projections."""
    return x._replace(grouped_wncc=x.grouped_wncc.astype(x.u_bsnc.dtype))


def _mix_forward(platform: str, x: MixArrays) -> tuple[tuple[jax.Array, jax.Array, jax.Array], MixArrays]:
    return _mix(platform, x), x


def _mix_backward(platform: str, x: MixArrays, gradients: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[MixArrays]:
    found = backward(_rounded(x), *gradients, platform=platform)._asdict()
    # None is zero: of documents, and of the rotary tables, whose gradient nobody asks for.
    parts = {name: None if name not in found else found[name].astype(part.dtype) for name, part in x._asdict().items()}
    return (MixArrays(**parts),)  # pyright: ignore[reportArgumentType]


_mix.defvjp(_mix_forward, _mix_backward)
