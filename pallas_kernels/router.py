"""The router after its down-projection: depth averaging, norm, three-layer MLP and softmax, in one kernel.

A program processes a tile of tokens. The hidden layers are computed a range of columns at a time: a range of the first
layer's output is a range of what the second layer sums over, so that no program holds more than two tiles of the full
width, and shared memory never holds a whole matrix.

The gradient recomputes the forward pass. It writes the inputs and the output gradients of the three matmuls, from which
matmuls over all tokens give the gradients of the matrices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.launch import launch
from pallas_kernels.product import product
from pallas_kernels.tiles import tile

CLASSES = 32  # lanes of the classes; more are not supported
# erf(x) = x · P(x²) / Q(x²), from the highest power down, for |x| < 4 (Eigen's coefficients, as in XLA).
_P = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
      -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)  # fmt: skip
_Q = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02)


class RouterArrays(NamedTuple):
    """Inputs of the router; r is a power of two. Matrices have the compute dtype, vectors any floating dtype."""

    projected_tr: jax.Array
    state_tr: jax.Array
    down_bias_r: jax.Array
    state_scale_r: jax.Array
    norm_r: jax.Array
    hidden1_rr: jax.Array
    hidden1_bias_r: jax.Array
    hidden2_rr: jax.Array
    hidden2_bias_r: jax.Array
    output_rc: jax.Array


class RouterGradients(NamedTuple):
    """Results of `router_backward`."""

    projected_tr: jax.Array  # gradient of the projection, in the compute dtype
    state_tr: jax.Array  # gradient of the previous state, fp32
    # gradients of `down_bias_r`, `state_scale_r`, `norm_r`, `hidden1_bias_r` and `hidden2_bias_r`, fp32
    vectors_vr: jax.Array
    inputs_2tr: jax.Array  # inputs of the hidden layers, in the compute dtype
    hidden_2tr: jax.Array  # gradients of the hidden layers' outputs
    last_tr: jax.Array  # input of the output layer
    logits_tc: jax.Array  # gradients of the logits, with `CLASSES` columns


def router_forward(x: RouterArrays, *, eps: float, architecture: str) -> tuple[jax.Array, jax.Array]:
    """Compute the fp32 probabilities [t, c] of the classes, and the new fp32 state [t, r].

    Args:
      x: the inputs, with projection and state in fp32; the new state reuses the state's memory.
      eps: added to the mean square in the norm.
      architecture: see `launch`.
    """
    (t, r), classes = x.state_tr.shape, x.output_rc.shape[1]
    cut = tile("router", architecture, x.hidden1_rr.dtype)
    tokens, columns = cut.sizes
    out = (jax.ShapeDtypeStruct((t, classes), jnp.float32), jax.ShapeDtypeStruct((t, r), jnp.float32))
    probability_tc, state_tr = launch(
        functools.partial(_forward_kernel, tokens=tokens, columns=min(columns, r), eps=eps),
        *x,
        name="router_forward", grid=(pl.cdiv(t, tokens),), out_shape=out, aliases={1: 1},
        warps=cut.warps, stages=cut.stages, architecture=architecture,
    )  # fmt: skip
    return probability_tc, state_tr


def router_backward(
    x: RouterArrays, probability_tc: jax.Array, d_probability_tc: jax.Array, d_state_tr: jax.Array, *, eps: float,
    architecture: str,
) -> RouterGradients:  # fmt: skip
    """Compute the gradients of the inputs, and the factors of those of the matrices.

    Args:
      x: as in `router_forward`.
      probability_tc: result of `router_forward`.
      d_probability_tc: its gradient, fp32.
      d_state_tr: gradient of the new state, fp32; that of the state reuses its memory.
      eps: as in `router_forward`.
      architecture: see `launch`.
    """
    (t, r), dtype = x.state_tr.shape, x.hidden1_rr.dtype
    cut = tile("router_backward", architecture, dtype)
    tokens, columns = cut.sizes
    programs = pl.cdiv(t, tokens)

    def out(*shape: int, kind: jax.typing.DTypeLike = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind)

    exact = jnp.float32
    gradients = RouterGradients(*launch(
        functools.partial(_backward_kernel, tokens=tokens, columns=min(columns, r), eps=eps),
        *x, probability_tc, d_probability_tc, d_state_tr,
        name="router_backward", grid=(programs,),
        out_shape=[out(t, r), out(t, r, kind=exact), out(programs, 5, r, kind=exact), out(2, t, r), out(2, t, r),
                   out(t, r), out(t, CLASSES)],
        warps=cut.warps, stages=cut.stages, aliases={len(x) + 2: 1}, architecture=architecture,
    ))  # fmt: skip
    return gradients._replace(vectors_vr=gradients.vectors_vr.sum(0))


class _Tile(NamedTuple):
    """Indices of the tokens and channels of a program; all broadcast to [tokens, r]."""

    number: jax.Array  # of the program
    row: jax.Array  # [tokens, 1]
    channel: jax.Array  # [1, r]
    inside: jax.Array  # whether the token exists

    def load(self, ref: Any) -> jax.Array:
        """Load [tokens, r] in fp32; zero outside."""
        return triton.load(ref.at[self.row, self.channel], mask=self.inside, other=0).astype(jnp.float32)

    def vector(self, ref: Any) -> jax.Array:
        """Load a vector, fp32 [1, r]."""
        return triton.load(ref.at[self.channel]).astype(jnp.float32)

    def store(self, ref: Any, value: jax.Array, *first: int) -> None:
        """Store [tokens, r]."""
        triton.store(ref.at[(*first, self.row, self.channel)], value.astype(ref.dtype), mask=self.inside)


def _tile(tokens: int, shape: tuple[int, int]) -> _Tile:
    number = pl.program_id(0)
    row = (number * tokens + jnp.arange(tokens, dtype=jnp.int32))[:, None]
    channel = jnp.arange(shape[1], dtype=jnp.int32)[None, :]
    return _Tile(number, row, channel, jnp.broadcast_to(row < shape[0], (tokens, shape[1])))


class _Normed(NamedTuple):
    """The state and its norm, fp32; `exact` is the state rounded to the compute dtype, `root` 1 / its RMS."""

    state: jax.Array
    exact: jax.Array
    root: jax.Array
    out: jax.Array


def _normed(x: Any, own: _Tile, eps: float, dtype: jax.typing.DTypeLike) -> _Normed:
    state = own.load(x.projected_tr) + own.vector(x.down_bias_r) + own.load(x.state_tr) * own.vector(x.state_scale_r)
    exact = state.astype(dtype).astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.sum(exact * exact, axis=1, keepdims=True) / exact.shape[1] + eps)
    out = own.vector(x.norm_r).astype(dtype) * (exact * root).astype(dtype)
    return _Normed(state, exact, root, out)


def _erf(x: jax.Array) -> jax.Array:
    x = jnp.clip(x, -4.0, 4.0)
    square = x * x
    above, below = (functools.reduce(lambda total, c: total * square + c, rest, jnp.full_like(x, first))
                    for first, *rest in (_P, _Q))  # fmt: skip
    return x * above / below


def _gelu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the exact GELU of x and its derivative."""
    below = 0.5 + 0.5 * _erf(x * 0.7071067811865476)
    return x * below, below + x * jnp.exp(-0.5 * x * x) * 0.3989422804014327


