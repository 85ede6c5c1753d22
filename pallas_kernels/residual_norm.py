"""Residual scaling and RMSNorm in one pass over the rows, and their gradients in another.

Rows are padded to a power of two of lanes, in registers only. The forward pass reads a sublayer's output and the
residual stream, and writes the new stream and its norm. The backward pass reads output and stream again, since the
gradients of both scales need them, and recomputes the new stream and its root mean square from them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.launch import Out, launch, load, store
from pallas_kernels.tiles import Architecture, Tile, tile

WIDEST = 8192  # maximum lanes that a program of 1,024 threads can hold in registers


class Cut(NamedTuple):
    """The split of an array over programs."""

    parts: int  # number of parts of the columns; each program has one
    programs: int  # number of programs along the rows
    steps: int  # steps of a program
    rows: int  # rows of a step; program p starts at row p · steps · rows
    lanes: int  # columns of a part, padded to a power of two
    tile: Tile  # warps of a program


class Inputs(NamedTuple):
    """Arrays of the forward pass, or references to them in a kernel."""

    output_td: Any  # output of a sublayer, bf16 or fp32
    stream_td: Any  # residual stream, fp32
    vectors_d: Any  # scale and bias of the output, scale and bias of the stream; empty for a plain sum
    weight_d: Any  # weight of the norm
    layer: Any = None  # int32 [1], index in `output_td` for the backward pass if that has all layers, [l, t, d]


def forward_cut(tokens: int, width: int, dtype: jax.typing.DTypeLike, architecture: Architecture) -> Cut:
    """Split for the forward pass: one step per program; the vectors are read from cache."""
    (elements,), warps, _ = tile("residual_norm", architecture, dtype)
    lanes = pl.next_power_of_2(width)
    rows = max(elements // lanes, 1)
    return Cut(1, pl.cdiv(tokens, rows), 1, rows, lanes, Tile((), warps * max(lanes // elements, 1)))


def backward_cut(tokens: int, width: int, dtype: jax.typing.DTypeLike, architecture: Architecture) -> Cut:
    """Split for the backward pass: few programs with many rows, since each writes partial sums of all gradients."""
    (elements, programs, fewest, widest), warps, _ = tile("residual_norm_backward", architecture, dtype)
    lanes = min(pl.next_power_of_2(width), widest)
    rows = max(elements // lanes, 1)
    steps = pl.cdiv(max(pl.cdiv(tokens, programs), fewest), rows)
    cut = pl.cdiv(width, lanes), pl.cdiv(tokens, steps * rows)
    return Cut(*cut, steps, rows, lanes, Tile((), warps * max(lanes // elements, 1)))


def residual_norm_forward(
    x: Inputs, *, eps: float, dtype: jax.typing.DTypeLike, architecture: Architecture
) -> tuple[jax.Array, jax.Array]:
    """Compute the new residual stream [t, d], fp32, and its norm [t, d] in `dtype`, bf16 or fp32.

    `eps` is added to the mean square.
    """
    shape: tuple[int, int] = x.stream_td.shape
    cut = forward_cut(*shape, dtype, architecture)
    kernel, out = functools.partial(_forward_kernel, cut, eps), (Out(shape, jnp.float32), Out(shape, dtype))
    return launch("residual_norm_forward", kernel, (x,), out, (cut.programs,), cut.tile, architecture)


def residual_norm_backward(
    x: Inputs, d_new_td: jax.Array, d_normed_td: jax.Array, *, eps: float, architecture: Architecture
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of the inputs of `residual_norm_forward`.

    The gradient of the new stream is in fp32, that of the norm in its dtype. Returns gradients of `output_td` and
    `stream_td` in their dtypes, and of the parameters, fp32: the norm's weight, then `vectors_d` in order, [5, d], or
    [1, d] for a plain sum.
    """
    tokens, width = x.stream_td.shape
    cut = backward_cut(tokens, width, d_normed_td.dtype, architecture)
    like = tuple(Out(x.stream_td.shape, array.dtype) for array in (x.output_td, x.stream_td))
    out = (like, Out((cut.programs, 4 if x.vectors_d else 1, width), jnp.float32))
    kernel, arrays = functools.partial(_backward_kernel, cut, eps), (x, d_new_td, d_normed_td)
    grid = (cut.parts, cut.programs)
    (d_output, d_stream), partial_psd = launch(
        "residual_norm_backward", kernel, arrays, out, grid, cut.tile, architecture
    )
    sums_sd = partial_psd.sum(0)
    if x.vectors_d:
        # The gradient of a bias is the sum of its term's gradient, times the scale.
        d_weight, d_output_scale, d_stream_scale, d_sum = sums_sd
        output_scale, _, stream_scale, _ = (v.astype(jnp.float32) for v in x.vectors_d)
        sums_sd = jnp.stack([d_weight, d_output_scale, d_sum * output_scale, d_stream_scale, d_sum * stream_scale])
    return d_output, d_stream, sums_sd


class _Place(NamedTuple):
    """Indices of a step's elements, and the mask of those inside the array; all broadcast to [rows, lanes]."""

    row: jax.Array
    column: jax.Array
    inside: jax.Array

    def load(self, ref: Any, *layer: jax.Array) -> jax.Array:
        """Load the elements from `ref`, or its `layer`, in fp32; zero outside."""
        return load(ref.at[*layer, self.row, self.column], mask=self.inside).astype(jnp.float32)

    def vector(self, ref: Any) -> jax.Array:
        """Load the columns of a vector, fp32 [1, lanes]; zero outside."""
        return load(ref.at[self.column], mask=self.column < ref.shape[0]).astype(jnp.float32)

    def store(self, ref: Any, value: jax.Array) -> None:
        """Store the elements of `value` that are inside the array."""
        store(ref.at[self.row, self.column], value.astype(ref.dtype), mask=self.inside)


