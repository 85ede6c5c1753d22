"""The kernels of grouped products, emulated, against the reference in float64; and lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import grouped_product, row_tile, row_tiles
from tests.helpers import jit, seeds
from tests.kernel_helpers import kernel, lowered_kernels, shape
from zaya_jax.ops.grouped_matmul import grouped_matmul
from zaya_jax.ops.registry import OPERATIONS

# The largest error of a result over the largest of its values: of fp32 sums, and of results rounded to bf16.
WITHIN = {"float32": 1e-5, "bfloat16": 2**-7}
SHAPE = (45, 16, 20, 4)  # rows, inner, columns, groups: three tiles of 16 rows, of which one is ragged


@functools.cache
def compiled(function):
    def call(x, w, sizes, cotangent):
        out, back = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
        return out, *back(cotangent)

    return jit(call)


def by_kernels(platform):
    names = ("grouped_product", "grouped_product_transposed", "grouped_outer")
    return functools.partial(grouped_matmul, **{name: kernel(name, platform) for name in names})


emulated = by_kernels("interpret")
product = jit(functools.partial(grouped_product, architecture="interpret"))


def draw(dims, dtype, seed):
    t, p, q, e = dims
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=size), dtype) for size in ((t, p), (e, p, q), (t, q))]


def splits(rows, groups):
    """Rows of each group: some empty or of one row, all rows one group's, none at all, rows of no group."""
    cuts = st.lists(st.sampled_from([0, 0, 1, rows // 3, rows // 3 + 1, rows - 1, rows]), min_size=groups,
                    max_size=groups)  # fmt: skip
    return cuts.map(lambda cut: np.diff([0, *sorted(cut)]).astype(np.int32))


def in_float64(x, w, sizes, cotangent):
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(array, np.float64)) for array in (x, w, cotangent)]
        return [np.asarray(array) for array in compiled(grouped_matmul)(wide[0], wide[1], sizes, wide[2])]


def check(dims, dtype, sizes, seed):
    x, w, cotangent = draw(dims, dtype, seed)
    ours = compiled(emulated)(x, w, sizes, cotangent)
    for array, want in zip(ours, in_float64(x, w, sizes, cotangent), strict=True):
        assert array.dtype == dtype
        error = np.abs(np.asarray(array, np.float64) - want).max()
        assert error <= WITHIN[dtype] * max(np.abs(want).max(), 1e-30), (error, np.abs(want).max())
    out, dx, dw = (np.asarray(array) for array in ours)
    assert not out[sizes.sum() :].any()
    assert not dx[sizes.sum() :].any()
    assert not dw[sizes == 0].any()


@settings(max_examples=3)
@example(sizes=np.array([45, 0, 0, 0], np.int32), seed=0)
@example(sizes=np.array([1, 0, 17, 9], np.int32), seed=1)
@given(sizes=splits(SHAPE[0], SHAPE[3]), seed=seeds())
def test_equals_the_reference_in_double_precision(sizes, seed):
    check(SHAPE, "bfloat16", sizes, seed)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize(
    "dims", [SHAPE, (1, 5, 7, 1), (16, 32, 16, 3), (50, 48, 33, 5), (33, 17, 144, 2), (200, 64, 32, 16)]
)
def test_other_shapes(dims, dtype):
    @settings(max_examples=8)
    @given(sizes=splits(dims[0], dims[3]), seed=seeds())
    def run(sizes, seed):
        check(dims, dtype, sizes, seed)

    run()


@settings(max_examples=3)
@given(sizes=splits(SHAPE[0], SHAPE[3]), layer=st.integers(0, 2), seed=seeds())
def test_a_product_is_written_to_its_layer_of_the_rows_that_are_kept(sizes, layer, seed):
    x, w, _ = draw(SHAPE, "bfloat16", seed)
    stack, kept = jnp.stack([w + i for i in range(3)]), jnp.full((3, SHAPE[0], SHAPE[2]), 7, x.dtype)
    out, ours = (product(x, (stack, layer), sizes, kept=space) for space in (None, kept))
    np.testing.assert_array_equal(*(np.asarray(array, np.float32) for array in (ours, kept.at[layer].set(out))))


def test_rows_past_the_groups_and_of_others_may_hold_anything():
    x, w, cotangent = draw(SHAPE, "bfloat16", 2)
    sizes = np.array([3, 0, 9, 5], np.int32)
    clean = compiled(emulated)(x, w, sizes, cotangent)
    dirty = compiled(emulated)(x.at[17:].set(np.nan), w, sizes, cotangent.at[17:].set(np.nan))
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def hipblaslt(operation):
    return OPERATIONS[operation].kernel("hipblaslt")


