"""The kernels against the reference in double precision, their lowering, the tiles they visit."""

import functools
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention_tiles import AttentionInputs, ranges
from pallas_kernels.decode import decodes
from tests.helpers import assert_close, jit, seeds
from tests.kernel_helpers import kernel, lowered_kernels, shape
from zaya_jax.ops.attention import (
    PartialAttention,
    attention,
    combine,
    partial_attention,
    partial_attention_gradient,
)
from zaya_jax.ops.blockwise import FLOOR

EMULATED = kernel("attention", "interpret")
TILE = 16  # of rows and of keys, when interpreted
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
# Of the norm, or of that of ones where little is seen: of the output, of a gradient. In bf16 probabilities and their
# gradients are rounded before a product, and the output before the gradient is made from it.
TOLERANCE = {F32: (1e-5, 1e-4), BF16: (2e-2, 2e-2)}
FLASH = ["attention", "attention_backward_keys", "attention_backward_queries"]


class Case(typing.NamedTuple):
    """Sizes; `window` as in `attention`."""

    b: int
    s: int
    t: int
    h: int
    k: int
    c: int
    window: int | None
    dtype: typing.Any = F32


@st.composite
def documents(draw, rows: int, length: int, sizes=(1, 1, 3, TILE, TILE + 1, 2 * TILE + 3, 60)) -> np.ndarray:
    """int32 [rows, length], of such sizes: one token, within a tile, longer; padding in front, between and behind."""
    segments = np.zeros((rows, length), np.int32)
    for row in segments:
        at, number = 0, 0
        while at < length:
            number += 1
            size = draw(st.sampled_from(sizes))
            row[at : at + size] = 0 if draw(st.sampled_from([False, False, False, True])) else 3 * number
            at += size
    return segments


def draw_arrays(seed, case):
    """Queries, keys, values, the gradient of the output."""
    rng = np.random.default_rng(seed)
    heads = ((case.s, case.h), (case.t, case.k), (case.t, case.k), (case.s, case.h))
    return tuple(jnp.asarray(rng.normal(0, 1.5, (case.b, *size, case.c)), case.dtype) for size in heads)


