"""The router after its down-projection, from depth averaging to the choice of a class, for a few tokens in one launch.

Both hidden layers share a loop over the first one's outputs, since a part of a tile in registers cannot be the operand
of a product. Tokens are independent: each product, norm and softmax reduces over one row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.launch import Out, launch, load, store
from pallas_kernels.product import product
from pallas_kernels.tiles import Architecture, tile


def router_step(
    projected_tr: jax.Array, state_tr: jax.Array, weights: Any, bias_c: jax.Array, real_t: jax.Array, *, eps: float,
    architecture: Architecture,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Return class, int32 [t], and probability, fp32 [t], of each token, and the new state, fp32 [t, r].

    `weights` are an `ops.router.RouterWeights`, matrices in bf16 or fp32, all of the same; `bias_c` is the balancing
    bias. The last class is skip, whose probability is given as 0; tokens where the int32 `real_t` is 0 get it, too.
    """
    (t, r), cut = state_tr.shape, tile("router_step", architecture, weights.output_rc.dtype)
    kernel = functools.partial(_kernel, rows=cut.sizes[0], depth=min(cut.sizes[1], r), eps=eps)
    out = Out((t,), jnp.int32), Out((t,), jnp.float32), Out((t, r), jnp.float32)
    arrays = projected_tr, state_tr, weights, bias_c, real_t
    return launch("router_step", kernel, arrays, out, (pl.cdiv(t, cut.sizes[0]),), cut, architecture)


def _kernel(
    projected_ref: Any, before_ref: Any, x: Any, bias_ref: Any, real_ref: Any, class_ref: Any, weight_ref: Any,
    state_ref: Any, *, rows: int, depth: int, eps: float,
) -> None:  # fmt: skip
    (t, r), dtype, classes = state_ref.shape, x.output_rc.dtype, x.output_rc.shape[1]
    row, every = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32), jnp.arange(r, dtype=jnp.int32)
    at, inside = (row[:, None], every[None, :]), jnp.broadcast_to((row < t)[:, None], (rows, r))

    def vector(ref: Any, index: jax.Array = every) -> jax.Array:
        return load(ref.at[index], mask=index < ref.shape[0]).astype(jnp.float32)[None, :]

    def rounded(values: jax.Array) -> jax.Array:
        return values.astype(dtype).astype(jnp.float32)

    projected, before = (load(ref.at[at], mask=inside) for ref in (projected_ref, before_ref))
    state = projected + vector(x.down_bias_r) + before * vector(x.state_scale_r)
    store(state_ref.at[at], state, mask=inside)
    exact = rounded(state)
    root = jax.lax.rsqrt((exact * exact).sum(1, keepdims=True) / r + eps)
    normed = (rounded(vector(x.norm_r)) * rounded(exact * root)).astype(dtype)

    def hidden(i: jax.Array, total: jax.Array) -> jax.Array:
        inner = i * depth + jnp.arange(depth, dtype=jnp.int32)
        first = product(normed, load(x.hidden1_rr.at[every[:, None], inner[None, :]]))
        first = _gelu(first + vector(x.hidden1_bias_r, inner)).astype(dtype)
        return total + product(first, load(x.hidden2_rr.at[inner[:, None], every[None, :]]))

    second = jax.lax.fori_loop(0, r // depth, hidden, jnp.zeros((rows, r), jnp.float32))
    second = _gelu(second + vector(x.hidden2_bias_r)).astype(dtype)
    lane = jnp.arange(max(pl.next_power_of_2(classes), 16), dtype=jnp.int32)
    exists = (lane < classes)[None, :]
    output = load(x.output_rc.at[every[:, None], lane[None, :]], mask=jnp.broadcast_to(exists, (r, lane.size)))
    logits = jnp.where(exists, product(second, output), -jnp.inf)
    exponential = jnp.exp(logits - logits.max(1, keepdims=True))
    probability = exponential / exponential.sum(1, keepdims=True)

    biased = jnp.where(exists, probability + vector(bias_ref, lane), -jnp.inf)
    chosen = jnp.argmax(biased, axis=1)  # ties, and rows of NaN, go to the lowest class
    own = (lane[None, :] == chosen[:, None]) & (lane < classes - 1)[None, :]
    real = load(real_ref.at[row], mask=row < t) != 0
    store(class_ref.at[row], jnp.where(real, chosen, classes - 1), mask=row < t)
    store(weight_ref.at[row], jnp.where(own, probability, 0.0).sum(1), mask=row < t)


def _gelu(x: jax.Array) -> jax.Array:
    """Compute GELU with erf within 1.5e-7, since Pallas has none (Abramowitz and Stegun, 7.1.26)."""
    size = jnp.abs(x) * 0.5**0.5
    fraction, total = 1 / (1 + 0.3275911 * size), jnp.zeros_like(x)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        total = (total + factor) * fraction
    erf = 1 - total * jnp.exp(-size * size)
    return x * (0.5 + 0.5 * jnp.where(x < 0, -erf, erf))