@settings(max_examples=3)
@given(sizes=splits(SHAPE[0], SHAPE[3]), seed=seeds())
def test_the_vendor_s_product_computes_what_the_reference_does(sizes, seed):
    x, w, cotangent = draw(SHAPE, "float32", seed)
    total = jnp.ones((3, *w.shape))
    arrays = {"grouped_product": (x, w), "grouped_product_transposed": (cotangent, w), "grouped_outer": (x, cotangent)}
    for (operation, pair), exact in zip(arrays.items(), in_float64(x, w, sizes, cotangent), strict=True):
        run = jax.jit(functools.partial(hipblaslt(operation).run, "gfx942"))
        ours = [run(*pair, sizes)]
        if operation == "grouped_outer":
            of_layers = run(*pair, sizes, total_lepq=total, layer=1)
            np.testing.assert_array_equal(of_layers[::2], total[::2])
            ours = [ours[0][0], of_layers[1] - 1]
            assert not np.asarray(ours[0])[sizes == 0].any()
        for result in ours:
            error = np.abs(np.asarray(result, np.float64) - exact).max()
            assert error <= WITHIN["float32"] * max(np.abs(exact).max(), 1), (operation, error)


def test_the_vendor_s_product_is_refused_where_xla_would_multiply_every_row_by_every_matrix(monkeypatch):
    x, w, sizes, _ = of_8b("bfloat16")
    supports = hipblaslt("grouped_product").supports
    assert supports("gfx942", x, w, sizes) == ""
    assert "on gfx950" in supports("gfx950", x, w, sizes)
    assert "not for float32" in supports("gfx942", x.update(dtype=jnp.float32), w, sizes)
    assert "matrices [e, p, q]" in supports("gfx942", x.update(shape=(8, 7)), w, sizes)
    outer = hipblaslt("grouped_outer").supports
    assert outer("gfx942", x, x, sizes, total_lepq=w, layer=0) == ""
    assert "on gfx950" in outer("gfx950", x, x, sizes, total_lepq=w, layer=0)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_experimental_use_ragged_dot_grouped_gemm=false")
    assert "one of which is off" in supports("gfx942", x, w, sizes)
    assert "hipblaslt" not in {kernel.name for kernel in OPERATIONS["grouped_product"].kernels_for("cuda")}


tiles_of = jax.jit(functools.partial(row_tiles, block=16), static_argnums=1)
tile_at = jax.jit(lambda tiles, index, groups: row_tile(tiles, index, 16, groups), static_argnums=2)


@given(sizes=splits(SHAPE[0], SHAPE[3]))
def test_each_row_is_written_by_one_tile(sizes):
    """Emulated programs run one after the other, and hide a row that two of them write."""
    rows, groups = SHAPE[0], SHAPE[3]
    tiles = jax.device_get(tiles_of(sizes, rows))
    owners = [[] for _ in range(rows)]
    for index in range(tiles.shape[1]):
        own = jax.device_get(tile_at(tiles, np.int32(index), groups))
        for row in np.asarray(own.rows)[np.asarray(own.inside)]:
            owners[row].append((int(own.matrix[1]), int(own.meets)))
    expected = [(group, 1) for group in np.repeat(np.arange(groups), sizes)]
    assert owners == [[owner] for owner in expected + [(groups - 1, 0)] * (rows - len(expected))]


@pytest.mark.parametrize(("platform", "dtype"), [("cuda", "float32"), ("rocm", "bfloat16")])
def test_lowers_at_the_sizes_of_the_8b_model(platform, dtype):
    """One launch for the product and one for each gradient."""
    names = lowered_kernels(gradient, *of_8b(dtype), platform=platform)
    assert names == ["grouped_product", "grouped_product_transposed", "grouped_outer"]


def of_8b(dtype, tokens=16_384):
    return (shape(tokens, 2048, dtype=dtype), shape(16, 2048, 4096, dtype=dtype), shape(16, dtype=jnp.int32),
            shape(tokens, 4096, dtype=dtype))  # fmt: skip


def gradient(x, w, sizes, cotangent, platform):
    out, back = jax.vjp(lambda x, w: by_kernels(platform)(x, w, sizes), x, w)
    return out, back(cotangent)


@pytest.mark.parametrize(
    ("x", "w", "sizes", "message"),
    [
        (shape(8, 4, dtype=jnp.float16), shape(2, 4, 6, dtype=jnp.float16), 2, "all in float32, not float16"),
        (shape(8, 4, dtype=jnp.float32), shape(2, 4, 6, dtype=jnp.bfloat16), 2, "not float32, bfloat16"),
        (shape(8, 4, dtype=jnp.float32), shape(2, 5, 6, dtype=jnp.float32), 2, r"rows \[t, p\].*not \(8, 4\)"),
        (shape(8, 4, dtype=jnp.float32), shape(2, 4, 6, dtype=jnp.float32), 3, r"sizes \[e\].*\(3,\)"),
    ],
)
def test_refusals(x, w, sizes, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(emulated, x, w, shape(sizes, dtype=jnp.int32))
