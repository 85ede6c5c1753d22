"""Kernels of `pallas_kernels` in Triton's language: what replaces Pallas' Triton backend on AMD when jax removes it.

Arrays, tiles and results are those of the Pallas kernels of the same names, whose modules explain them. Pointers that
are None stand for arrays that are missing. Only tests use these kernels.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
HIDDEN: tl.constexpr = tl.constexpr(-1e30)
FLOOR: tl.constexpr = tl.constexpr(-1e20)


@triton.jit
def _rows_at(ref, row, column, inside, width):
    return tl.load(ref + row * width + column, mask=inside, other=0).to(tl.float32)


@triton.jit
def _vector_at(ref, column, width):
    return tl.load(ref + column, mask=column < width, other=0).to(tl.float32)


@triton.jit
def residual_norm_forward(
    output, stream, output_scale, output_bias, stream_scale, stream_bias, weight, new_ref, normed_ref,
    tokens, width: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """One program for `rows` tokens of a row of `lanes` columns, of which `width` exist."""
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None]
    column = tl.arange(0, lanes)[None, :]
    inside = (row < tokens) & (column < width)
    dtype = normed_ref.dtype.element_ty
    out = _rows_at(output, row, column, inside, width) + _vector_at(output_bias, column, width)
    old = _rows_at(stream, row, column, inside, width) + _vector_at(stream_bias, column, width)
    new = out * _vector_at(output_scale, column, width) + old * _vector_at(stream_scale, column, width)
    tl.store(new_ref + row * width + column, new, mask=inside)
    exact = new.to(dtype).to(tl.float32)
    root = tl.rsqrt(tl.sum(exact * exact, axis=1, keep_dims=True) / width + eps)
    normed = _vector_at(weight, column, width).to(dtype).to(tl.float32) * (exact * root).to(dtype).to(tl.float32)
    tl.store(normed_ref + row * width + column, normed.to(dtype), mask=inside)


@triton.jit
def residual_norm_backward(
    output, stream, output_scale, output_bias, stream_scale, stream_bias, weight, d_new, d_normed,
    d_output, d_stream, partial_sums,
    tokens, steps, width: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """One program for `steps` × `rows` tokens, of whole rows; it writes its sums for the gradients of the parameters.

    In a plain sum the four vectors are None, and have no sums.
    """
    program = tl.program_id(0)
    column = tl.arange(0, lanes)[None, :]
    sums: tl.constexpr = 1 if output_scale is None else 4
    if output_scale is not None:
        scale_of_output = _vector_at(output_scale, column, width)
        scale_of_stream = _vector_at(stream_scale, column, width)
    d_weight = tl.zeros((rows, lanes), tl.float32)
    d_output_scale, d_stream_scale, d_sums = d_weight, d_weight, d_weight
    for step in range(steps):
        row = ((program * steps + step) * rows + tl.arange(0, rows))[:, None]
        inside = (row < tokens) & (column < width)
        old = _rows_at(stream, row, column, inside, width)
        out = _rows_at(output, row, column, inside, width)
        new = old + out
        if output_scale is not None:
            out, old = out + _vector_at(output_bias, column, width), old + _vector_at(stream_bias, column, width)
            new = out * scale_of_output + old * scale_of_stream
        d_sum = _rows_at(d_new, row, column, inside, width)
        dtype = d_normed.dtype.element_ty
        gradient = _rows_at(d_normed, row, column, inside, width)
        exact = new.to(dtype).to(tl.float32)
        weighted = (gradient * _vector_at(weight, column, width).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        square = tl.sum(exact * exact, axis=1, keep_dims=True) / width
        along = tl.sum(weighted * exact, axis=1, keep_dims=True) / width
        root = tl.rsqrt(square + eps)
        normed = exact * root
        d_sum += root * (weighted - normed * (along * root))
        d_weight += gradient * normed.to(dtype).to(tl.float32)
        d_out, d_old = d_sum, d_sum
        if output_scale is not None:
            d_out, d_old = d_sum * scale_of_output, d_sum * scale_of_stream
            d_output_scale += d_sum * out
            d_stream_scale += d_sum * old
            d_sums += d_sum
        tl.store(d_output + row * width + column, d_out.to(output.dtype.element_ty), mask=inside)
        tl.store(d_stream + row * width + column, d_old, mask=inside)
    place, exists = partial_sums + program * sums * width + column, column < width
    tl.store(place, tl.sum(d_weight, axis=0, keep_dims=True), mask=exists)
    if output_scale is not None:
        tl.store(place + width, tl.sum(d_output_scale, axis=0, keep_dims=True), mask=exists)
        tl.store(place + 2 * width, tl.sum(d_stream_scale, axis=0, keep_dims=True), mask=exists)
        tl.store(place + 3 * width, tl.sum(d_sums, axis=0, keep_dims=True), mask=exists)


@triton.jit
def grouped_product(
    tiles, x, w, order, scale, out, tile_rows, rows,
    groups: tl.constexpr, p: tl.constexpr, q: tl.constexpr, transpose: tl.constexpr, together: tl.constexpr,
    chiplets: tl.constexpr, m: tl.constexpr, n: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """One program for a tile of `m` sorted rows of one group and `n` columns; sums in steps of `depth`.

    It contracts p, and has q columns, with `transpose` of the transposed matrices.
    """
    columns: tl.constexpr = (q + n - 1) // n
    down: tl.constexpr = 1 if transpose else q  # elements from one contracted place of a matrix to the next
    across: tl.constexpr = p if transpose else 1
    each: tl.constexpr = together * columns
    block, at = tl.program_id(0) // each, tl.program_id(0) % each
    if chiplets > 1 and each % chiplets == 0:
        at = at % chiplets * (each // chiplets) + at // chiplets
    index, column = block * together + at % together, at // together * n + tl.arange(0, n)
    group, first = tl.load(tiles + index), tl.load(tiles + tile_rows + index)
    end, layer = tl.load(tiles + 2 * tile_rows + index), tl.load(tiles + 3 * tile_rows + index)
    row = first + tl.arange(0, m)
    inside, fits = row < end, column < q
    read = tl.where(inside, row, 0).to(tl.int64)[:, None] * p
    matrix = w + (layer * groups + tl.minimum(group, groups - 1)).to(tl.int64) * (p * q)
    total = tl.zeros((m, n), tl.float32)
    for i in range(tl.where(group < groups, (p + depth - 1) // depth, 0)):
        inner = i * depth + tl.arange(0, depth)
        if p % depth == 0 and q % n == 0:
            a = tl.load(x + read + inner[None, :])
            b = tl.load(matrix + inner[:, None] * down + column[None, :] * across)
        else:
            exists = inner < p
            a = tl.load(x + read + inner[None, :], mask=exists[None, :], other=0)
            exists_there = exists[:, None] & fits[None, :]
            b = tl.load(matrix + inner[:, None] * down + column[None, :] * across, mask=exists_there, other=0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if order is not None:
        row = tl.load(order + row, mask=inside, other=rows)
    if scale is not None:
        total = total * tl.load(scale + row, mask=inside, other=0)[:, None]
    written = out + row.to(tl.int64)[:, None] * q + column[None, :]
    tl.store(written, total.to(out.dtype.element_ty), mask=inside[:, None] & fits[None, :])


@triton.jit
def _attend(
    top, total, acc, q, index, position, segment, k_ref, v_ref, key_segments, batch, head, t,
    kv_heads: tl.constexpr, c: tl.constexpr, keys: tl.constexpr, window: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Update the online softmax with tile `index` of keys."""
    key = index * keys + tl.arange(0, keys)
    at = ((batch * t + key).to(tl.int64) * kv_heads + head)[:, None] * c + tl.arange(0, c)[None, :]
    k = tl.load(k_ref + at, mask=(key < t)[:, None], other=0) if masked else tl.load(k_ref + at)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (LOG2_E / c**0.5)
    if masked:
        documents = tl.load(key_segments + batch * t + key, mask=key < t, other=0)
        last = tl.where(segment != 0, position, -1)
        seen = (key[None, :] <= last[:, None]) & (documents[None, :] == segment[:, None])
        if window is not None:
            seen &= key[None, :] > (position - window)[:, None]
        scores = tl.where(seen, scores, HIDDEN)
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp2(scores - new_top[:, None])
    keep = tl.exp2(top - new_top)
    v = tl.load(v_ref + at, mask=(key < t)[:, None], other=0) if masked else tl.load(v_ref + at)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return new_top, total * keep + tl.sum(p, 1), acc


