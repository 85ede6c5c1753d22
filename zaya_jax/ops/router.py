"""The ZAYA1 router after its down-projection: depth averaging, norm, three-layer MLP, softmax (docs/reference.md §1.4).

There is no kernel: one that did all of it lost to XLA's compilation, forward and backward
(benchmarks/gpu/nvidia_h200/removed.json).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zaya_jax.config import ModelConfig
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.norm import rms_norm
from zaya_jax.ops.operation import ROWS, Check, Input, Operation
from zaya_jax.ops.precision import accumulation_dtype


class RouterWeights(NamedTuple):
    """Parameters of the router after its down-projection; vectors [r], hidden layers [r, r], output [r, e + 1].

    Hidden layers that an ablation leaves out are None.
    """

    down_bias_r: jax.Array
    state_scale_r: jax.Array
    norm_r: jax.Array
    hidden1_rr: jax.Array | None
    hidden1_bias_r: jax.Array | None
    hidden2_rr: jax.Array | None
    hidden2_bias_r: jax.Array | None
    output_rc: jax.Array


def router(
    projected_bsr: jax.Array, state_bsr: jax.Array, weights: RouterWeights, eps: float, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Compute the probabilities of the classes.

    `projected_bsr` is the down-projection of the tokens without its bias, fp32 (float64 in double precision), and
    `state_bsr` the state of the previous layer's router, in the same dtype. `eps` is added to the mean square in the
    norm. Operands of matmuls are in `dtype`; their sums are in fp32. Returns fp32 probabilities [.., e + 1], and the
    state for the next layer in the dtype of `state_bsr`.
    """
    exact = state_bsr.dtype
    state = projected_bsr + weights.down_bias_r.astype(exact) + state_bsr * weights.state_scale_r.astype(exact)
    # What the norm rounds its argument to is all that the gradient needs of the product that the state is made of.
    x = _norm(checkpoint_name(state.astype(dtype), MATMUL_OUTPUT), weights.norm_r, eps, dtype)
    for kernel, bias in ((weights.hidden1_rr, weights.hidden1_bias_r), (weights.hidden2_rr, weights.hidden2_bias_r)):
        if kernel is not None and bias is not None:
            x = _gelu(matmul(x, kernel, bias), dtype)
    return jax.nn.softmax(matmul(x, weights.output_rc), axis=-1), state


# Backward passes compute from the arguments again: what they could use of the forward pass has twice as many bytes.
# Unlike `rms_norm` alone, with `prevent_cse`: the router's backward pass has a launch less (H200).
_norm = jax.checkpoint(rms_norm, static_argnums=(2, 3))


@functools.partial(jax.checkpoint, static_argnums=1)
def _gelu(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return jax.nn.gelu(x, approximate=False).astype(dtype)


def matmul(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Compute x @ kernel + bias in fp32, with operands in the dtype of x; those of the gradient's matmuls are, too."""
    return _matmul(x, kernel.astype(x.dtype), bias)


@jax.custom_vjp
def _matmul(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    out = jnp.matmul(x, kernel, preferred_element_type=accumulation_dtype(x.dtype))
    return out if bias is None else out + bias.astype(out.dtype)


def _matmul_backward(saved: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    x, kernel, bias = saved
    # XLA would write them unrounded, too, for the sum.
    exact, d_out = d_out.dtype, jax.lax.optimization_barrier(d_out.astype(x.dtype))
    d_bias = None if bias is None else d_out.sum(range(d_out.ndim - 1), dtype=exact).astype(bias.dtype)
    return d_out @ kernel.T, jnp.einsum("...p,...q->pq", x, d_out), d_bias


_matmul.defvjp(lambda *saved: (_matmul(*saved), saved), _matmul_backward)


def _checks(model: ModelConfig, _training: bool) -> dict[str, Check]:
    if model.router != "zaya":
        return {}
    r, classes = model.router_size, model.num_experts + 1

    def run(router: Any, projected: jax.Array, state: jax.Array, vectors: jax.Array, *matrices: jax.Array) -> Any:
        exact = accumulation_dtype(state.dtype)
        bias, scale, norm, bias1, bias2 = vectors
        *hidden, output = matrices
        (first, bias1), (second, bias2) = [*zip(hidden, (bias1, bias2), strict=False), (None, None), (None, None)][:2]
        weights = RouterWeights(bias, scale, norm, first, bias1, second, bias2, output)
        return router(projected.astype(exact), state.astype(exact), weights, 1e-5, output.dtype)

    rows, matrix = Input((ROWS, r)), Input((r, r), r**-0.5)
    hidden = [matrix] * (model.router_layers - 1)
    return {"router": Check(run, (rows, rows, Input((5, r), 0.1, 1.0), *hidden, Input((r, classes), r**-0.5)), 2)}


ROUTER = Operation("router", router, _checks)
