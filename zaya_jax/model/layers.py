"""Building blocks: parameters with a role, RMSNorm, residual scaling, RoPE tables."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.model.hf_names import HfTensor, same
from zaya_jax.ops import Ops
from zaya_jax.ops.residual_norm import MergeVectors

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


def recomputed(function: Callable[..., Any], static: tuple[int, ...] = ()) -> Callable[..., Any]:
    """Wrap `function` so that its backward pass recomputes intermediates instead of storing them.

    Use it for elementwise work, whose intermediates are much larger than its inputs. `prevent_cse` is not needed, since
    the scan over layers already separates the passes.
    """
    return jax.checkpoint(function, prevent_cse=False, static_argnums=static)


class RMSNorm(nnx.Module):
    """RMSNorm with a plain weight (no 1 + w)."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = param(jnp.ones(size), "norm")
        self.eps = eps

    def __call__(self, x: jax.Array, dtype: jax.typing.DTypeLike, ops: Ops) -> jax.Array:
        """Normalize `x` along its last axis; the result has dtype `dtype`."""
        return recomputed(ops.rms_norm, static=(2, 3))(x, self.weight[...], self.eps, jnp.dtype(dtype))


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

    def __call__(self, output_bsd: jax.Array, stream_bsd: jax.Array, ops: Ops) -> jax.Array:
        """The new stream, fp32."""
        merge = recomputed(ops.residual_norm, static=(4, 5))
        return merge(output_bsd, stream_bsd, self.vectors, None, 0.0, output_bsd.dtype)[0]

    @staticmethod
    def hf_tensors(sublayer: str, size: int) -> Iterator[HfTensor]:
        """Yield the module's tensors in a `transformers` folder; their names contain `sublayer`."""
        for term, theirs in (("hidden", "hidden_states"), ("residual", "residual")):
            for kind in ("scale", "bias"):
                yield same(f"post_{sublayer}_residual_scale.{theirs}_{kind}", f"{term}_{kind}", size)


def merged_and_normed(
    into: Any, norm: RMSNorm, output_bsd: jax.Array | None, stream_bsd: jax.Array, dtype: Any, ops: Ops
) -> tuple[jax.Array, jax.Array]:
    """Merge an output into the residual stream and normalize the result, as one operation.

    Without `into`, a `ResidualScaling`, the merge is a plain sum; without an output, there is none. Returns the new
    residual stream, fp32, and its norm in `dtype`.
    """
    joined = recomputed(ops.residual_norm, static=(4, 5))
    vectors = None if into is None else into.vectors
    return joined(output_bsd, stream_bsd, vectors, norm.weight[...], norm.eps, jnp.dtype(dtype))


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