@triton.jit
def attention(
    offset_ref, bounds, q_ref, k_ref, v_ref, query_segments, key_segments, o_ref, lse_ref, s, t,
    heads: tl.constexpr, kv_heads: tl.constexpr, c: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    window: tl.constexpr,
):  # fmt: skip
    """One program for a tile of `rows`, queries × the heads that share a key head; it visits tiles of `keys`."""
    groups: tl.constexpr = heads // kv_heads
    batch, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    row = index * rows + tl.arange(0, rows)
    query, inside = row // groups, row < s * groups
    own = (batch * s + query) * heads + head * groups + row % groups
    at = own.to(tl.int64)[:, None] * c + tl.arange(0, c)[None, :]
    q = tl.load(q_ref + at, mask=inside[:, None], other=0)
    segment = tl.load(query_segments + batch * s + query, mask=inside, other=0)
    position = tl.load(offset_ref) + query
    place = bounds + (batch * tl.num_programs(1) + index) * 4
    low, start, stop, high = tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    top, total = tl.full((rows,), FLOOR, tl.float32), tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, c), tl.float32)
    for i in range(start, stop):
        top, total, acc = _attend(top, total, acc, q, i, position, segment, k_ref, v_ref, key_segments, batch, head, t,
                                  kv_heads, c, keys, window, False)  # fmt: skip
    before = start - low
    for i in range(before + high - stop):
        tile = tl.where(i < before, low + i, stop - before + i)
        top, total, acc = _attend(top, total, acc, q, tile, position, segment, k_ref, v_ref, key_segments, batch, head,
                                  t, kv_heads, c, keys, window, True)  # fmt: skip
    safe = tl.where(total == 0, 1.0, total)
    tl.store(o_ref + at, (acc / safe[:, None]).to(o_ref.dtype.element_ty), mask=inside[:, None])
    lse = tl.where(total == 0, FLOOR, (top + tl.log2(safe)) * LN_2)
    tl.store(lse_ref + own, lse, mask=inside)
