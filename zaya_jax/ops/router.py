"""The ZAYA1 router after its down-projection: depth averaging, norm, three-layer MLP, softmax (docs/reference.md §1.4).

Training has no kernel: one that did all of it lost to XLA's compilation, forward and backward
(benchmarks/gpu/nvidia_h200/removed.json). For the few tokens of a decode step, one kernel replaces 11 launches.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import router_step as step_kernel
from pallas_kernels.tiles import Architecture, platform
from zaya_jax.config import ModelConfig
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.norm import rms_norm
from zaya_jax.ops.operation import ROWS, Check, Input, Kernel, Operation, other_dtypes
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


def choose_class(probability: jax.Array, bias: jax.Array, real_bs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choose the class with the highest biased probability; ties go to the lowest.

    The probabilities are [.., e + 1], or [.., e] for a router that never skips; the bias [e + 1] is for the choice
    only; `real_bs` is false for padding. Returns the int32 class of each token, skip (e) for padding, and the
    probability of its choice without the bias; 0 for skip, but not for padding.
    """
    classes = jnp.arange(probability.shape[-1], dtype=jnp.int32)
    biased = jax.lax.stop_gradient(probability) + bias[: probability.shape[-1]]
    expert = jnp.argmax(biased, axis=-1).astype(jnp.int32)
    # A masked sum, whose gradient is elementwise; that of a gather is a scatter.
    chosen = (classes == expert[..., None]) & (classes != bias.shape[0] - 1)
    return jnp.where(real_bs, expert, bias.shape[0] - 1), jnp.where(chosen, probability, 0.0).sum(-1)


def router_step(
    projected_bsr: jax.Array, state_bsr: jax.Array, weights: RouterWeights, eps: float, dtype: jax.typing.DTypeLike,
    bias_c: jax.Array, real_bs: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Apply `router`, then `choose_class`; returns class, weight and state of each token, without a gradient."""
    probability, state = router(projected_bsr, state_bsr, weights, eps, dtype)
    return *choose_class(probability, bias_c, real_bs), state


def _step_unsupported(architecture: Architecture, projected: Any, state: Any, weights: RouterWeights, *_: Any) -> str:
    if weights.hidden1_rr is None or weights.hidden2_rr is None:
        return "The router_step kernel needs two hidden layers."
    (r, classes), exact = weights.output_rc.shape, {projected.dtype, state.dtype} == {jnp.dtype(jnp.float32)}
    most = 512 if weights.output_rc.dtype == jnp.bfloat16 else 256  # with 64 classes all of AMD's shared memory
    if not exact or r & (r - 1) or not 16 <= r <= most or classes > 64:
        needs = f"a state in float32 of 16 to {most} elements, a power of two, and at most 64 classes"
        return f"The router_step kernel needs {needs}, not {r} elements in {state.dtype} and {classes} classes."
    if weights.output_rc.dtype == jnp.float32 and platform(architecture) == "cuda":
        return "The router_step kernel supports no float32 on NVIDIA GPUs, where its registers would spill."
    return other_dtypes("router_step", weights.hidden1_rr, weights.hidden2_rr, weights.output_rc)


def _step(architecture: Architecture, *arguments: Any) -> tuple[jax.Array, ...]:
    projected, state, weights, eps, _dtype, bias, real = arguments
    projected, state = (array.reshape(-1, array.shape[-1]) for array in (projected, state))
    tokens: Any = weights, bias, real.reshape(-1).astype(jnp.int32)
    each = step_kernel.router_step(projected, state, *tokens, eps=eps, architecture=architecture)
    return tuple(x.reshape(*real.shape, *x.shape[1:]) for x in each)


def _checks(model: ModelConfig, _training: bool, *more: Any) -> dict[str, Check]:
    if model.router != "zaya":
        return {}
    r, classes = model.router_size, model.num_experts + 1

    def run(router: Any, projected: jax.Array, state: jax.Array, vectors: jax.Array, *matrices: jax.Array) -> Any:
        exact = accumulation_dtype(state.dtype)
        bias, scale, norm, bias1, bias2 = vectors
        *hidden, output = matrices
        (first, bias1), (second, bias2) = [*zip(hidden, (bias1, bias2), strict=False), (None, None), (None, None)][:2]
        weights = RouterWeights(bias, scale, norm, first, bias1, second, bias2, output)
        return router(projected.astype(exact), state.astype(exact), weights, 1e-5, output.dtype, *more)

    rows, matrix = Input((ROWS, r)), Input((r, r), r**-0.5)
    hidden = [matrix] * (model.router_layers - 1)
    return {"router": Check(run, (rows, rows, Input((5, r), 0.1, 1.0), *hidden, Input((r, classes), r**-0.5)), 2)}


ROUTER = Operation("router", router, _checks)


def _step_checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    """Return a check whose bias forces a choice, since rounding may decide between classes that are about as likely."""
    rows, classes = 32, np.arange(model.num_experts + 1)
    checks = _checks(model, training, np.where(classes == 1, np.float32(10), 0), np.arange(rows) % 5 != 0)
    few = [Input((rows, model.router_size))] * 2
    return {name: check._replace(inputs=(*few, *check.inputs[2:]), rows=0, gradient=False)
            for name, check in checks.items()}  # fmt: skip


_STEP = Kernel("pallas", _step, _step_unsupported, ("router_step",))
ROUTER_STEP = Operation("router_step", router_step, _step_checks, (_STEP,), step_of="router",
                        shape=lambda x, *_: (x.size // x.shape[-1], x.shape[-1]))  # fmt: skip