def _over_columns(x: Any, normed: jax.Array, columns: int, step: Callable[..., Any], state: Any) -> Any:
    """Call `step(column, z, w1, state)` with each range of the first hidden layer's output and its matrix."""
    r = normed.shape[1]

    def one(index: jax.Array, state: Any) -> Any:
        column = index * columns + jnp.arange(columns, dtype=jnp.int32)
        w1 = triton.load(x.hidden1_rr.at[jnp.arange(r, dtype=jnp.int32)[:, None], column[None, :]])
        bias = triton.load(x.hidden1_bias_r.at[column]).astype(jnp.float32)
        return step(column, product(normed, w1) + bias[None, :], w1, state)

    return jax.lax.fori_loop(0, r // columns, one, state)


def _second(x: Any, own: _Tile, normed: jax.Array, columns: int) -> jax.Array:
    """Compute the second hidden layer before its GELU, fp32 [tokens, r]."""
    channel = jnp.arange(normed.shape[1], dtype=jnp.int32)

    def step(column: jax.Array, z: jax.Array, _: jax.Array, total: jax.Array) -> jax.Array:
        w2 = triton.load(x.hidden2_rr.at[column[:, None], channel[None, :]])
        return total + product(_gelu(z)[0].astype(w2.dtype), w2)

    total = _over_columns(x, normed, columns, step, jnp.zeros(normed.shape, jnp.float32))
    return total + own.vector(x.hidden2_bias_r)


def _output(x: Any) -> jax.Array:
    """Load the matrix of the output layer, [r, CLASSES]; zero in lanes without a class."""
    r, classes = x.output_rc.shape
    lane = jnp.arange(CLASSES, dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(lane < classes, (r, CLASSES))
    return triton.load(x.output_rc.at[jnp.arange(r, dtype=jnp.int32)[:, None], lane], mask=mask, other=0)


def _forward_kernel(*refs: Any, tokens: int, columns: int, eps: float) -> None:
    count = len(RouterArrays._fields)
    x: Any = RouterArrays(*refs[:count])
    probability_ref, state_ref = refs[count:]
    own = _tile(tokens, x.state_tr.shape)
    normed = _normed(x, own, eps, x.hidden1_rr.dtype)
    own.store(state_ref, normed.state)
    last = _gelu(_second(x, own, normed.out, columns))[0]
    lane = jnp.arange(CLASSES, dtype=jnp.int32)[None, :]
    logits = jnp.where(lane < probability_ref.shape[1], product(last.astype(x.output_rc.dtype), _output(x)), -jnp.inf)
    odds = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    mask = (own.row < x.state_tr.shape[0]) & (lane < probability_ref.shape[1])
    triton.store(probability_ref.at[own.row, lane], odds / jnp.sum(odds, axis=1, keepdims=True), mask=mask)


def _backward_kernel(*refs: Any, tokens: int, columns: int, eps: float) -> None:
    count = len(RouterArrays._fields)
    x: Any = RouterArrays(*refs[:count])
    probability_ref, d_probability_ref, d_state_ref = refs[count : count + 3]
    out: Any = RouterGradients(*refs[count + 3 :])
    (t, r), classes, dtype = x.state_tr.shape, x.output_rc.shape[1], x.hidden1_rr.dtype
    own, channel = _tile(tokens, (t, r)), jnp.arange(r, dtype=jnp.int32)
    normed = _normed(x, own, eps, dtype)
    own.store(out.inputs_2tr, normed.out, 0)

    lane = jnp.arange(CLASSES, dtype=jnp.int32)[None, :]
    mask = (own.row < t) & (lane < classes)
    probability, d_probability = (
        triton.load(ref.at[own.row, lane], mask=mask, other=0) for ref in (probability_ref, d_probability_ref)
    )
    along = jnp.sum(probability * d_probability, axis=1, keepdims=True)
    d_logits = (probability * (d_probability - along)).astype(dtype)
    triton.store(out.logits_tc.at[own.row, lane], d_logits, mask=jnp.broadcast_to(own.row < t, d_logits.shape))

    last, slope = _gelu(_second(x, own, normed.out, columns))
    own.store(out.last_tr, last)
    d_second = product(d_logits, _output(x), (1, 1)) * slope
    own.store(out.hidden_2tr, d_second, 1)
    _sum_rows(out, own, 4, d_second)
    rounded = d_second.astype(dtype)

    def step(column: jax.Array, z: jax.Array, w1: jax.Array, d_normed: jax.Array) -> jax.Array:
        w2 = triton.load(x.hidden2_rr.at[column[:, None], channel[None, :]])
        first, slope = _gelu(z)
        d_first = product(rounded, w2, (1, 1)) * slope
        at, here = (own.row, column[None, :]), jnp.broadcast_to(own.row < t, z.shape)
        triton.store(out.inputs_2tr.at[(1, *at)], first.astype(dtype), mask=here)
        triton.store(out.hidden_2tr.at[(0, *at)], d_first.astype(dtype), mask=here)
        triton.store(out.vectors_vr.at[own.number, 3, column], jnp.sum(d_first, axis=0))
        return d_normed + product(d_first.astype(dtype), w1, (1, 1))

    d_out = _over_columns(x, normed.out, columns, step, jnp.zeros((tokens, r), jnp.float32))
    unit = normed.exact * normed.root
    _sum_rows(out, own, 2, d_out * unit.astype(dtype).astype(jnp.float32))
    d_unit = d_out * own.vector(x.norm_r)
    inward = jnp.sum(d_unit * unit, axis=1, keepdims=True) / r
    d_state = own.load(d_state_ref) + (d_unit - unit * inward) * normed.root
    own.store(out.projected_tr, d_state)
    own.store(out.state_tr, d_state * own.vector(x.state_scale_r))
    _sum_rows(out, own, 0, d_state)
    _sum_rows(out, own, 1, d_state * own.load(x.state_tr))


def _sum_rows(out: Any, own: _Tile, vector: int, value: jax.Array) -> None:
    """Store the sum over the tile's tokens; what is outside must be zero."""
    triton.store(out.vectors_vr.at[own.number, vector, own.channel], jnp.sum(value, axis=0, keepdims=True))
