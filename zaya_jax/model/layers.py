"""Building blocks: parameters with a role, RMSNorm, residual scaling, RoPE tables."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.model.hf_names import HfTensor, same
from zaya_jax.ops import Ops
from zaya_jax.ops.norm import rms_norm
from zaya_jax.ops.residual_norm import MergeVectors, merge

MatrixRole = Literal["attention", "router", "expert"]
Role = Literal[MatrixRole, "embedding", "convolution", "norm", "scale", "temperature", "bias"]
Roles = Mapping[str, Role]  # by name of the parameter
Shapes = Mapping[str, tuple[int, ...]]
ROLES: tuple[Role, ...] = get_args(Role)
MATRIX_ROLES: tuple[Role, ...] = get_args(MatrixRole)


class BalancingBias(nnx.Variable):
    """A bias of the router's choice of expert, updated from the load instead of the loss."""


def param(value: jax.Array, role: Role, parts: int = 1) -> nnx.Param:
    """Make a trained parameter, whose role determines its optimizer and compute dtype.

    `parts` is the number of matrices of equal width that are side by side along its last axis.
    """
    return nnx.Param(value, role=role, parts=parts)


def matrix(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw an fp32 matrix from N(0, 1 / rows), which maps unit variance to unit variance.

    At a width of 2,048 this is the usual standard deviation of 0.02. At small widths 0.02 is too small for the router's
    three layers: its output would not depend on its input, and the balancing bias alone would choose the expert.
    """
    return shape[-2] ** -0.5 * jax.random.normal(key, shape, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carrier:
    """Brings the gradient of a norm to the merge before it, or in decode the norm to the layer after it."""

    value: jax.Array  # of the shape and dtype of the norm; with a gradient of no account


class RMSNorm(nnx.Module):
    """RMSNorm with a plain weight (no 1 + w)."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = param(jnp.ones(size), "norm")
        self.eps = eps

    def __call__(self, x: jax.Array, dtype: jax.typing.DTypeLike, carrier: Carrier | None = None) -> jax.Array:
        """Normalize `x` along its last axis, in `dtype`; the gradient of the result goes to `carrier`, if any."""
        normed = rms_norm(x, self.weight[...], self.eps, dtype)
        return normed if carrier is None else _with_gradient_of(carrier, normed)


@jax.custom_vjp
def _with_gradient_of(carrier: Carrier, normed: jax.Array) -> jax.Array:
    del carrier
    return normed


_with_gradient_of.defvjp(lambda _, normed: (normed, None), lambda _, gradient: (Carrier(gradient), None))


class ResidualScaling(nnx.Module):
    """Merges a sublayer's output o into the residual stream x, in fp32: (o + b_o)·s_o + (x + b_x)·s_x.

    See docs/reference.md §1.6.
    """

    def __init__(self, size: int) -> None:
        self.hidden_scale = param(jnp.ones(size), "scale")
        self.hidden_bias = param(jnp.zeros(size), "bias")
        self.residual_scale = param(jnp.ones(size), "scale")
        self.residual_bias = param(jnp.zeros(size), "bias")

    @property
    def vectors(self) -> MergeVectors:
        """The parameters, as `ops.residual_norm` takes them."""
        vectors = (self.hidden_scale, self.hidden_bias, self.residual_scale, self.residual_bias)
        return MergeVectors(*(vector[...] for vector in vectors))

    @staticmethod
    def hf_tensors(sublayer: str, size: int) -> Iterator[HfTensor]:
        """Yield the module's tensors in a `transformers` folder; their names contain `sublayer`."""
        for term, theirs in (("hidden", "hidden_states"), ("residual", "residual")):
            for kind in ("scale", "bias"):
                yield same(f"post_{sublayer}_residual_scale.{theirs}_{kind}", f"{term}_{kind}", size)


Terms = tuple[jax.Array, jax.Array, MergeVectors | None]  # a sublayer's output, the residual stream, and their scaling


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fused_merge(ops: Ops, eps: float, terms: Terms, weight_d: Any, carrier: Any, kept: Any) -> tuple[jax.Array, Any]:
    """Merge an output into the residual stream, whose norm, of weight `weight_d`, the next layer computes.

    Returns the new stream, fp32, and the `carrier` for that norm. One pass computes the gradients of merge and norm, as
    it does inside a layer; it reads the output where it is `kept`, if it is (`MixtureOutput.kept`).
    """
    del ops, eps, weight_d, kept
    return merge(*terms), carrier


def _merge_forward(ops: Ops, eps: float, terms: Terms, weight_d: Any, carrier: Any, kept: Any) -> Any:
    merged = fused_merge(ops, eps, terms, weight_d, carrier, kept)
    return merged, ((None, *terms[1:]) if kept else terms, weight_d, kept)


def _merge_backward(ops: Ops, eps: float, saved: Any, gradients: tuple[jax.Array, Carrier]) -> tuple[Any, ...]:
    (terms, weight_d, kept), d_new, d_normed = saved, gradients[0], gradients[1].value
    if kept:
        kept = kept[0][...], kept[1]
        terms = kept[0][kept[1]].reshape(d_new.shape), *terms[1:]
    _, pullback = jax.vjp(lambda *x: ops.residual_norm(*x, eps, d_normed.dtype, *kept), *terms, weight_d)
    *d_terms, d_weight = pullback((d_new, d_normed))
    return tuple(d_terms), d_weight, None, None


fused_merge.defvjp(_merge_forward, _merge_backward)


def rotary_table(
    positions_bs: jax.Array, size: int, base: float, dtype: jax.typing.DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Compute the cos and sin tables of RoPE, [b, s, size / 2] each (docs/reference.md §1.3)."""
    inverse_frequency = 1.0 / base ** (jnp.arange(0, size, 2, dtype=dtype) / max(size, 1))
    angle = positions_bs.astype(dtype)[..., None] * inverse_frequency
    return jnp.cos(angle), jnp.sin(angle)


def segment_positions(segments_bs: jax.Array) -> jax.Array:
    """Return the int32 index of each token within its document; a document is a run of equal segment ids."""
    index = jnp.arange(segments_bs.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones_like(segments_bs[:, :1], bool), segments_bs[:, 1:] != segments_bs[:, :-1]], 1)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
