"""The small parts: parameters with a role, RMSNorm, residual scaling, rotary tables."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.model.hf_names import HfTensor, same
from zaya_jax.ops import Ops
from zaya_jax.ops.residual_norm import MergeVectors, merge

Role = Literal[
    "attention", "router", "expert",  # matrices
    "embedding", "convolution", "norm", "scale", "temperature", "bias",
]  # fmt: skip
ROLES: tuple[Role, ...] = get_args(Role)
MATRIX_ROLES: tuple[Role, ...] = ("attention", "router", "expert")


class BalancingBias(nnx.Variable):
    """Added to the router's probabilities to choose an expert; moved by the load, never by the loss."""


def param(value: jax.Array, role: Role, parts: int = 1) -> nnx.Param:
    """A trained parameter.

    Args:
      value: its start.
      role: says which optimizer moves it and in which dtype it computes.
      parts: matrices of equal width that it holds side by side along its last axis.
    """
    return nnx.Param(value, role=role, parts=parts)


def matrix(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """fp32 values from N(0, 1 / rows), so that an input of unit variance gives an output of unit variance.

    At a width of 2,048 this is the usual 0.02. At small widths 0.02 would leave a router of three layers
    blind to its input: every token would go where the balancing bias points.
    """
    return shape[-2] ** -0.5 * jax.random.normal(key, shape, jnp.float32)


def recomputed(function: Callable[..., Any], static: tuple[int, ...] = ()) -> Callable[..., Any]:
    """`function`, whose backward pass computes its intermediates again instead of reading them back.

    For elementwise work: its intermediates are many times its inputs, and a scan over layers stacks what it
    keeps. The scan already keeps the compiler from sharing them between the passes, so no barrier is needed.
    """
    return jax.checkpoint(function, prevent_cse=False, static_argnums=static)


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a plain weight."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = param(jnp.ones(size), "norm")
        self.eps = eps

    def __call__(self, x: jax.Array, dtype: jax.typing.DTypeLike, ops: Ops) -> jax.Array:
        """`x` normed along its last axis, in `dtype`."""
        return recomputed(ops.rms_norm, static=(2, 3))(x, self.weight[...], self.eps, jnp.dtype(dtype))


class ResidualScaling(nnx.Module):
    """Merges a sublayer's output into the stream: (o + b_o)·s_o + (x + b_x)·s_x, in fp32 (zaya1.md §1.6)."""

    def __init__(self, size: int) -> None:
        self.hidden_scale = param(jnp.ones(size), "scale")
        self.hidden_bias = param(jnp.zeros(size), "bias")
        self.residual_scale = param(jnp.ones(size), "scale")
        self.residual_bias = param(jnp.zeros(size), "bias")

    @property
    def vectors(self) -> MergeVectors:
        """The parameters, as the operation takes them."""
        return MergeVectors(self.hidden_scale[...], self.hidden_bias[...], self.residual_scale[...],
                            self.residual_bias[...])  # fmt: skip

    def __call__(self, output_bsd: jax.Array, stream_bsd: jax.Array) -> jax.Array:
        """The new stream, fp32."""
        return recomputed(merge)(output_bsd, stream_bsd, self.vectors)

    @staticmethod
    def hf_tensors(sublayer: str, size: int) -> Iterator[HfTensor]:
        """Its tensors in a `transformers` folder, behind `sublayer`."""
        for name, attribute in (("hidden_states_scale", "hidden_scale"), ("hidden_states_bias", "hidden_bias"),
                                ("residual_scale", "residual_scale"), ("residual_bias", "residual_bias")):  # fmt: skip
            yield same(f"post_{sublayer}_residual_scale.{name}", attribute, size)


class PlainSum(nnx.Module):
    """Merges a sublayer's output into the stream: o + x, in fp32, without parameters."""

    vectors = None

    def __call__(self, output_bsd: jax.Array, stream_bsd: jax.Array) -> jax.Array:
        """The new stream, fp32."""
        return merge(output_bsd, stream_bsd, None)


def merged_and_normed(
    into: ResidualScaling | PlainSum, norm: RMSNorm, output_bsd: jax.Array, stream_bsd: jax.Array,
    dtype: jax.typing.DTypeLike, ops: Ops,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """What `into` makes of an output and the stream, fp32, and `norm` of that, in `dtype`: one operation."""
    joined = recomputed(ops.residual_norm, static=(4, 5))
    return joined(output_bsd, stream_bsd, into.vectors, norm.weight[...], norm.eps, jnp.dtype(dtype))


def rotary_table(
    positions_bs: jax.Array, size: int, base: float, dtype: jax.typing.DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of positions times inverse frequencies, [b, s, size / 2] each (zaya1.md §1.3)."""
    inverse_frequency = 1.0 / base ** (jnp.arange(0, size, 2, dtype=dtype) / max(size, 1))
    angle = positions_bs.astype(dtype)[..., None] * inverse_frequency
    return jnp.cos(angle), jnp.sin(angle)


def segment_positions(segments_bs: jax.Array) -> jax.Array:
    """int32 index of each token within its document; a document is a run of equal segment ids."""
    index = jnp.arange(segments_bs.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones_like(segments_bs[:, :1], bool), segments_bs[:, 1:] != segments_bs[:, :-1]], 1)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
