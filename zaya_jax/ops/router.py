"""The ZAYA1 router after its down-projection: depth averaging, norm, three-layer MLP, softmax (docs/reference.md §1.4).

The kernel makes one pass over the tokens forward. The backward pass saves only the arguments and the probabilities,
recomputes the rest in one kernel, and multiplies matrices over all tokens for the gradients of the matrices. If
rematerialization saves the probabilities, named `MATMUL_OUTPUT`, the forward kernel does not run again.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.router import CLASSES, RouterArrays, RouterGradients, router_backward, router_forward
from zaya_jax.config import ModelConfig
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.norm import rms_norm
from zaya_jax.ops.operation import ROWS, Check, Input, Kernel, Operation, other_dtypes
from zaya_jax.ops.precision import accumulation_dtype

WIDEST = 256  # state of a router that a program can hold in registers


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

    Args:
      projected_bsr: down-projection of the tokens without its bias, fp32 (float64 in double precision).
      state_bsr: state of the previous layer's router, in the same dtype.
      weights: the parameters.
      eps: added to the mean square in the norm.
      dtype: dtype of the matmuls' operands; their sums are in fp32.

    Returns:
      fp32 probabilities [.., e + 1], and the state for the next layer in the dtype of `state_bsr`.
    """
    exact = state_bsr.dtype
    state = projected_bsr + weights.down_bias_r.astype(exact) + state_bsr * weights.state_scale_r.astype(exact)
    x = rms_norm(state, weights.norm_r, eps, dtype)
    for kernel, bias in ((weights.hidden1_rr, weights.hidden1_bias_r), (weights.hidden2_rr, weights.hidden2_bias_r)):
        if kernel is not None and bias is not None:
            x = jax.nn.gelu(matmul(x, kernel) + bias.astype(exact), approximate=False).astype(dtype)
    return jax.nn.softmax(matmul(x, weights.output_rc), axis=-1), state


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute x @ kernel in fp32, with operands in the dtype of x; the gradient's matmuls have operands in it, too."""
    return _matmul(x, kernel.astype(x.dtype))


@jax.custom_vjp
def _matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.matmul(x, kernel, preferred_element_type=accumulation_dtype(x.dtype))


def _matmul_backward(saved: tuple[jax.Array, jax.Array], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    d_out = d_out.astype(x.dtype)
    return d_out @ kernel.T, jnp.einsum("...p,...q->pq", x, d_out)


_matmul.defvjp(lambda x, kernel: (_matmul(x, kernel), (x, kernel)), _matmul_backward)


# --- the kernels -----------------------------------------------------------------------------------------------


def _unsupported(
    architecture: str, projected: jax.Array, state: jax.Array, weights: RouterWeights, _eps: float,
    dtype: jax.typing.DTypeLike,
) -> str:  # fmt: skip
    if weights.hidden1_rr is None or weights.hidden2_rr is None:
        return "The router kernel needs two hidden layers."
    kinds = jnp.zeros((), dtype), weights.hidden1_rr, weights.hidden2_rr, weights.output_rc
    if why := other_dtypes("the router", *kinds):
        return why
    if architecture != "interpret" and kinds[0].dtype == jnp.float32:
        return "The router kernel needs matrices in bfloat16: in float32 its tiles do not fit registers."
    if {projected.dtype, state.dtype} != {jnp.dtype(jnp.float32)} or projected.shape != state.shape:
        return (f"The router kernel needs projection and state in float32 and of the same shape, not {projected.dtype} "
                f"{projected.shape} and {state.dtype} {state.shape}.")  # fmt: skip
    (r, classes), least = weights.output_rc.shape, 1 if architecture == "interpret" else 16
    if r & (r - 1) or not least <= r <= WIDEST or classes > CLASSES or not state.size:
        return (f"The router kernel needs a state of {least} to {WIDEST} elements, a power of two, and at most "
                f"{CLASSES} classes, not {r} and {classes}.")  # fmt: skip
    return ""


def _kernel(
    architecture: str, projected: jax.Array, state: jax.Array, weights: RouterWeights, eps: float,
    _dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    width = state.shape[-1]
    # `_unsupported` has refused weights without a hidden layer.
    x = RouterArrays(projected.reshape(-1, width), state.reshape(-1, width), *cast(Any, weights))
    results: Any = _router(architecture, eps, x)
    probability_tc, new_tr = results
    return probability_tc.reshape(*state.shape[:-1], -1), new_tr.reshape(state.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _router(architecture: str, eps: float, x: RouterArrays) -> tuple[jax.Array, jax.Array]:
    return router_forward(x, eps=eps, architecture=architecture)


def _forward(architecture: str, eps: float, x: RouterArrays) -> tuple[tuple[jax.Array, jax.Array], Any]:
    probability_tc, state_tr = router_forward(x, eps=eps, architecture=architecture)
    probability_tc = checkpoint_name(probability_tc, MATMUL_OUTPUT)
    return (probability_tc, state_tr), (x, probability_tc)


def _backward(architecture: str, eps: float, saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any]:
    x, probability_tc = saved
    d: RouterGradients = router_backward(x, probability_tc, *cotangents, eps=eps, architecture=architecture)
    hidden1, hidden2 = jnp.einsum("ntp,ntq->npq", d.inputs_2tr, d.hidden_2tr)
    output = (d.last_tr.T @ d.logits_tc)[:, : x.output_rc.shape[1]]
    bias, scale, norm, bias1, bias2 = d.vectors_vr
    gradients = RouterArrays(d.projected_tr, d.state_tr, bias, scale, norm, hidden1, bias1, hidden2, bias2, output)
    return (jax.tree.map(lambda gradient, like: gradient.astype(like.dtype), gradients, x),)


_router.defvjp(_forward, _backward)


# --- the check -------------------------------------------------------------------------------------------------


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


ROUTER = Operation("router", router, _checks, (Kernel("pallas", _kernel, _unsupported),))