def exact(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def check(ours, theirs, tolerance):
    """Returns the error, 1 for the largest that is allowed."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs)
    assert np.isfinite(ours).all()
    error, bound = np.linalg.norm(ours - theirs), tolerance * max(np.linalg.norm(theirs), np.sqrt(ours.size))
    assert error <= bound, (error, bound)
    return error / bound


def print_case(name, segments, *errors):
    """A line for `pytest -s`, of which benchmarks/soak_attention.json counts the cases."""
    empty = int((np.asarray(segments) == 0).all(1).sum())
    print(f"\n{name}: {empty} of {len(segments)} rows empty, error {max(errors):.3f} of the bound")


@functools.cache
def differentiated(emulated, window, segmented):
    function = EMULATED if emulated else attention

    def call(q, k, v, do, query_segments, key_segments, offset):
        segments = {"query_segments_bs": query_segments, "key_segments_bt": key_segments} if segmented else {}
        out, back = jax.vjp(lambda *x: function(*x, query_offset=offset, window=window, **segments), q, k, v)
        return out, back(do)

    return jit(call)


def equals_the_reference(data, seed, case, segmented=True):
    """Queries and keys are stretches of one sequence of documents, in any position to one another."""
    length = max(case.s, case.t) + TILE
    line = data.draw(documents(case.b, length))
    query, key = data.draw(st.integers(0, length - case.s)), data.draw(st.integers(0, length - case.t))
    query_segments, key_segments = line[:, query : query + case.s], line[:, key : key + case.t]
    arrays = draw_arrays(seed, case)
    rest = (query_segments, key_segments, np.int32(query - key))
    out, gradients = differentiated(True, case.window, segmented)(*arrays, *rest)
    chex.assert_type([out, *gradients], case.dtype)
    with jax.enable_x64(True):
        expected, expected_gradients = exact(differentiated(False, case.window, segmented)(*exact(arrays), *rest))
    errors = [check(out, expected, TOLERANCE[case.dtype][0])]
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        errors.append(check(ours, theirs, TOLERANCE[case.dtype][1]))
    if segmented:
        assert not np.any(np.asarray(out)[query_segments == 0]), "padding attends to nothing"
        assert not np.any(np.asarray(gradients[1])[key_segments == 0])
    print_case(f"pallas {case.dtype}", query_segments if segmented else np.ones_like(query_segments), *errors)


@settings(max_examples=6)
@given(data=st.data(), seed=seeds())
def test_equals_the_reference(data, seed):
    equals_the_reference(data, seed, Case(1, 21, 39, 6, 2, 16, TILE + 1, BF16))


@pytest.mark.soak
@given(data=st.data(), seed=seeds())
def test_equals_the_reference_in_any_shape(data, seed):
    k, groups = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2, 3, 4]))
    window = data.draw(st.sampled_from([None, None, 1, TILE - 1, TILE, TILE + 1, 200]))
    s, t = data.draw(st.sampled_from([1, 7, 16, 40])), data.draw(st.sampled_from([5, 16, 33, 64]))
    b, c = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([16, 32, 64]))
    case = Case(b, s, t, k * groups, k, c, window, data.draw(st.sampled_from([F32, BF16])))
    equals_the_reference(data, seed, case, data.draw(st.booleans()))


joined = jit(combine)


@functools.cache
def partial():
    """Jitted kernels, then references, of a part and of its gradient."""
    names = ("partial_attention", "partial_attention_gradient")
    functions = (*(kernel(name, "interpret") for name in names), partial_attention, partial_attention_gradient)
    return [jit(f) for f in functions]


@settings(max_examples=3)
@given(data=st.data(), seed=seeds())
def test_parts_of_the_keys_join_to_the_whole(data, seed):
    case = Case(1, 42, 40, 2, 1, 16, None)
    part, gradient, part_reference, gradient_reference = partial()
    q, k, v, do = map(np.asarray, draw_arrays(seed, case))
    segments = data.draw(documents(1, case.s))
    halves = [(k, v, segments[:, : case.t], np.int32(0)), (k[:, ::-1], v, segments[:, 2:], np.int32(-2)),
              (v, k, segments[:, : case.t], np.int32(-case.t))]  # fmt: skip
    whole = PartialAttention(np.zeros_like(q), np.full(q.shape[:3], FLOOR, np.float32))
    for key, value, key_segments, offset in halves:
        arguments = (AttentionInputs(q, key, value, segments, key_segments, offset, case.window),)
        ours = jax.device_get(part(*arguments))
        chex.assert_type([*ours], jnp.float32)
        with jax.enable_x64(True):
            expected = exact(part_reference(*exact(arguments)))
        check(ours.o_bshc, expected.o_bshc, 1e-5)
        seen = np.asarray(expected.lse_bsh) > FLOOR / 2
        assert_close(ours.lse_bsh[seen], expected.lse_bsh[seen], 1e-5)
        assert (ours.lse_bsh[~seen] <= FLOOR / 2).all()
        whole = joined(whole, ours)
    for key, value, key_segments, offset in halves:
        arguments = (AttentionInputs(q, key, value, segments, key_segments, offset, case.window), whole, do)
        with jax.enable_x64(True):
            expected = exact(gradient_reference(*exact(arguments)))
        for ours, theirs in zip(gradient(*arguments), expected, strict=True):
            assert ours.dtype == jnp.float32
            check(ours, theirs, 1e-4)


@functools.cache
def decoded(emulated, window):
    function = EMULATED if emulated else attention

    def call(q, k, v, query_segments, key_segments, offset):
        return function(q, k, v, query_segments_bs=query_segments, key_segments_bt=key_segments, query_offset=offset,
                        window=window)  # fmt: skip

    return jit(call)


@settings(max_examples=5)
@given(seed=seeds(), ends=st.lists(st.sampled_from([0, 1, TILE - 1, TILE, 70, 149]), min_size=3, max_size=3))
def test_rows_of_a_decode_step_have_lengths_of_their_own(seed, ends):
    """Only keys of a row's own tiles are read, and other rows' lengths do not change its bits."""
    case = Case(3, 1, 150, 6, 2, 16, None)
    q, k, v, _ = draw_arrays(seed, case)
    offset_b, places = np.array(ends, np.int32), np.arange(case.t)
    query_segments, key_segments = np.ones((3, 1), np.int32), (places <= offset_b[:, None]).astype(np.int32)
    with jax.enable_x64(True):
        expected = exact(decoded(False, None)(*exact((q, k, v)), query_segments, key_segments, offset_b))
    past = places >= -(-(offset_b[:, None] + 1) // TILE) * TILE
    k, v = (np.where(past[:, :, None, None], np.float32(np.nan), x) for x in (k, v))
    out = decoded(True, None)(q, k, v, query_segments, key_segments, offset_b)
    check(out, expected, TOLERANCE[F32][0])
    others = np.where(np.arange(3) == 1, offset_b, 3)
    alike = decoded(True, None)(q, k, v, query_segments, key_segments, np.minimum(others, offset_b))
    np.testing.assert_array_equal(alike[1], out[1])


@pytest.mark.parametrize("window", [None, pytest.param(TILE + 1, marks=pytest.mark.soak)])
@settings(max_examples=5)
@given(data=st.data(), seed=seeds())
def test_a_decode_reads_what_is_written_and_visible_alone(window, data, seed):
    case = Case(2, 3, 150, 6, 2, 16, window)
    q, k, v, _ = draw_arrays(seed, case)
    assert decodes(AttentionInputs(q, k, v))
    offset = data.draw(st.sampled_from([0, 1, TILE - 2, TILE, 70, case.t - case.s]))
    key_segments = data.draw(documents(case.b, case.t))
    query_segments = key_segments[:, offset : offset + case.s]
    rest = (query_segments, key_segments, np.int32(offset))
    with jax.enable_x64(True):
        expected = exact(decoded(False, window)(*exact((q, k, v)), *rest))
    places = np.arange(case.t)
    past = places >= -(-(offset + case.s) // TILE) * TILE
    if window is not None:
        past |= places < (offset - window + 1) // TILE * TILE
    k, v = (np.where(past[None, :, None, None], np.float32(np.nan), x) for x in (k, v))
    check(decoded(True, window)(q, k, v, *rest), expected, 1e-5)


@functools.cache
def jitted_ranges(sizes, window, of_keys):
    def tiles(q_seg, k_seg, offset):
        q, k = np.zeros((2, 33, 3, 1)), np.zeros((2, 40, 1, 1))
        return ranges(AttentionInputs(q, k, k, q_seg, k_seg, offset, window), sizes, of_keys=of_keys)

    return jit(tiles)


@pytest.mark.parametrize("window", [None, 5, *(pytest.param(w, marks=pytest.mark.soak) for w in (1, 3, 4, 90))])
@given(data=st.data())
def test_tiles_that_are_visited_are_those_with_something_to_see(window, data):
    b, s, t, groups, rows, keys = 2, 33, 40, 3, 8, 4
    offset = data.draw(st.integers(-t, t))
    line = data.draw(documents(b, 3 * t))
    query_segments, key_segments = line[:, t + offset :][:, :s], line[:, t : 2 * t]
    position, key = offset + np.arange(s)[:, None], np.arange(t)[None, :]
    seen = (key <= position) & (key > position - (window or 10**6))
    seen = seen & (query_segments[:, :, None] == key_segments[:, None]) & (query_segments[:, :, None] != 0)
    seen = np.repeat(seen, groups, axis=1)
    tiles = [[seen[:, i : i + rows, j : j + keys] for j in range(0, t, keys)] for i in range(0, s * groups, rows)]
    some = np.array([[tile.any((1, 2)) for tile in across] for across in tiles])
    whole = np.array([[tile.all((1, 2)) for tile in across] for across in tiles])
    for of_keys in (False, True):
        found = jitted_ranges((rows, keys), window, of_keys)(query_segments, key_segments, np.int32(offset))
        for row in range(b):
            for i, (low, start, stop, high) in enumerate(np.asarray(found[row])):
                some_i, whole_i = (x[:, i, row] if of_keys else x[i, :, row] for x in (some, whole))
                assert 0 <= low <= start <= stop <= high <= some_i.size
                assert not some_i[:low].any(), "what is seen is visited"
                assert not some_i[high:].any(), "what is seen is visited"
                assert whole_i[start:stop].all(), "without a mask all must be visible"


def test_of_contiguous_documents_no_tile_of_another_is_visited():
    segments = np.repeat(np.arange(1, 5), 32)[None].astype(np.int32)
    q, k = np.zeros((1, 128, 4, 1)), np.zeros((1, 128, 1, 1))
    found = jit(lambda x: ranges(AttentionInputs(q, k, k, x, x), (32, 8)))(segments)
    first = np.arange(16) * 8  # a tile of rows spans 8 queries
    low, start, stop, high = np.asarray(found[0]).T
    np.testing.assert_array_equal(low, first // 32 * 4)
    np.testing.assert_array_equal(high, first // 8 + 1)
    np.testing.assert_array_equal(high - low - (stop - start), 1, "only the tile of the diagonal needs a mask")


def arguments(dtype, s=4096, t=4096, b=1, c=128):
    q, k = shape(b, s, 8, c, dtype=dtype), shape(b, t, 2, c, dtype=dtype)
    return q, k, k, shape(b, s, dtype=jnp.int32), shape(b, t, dtype=jnp.int32), shape(dtype=jnp.int32)


def forward(q, k, v, query_segments, key_segments, offset, *, platform, window=None):
    return kernel("attention", platform)(q, k, v, query_segments_bs=query_segments, key_segments_bt=key_segments,
                                         query_offset=offset, window=window)  # fmt: skip


def gradient(q, k, v, *rest, platform, window=None):
    def loss(q, k, v):
        return forward(q, k, v, *rest, platform=platform, window=window).astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def test_decoding_has_kernels_of_its_own_but_its_gradient_is_that_of_a_forward_pass():
    """As trainings have them most: in bfloat16, for AMD. Whole steps are lowered in tests/parallel/test_lowering.py."""
    decode = arguments(jnp.bfloat16, s=1, b=16)
    assert lowered_kernels(forward, *decode, platform="rocm") == ["attention_decode", "attention_join"]
    assert lowered_kernels(gradient, *decode, platform="rocm") == FLASH


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.float16}, "all arrays in bfloat16 or all in float32"),
        ({"c": 24}, "heads of"),
        ({"k": 3}, "do not match keys"),
        ({"t": 0}, "at least one"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(change, message):
    size = {"dtype": jnp.float32, "c": 16, "k": 2, "t": 4} | change
    q = np.zeros((1, 4, 4, size["c"]), size["dtype"])
    k = np.zeros((1, size["t"], size["k"], size["c"]), size["dtype"])
    with pytest.raises(ValueError, match=message):
        EMULATED(q, k, k)


def test_segments_that_do_not_fit_are_refused():
    q, segments = np.zeros((1, 4, 2, 16), np.float32), np.ones((1, 4), np.int32)
    with pytest.raises(ValueError, match="or neither"):
        EMULATED(q, q, q, query_segments_bs=segments)
    with pytest.raises(ValueError, match=r"Segments .* do not match"):
        kernel("partial_attention", "interpret")(AttentionInputs(q, q, q, segments, segments[:, :3]))
    with pytest.raises(ValueError, match="all in float32"):
        EMULATED(q, q.astype(jnp.bfloat16), q)