def _place(step: jax.Array, part: jax.Array | int, cut: Cut, shape: tuple[int, int]) -> _Place:
    row = (step * cut.rows + jnp.arange(cut.rows, dtype=jnp.int32))[:, None]
    column = (part * cut.lanes + jnp.arange(cut.lanes, dtype=jnp.int32))[None, :]
    return _Place(row, column, (row < shape[0]) & (column < shape[1]))


def _terms(output: jax.Array, stream: jax.Array, vectors: list[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return both terms before scaling, and the new stream."""
    if not vectors:
        return output, stream, output + stream
    output_scale, output_bias, stream_scale, stream_bias = vectors
    output, stream = output + output_bias, stream + stream_bias
    return output, stream, output * output_scale + stream * stream_scale


def _rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round `x` to `dtype`, and return it in fp32."""
    return x.astype(dtype).astype(jnp.float32)


def _mean(x: jax.Array, width: int) -> jax.Array:
    """Return the mean of each row; lanes outside must be zero."""
    return x.sum(1, keepdims=True) / width


class _Part(NamedTuple):
    """Inputs and intermediates of the backward pass for some rows and a part of the columns, fp32."""

    place: _Place  # indices and mask
    output: jax.Array  # the sublayer's output plus bias, before its scale
    stream: jax.Array  # the old stream plus bias, before its scale
    vectors: list[jax.Array]  # this part of the scales and biases
    d_new: jax.Array  # gradient of the new stream
    exact: jax.Array  # the new stream, rounded to the norm's dtype
    d_normed: jax.Array  # gradient of the norm
    weighted: jax.Array  # `d_normed` times the norm's weight
    square: jax.Array  # this part's share of the mean of `exact`²
    along: jax.Array  # this part's share of the mean of `weighted` · `exact`


def _forward_kernel(cut: Cut, eps: float, x: Inputs, new_ref: Any, normed_ref: Any) -> None:
    dtype = normed_ref.dtype
    place = _place(pl.program_id(0), 0, cut, x.stream_td.shape)
    vectors = [place.vector(ref) for ref in x.vectors_d]
    _, _, new = _terms(place.load(x.output_td), place.load(x.stream_td), vectors)
    place.store(new_ref, new)
    exact = _rounded(new, dtype)
    root = jax.lax.rsqrt(_mean(exact * exact, x.stream_td.shape[1]) + eps)
    place.store(normed_ref, _rounded(place.vector(x.weight_d), dtype) * _rounded(exact * root, dtype))


def _backward_kernel(
    cut: Cut, eps: float, x: Inputs, d_new_ref: Any, d_normed_ref: Any, d_terms: Any, partial_ref: Any
) -> None:
    (output_ref, stream_ref, vector_refs, weight_ref, layer_ref), (d_output_ref, d_stream_ref) = x, d_terms
    width, dtype = stream_ref.shape[1], d_normed_ref.dtype
    own, program = pl.program_id(0), pl.program_id(1)

    def read(number: jax.Array, part: jax.Array) -> _Part:
        place = _place(program * cut.steps + number, part, cut, stream_ref.shape)
        layer = () if layer_ref is None else (layer_ref[0],)
        output = place.load(output_ref, *layer)  # all loads are issued before the first sum
        stream, d_new, d_normed = [place.load(ref) for ref in (stream_ref, d_new_ref, d_normed_ref)]
        vectors = [place.vector(ref) for ref in vector_refs]
        output, stream, new = _terms(output, stream, vectors)
        exact = _rounded(new, dtype)
        weighted = _rounded(d_normed * _rounded(place.vector(weight_ref), dtype), dtype)
        means = _mean(exact * exact, width), _mean(weighted * exact, width)
        return _Part(place, output, stream, vectors, d_new, exact, d_normed, weighted, *means)

    def step(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        def add(k: jax.Array, means: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            other = read(number, (own + k) % cut.parts)
            return means[0] + other.square, means[1] + other.along

        none = jnp.zeros((cut.rows, 1), jnp.float32)
        square, along = jax.lax.fori_loop(1, cut.parts, add, (none, none))
        part = read(number, own)
        root = jax.lax.rsqrt(square + part.square + eps)
        normed = part.exact * root
        d_sum = part.d_new + root * (part.weighted - normed * ((along + part.along) * root))
        terms = (part.d_normed * _rounded(normed, dtype),)
        scales = (part.vectors[0], part.vectors[2]) if part.vectors else (1.0, 1.0)
        if part.vectors:
            terms = (*terms, d_sum * part.output, d_sum * part.stream, d_sum)
        part.place.store(d_output_ref, d_sum * scales[0])
        part.place.store(d_stream_ref, d_sum * scales[1])
        return tuple(total + term for total, term in zip(sums, terms, strict=True))

    nothing = jnp.zeros((cut.rows, cut.lanes), jnp.float32)
    sums = jax.lax.fori_loop(0, cut.steps, step, (nothing,) * partial_ref.shape[1])
    column = _place(program, own, cut, stream_ref.shape).column
    for index, total in enumerate(sums):
        store(partial_ref.at[program, index, column], total.sum(0, keepdims=True), mask=column < width)
