"""The kernel against the reference in double precision, its lowering, and the bytes it moves."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.residual_norm import (
    Inputs,
    backward_cut,
    forward_cut,
    residual_norm_backward,
    residual_norm_forward,
)
from pallas_kernels.tiles import PLATFORMS
from tests.helpers import assert_close, jit, seeds
from tests.kernel_helpers import equations, kernel, lowered_kernels, shape
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.residual_norm import MergeVectors, residual_norm

EPS = 1e-5
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
# Of the result: fp32 to a few roundings of the largest; bf16 has four roundings of 2⁻⁹ forward (stream, weight,
# normed, product), and as many in a gradient.
TOLERANCE = {F32: 2e-6, BF16: 2.0**-7}


def draw(seed, shape_d, output, dtype, scaled):
    """Arguments of an operation, and gradients of its results."""
    rng = np.random.default_rng(seed)

    def normal(*sizes, mean=0.0):
        return jnp.asarray(rng.normal(mean, 1, sizes), jnp.float32)

    d = shape_d[-1]
    vectors = MergeVectors(normal(d, mean=1), normal(d), normal(d, mean=1), normal(d)) if scaled else None
    arrays = normal(*shape_d).astype(output), 3 * normal(*shape_d), vectors, normal(d, mean=1)
    return arrays, (normal(*shape_d), normal(*shape_d).astype(dtype))


def with_gradients(operation, dtype, arrays, gradients):
    out, back = jax.vjp(lambda o, x, v, w: operation(o, x, v, w, EPS, dtype), *arrays)
    return out, back(gradients)


@functools.cache
def whole(dtype, platform="interpret"):
    return jit(functools.partial(with_gradients, kernel("residual_norm", platform), dtype))


def check(seed, shape_d, output, dtype, scaled):
    arrays, gradients = draw(seed, shape_d, output, dtype, scaled)
    ours = whole(dtype)(arrays, gradients)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        ours, jax.eval_shape(functools.partial(with_gradients, residual_norm, dtype), arrays, gradients)
    )
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (arrays, gradients))
        theirs = whole(jnp.float64, "cpu")(*exact)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        # What takes no part in the norm is exact whatever the norm's dtype.
        stream_only = jax.tree_util.keystr(path) == "[0][0]"
        loose = BF16 in (a.dtype, dtype) and not stream_only
        difference = np.abs(np.asarray(a, np.float64) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()
        assert difference <= TOLERANCE[BF16 if loose else F32], (jax.tree_util.keystr(path), difference)


# Two parts of a row, the last ragged; steps of more rows than there are, and leading axes.
@pytest.mark.parametrize("case", [((7, 96), BF16, BF16, True), ((1, 5, 20), BF16, F32, False)])
@settings(max_examples=3)
@given(seed=seeds())
def test_results_and_gradients_are_those_of_the_reference_in_double_precision(case, seed):
    check(seed, *case)


@pytest.mark.soak
@settings(max_examples=40)
@given(seed=seeds(), rows=st.integers(1, 40), width=st.sampled_from((1, 3, 40, 63, 64, 65, 96, 200, 1536)),
       output=st.sampled_from((BF16, F32)), dtype=st.sampled_from((BF16, F32)), scaled=st.booleans())  # fmt: skip
def test_any_rows_and_widths(seed, rows, width, output, dtype, scaled):
    check(seed, (rows, width), output, dtype, scaled)


@functools.cache
def gradient_with(dtype):
    run = kernel("residual_norm", "interpret")

    def back(arrays, gradients, kept):
        return jax.vjp(lambda *x: run(*x, EPS, dtype, *kept), *arrays)[1](gradients)

    return jit(back)


@settings(max_examples=3)
@given(seed=seeds(), layer=st.integers(0, 2))
def test_the_gradient_reads_the_output_in_its_layer_of_those_that_are_kept(seed, layer):
    """Bit by bit as the output alone; of the other layers it reads nothing."""
    arrays, gradients = draw(seed, (7, 96), BF16, BF16, scaled=True)
    stack = jnp.full((3, 7, 96), jnp.nan, BF16).at[layer].set(arrays[0])
    hidden = jnp.full_like(arrays[0], jnp.nan), *arrays[1:]  # what is not read
    ours = gradient_with(BF16)(hidden, gradients, (stack, layer))
    chex.assert_trees_all_equal(ours, gradient_with(BF16)(arrays, gradients, ()))


def test_bfloat16_rounds_where_the_reference_does():
    arrays, gradients = draw(0, (7, 96), BF16, BF16, scaled=True)
    (new, normed), _ = whole(BF16)(arrays, gradients)
    (theirs, expected), _ = jit(functools.partial(with_gradients, residual_norm, BF16))(arrays, gradients)
    assert_close(new, theirs, 1e-6)
    assert np.mean(np.asarray(normed) == np.asarray(expected)) > 0.99


def test_gradients_of_parameters_have_their_dtypes():
    arrays, gradients = draw(0, (2, 8), F32, F32, scaled=True)
    o, x, vectors, weight = jax.tree.map(lambda a: a.astype(BF16) if a.ndim == 1 else a, arrays)
    _, (_, _, d_vectors, d_weight) = jax.eval_shape(whole(F32), (o, x, vectors, weight), gradients)
    chex.assert_type([*d_vectors, d_weight], BF16)


@given(tokens=st.integers(1, 300_000), width=st.integers(1, 8192), platform=st.sampled_from(PLATFORMS),
       dtype=st.sampled_from((BF16, F32)))  # fmt: skip
def test_programs_hold_every_row_and_column_and_none_is_idle(tokens, width, platform, dtype):
    for cut in (forward_cut(tokens, width, dtype, platform), backward_cut(tokens, width, dtype, platform)):
        share = cut.steps * cut.rows
        assert (cut.programs - 1) * share < tokens <= cut.programs * share
        assert (cut.parts - 1) * cut.lanes < width <= cut.parts * cut.lanes
        assert cut.tile.warps * {"cuda": 32, "rocm": 64, "interpret": 1}[platform] <= 1024


def shapes(tokens, width, dtype, scaled=True):
    vectors = MergeVectors(*[shape(width, dtype=F32)] * 4) if scaled else None
    return shape(tokens, width, dtype=dtype), shape(tokens, width, dtype=F32), vectors, shape(width, dtype=F32)


def forward(o, x, vectors, weight, *, platform):
    return kernel("residual_norm", platform)(o, x, vectors, weight, EPS, o.dtype)


def gradient(*arrays, platform, wrap=lambda f: f):
    out, back = jax.vjp(wrap(functools.partial(forward, platform=platform)), *arrays)
    return out, back(jax.tree.map(jnp.ones_like, out))


@pytest.mark.parametrize(("platform", "dtype", "scaled"), [("cuda", BF16, True), ("rocm", F32, False)])
def test_it_is_one_kernel_forward_and_one_backward(platform, dtype, scaled):
    arrays = shapes(4096, 2048, dtype, scaled)
    assert lowered_kernels(gradient, *arrays, platform=platform) == ["residual_norm_forward", "residual_norm_backward"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stream": shape(4, 8, dtype=BF16)}, "float32 stream, not bfloat16"),
        ({"output": shape(4, 8, dtype=jnp.float16)}, "float16"),
        ({"dtype": jnp.float16}, "float16"),
        ({"weight": shape(8, dtype=jnp.float16)}, "float16"),
        ({"vectors": MergeVectors(*[shape(8, dtype=jnp.float16)] * 4)}, "float16"),
        ({"vectors": MergeVectors(*[shape(1, dtype=F32)] * 4)}, r"shape \(8,\), not \(1,\)"),
        ({"weight": shape(4, 8, dtype=F32)}, r"shape \(8,\), not \(4, 8\)"),
        ({"output": shape(1, 8, dtype=F32)}, r"\(1, 8\) and \(4, 8\)"),
        ({"output": shape(4, 8193, dtype=F32), "stream": shape(4, 8193, dtype=F32)}, "8192 elements"),
        ({"output": shape(0, 8, dtype=F32), "stream": shape(0, 8, dtype=F32)}, "at least one"),
        ({"output": shape(dtype=F32), "stream": shape(dtype=F32)}, "8192 elements"),
    ],
)
def test_what_it_cannot_do_it_refuses(change, said):
    arguments = {"output": shape(4, 8, dtype=F32), "stream": shape(4, 8, dtype=F32), "vectors": None,
             "weight": shape(8, dtype=F32), "dtype": F32} | change  # fmt: skip
    with pytest.raises(ValueError, match=said):
        kernel("residual_norm", "cuda")(
            arguments["output"], arguments["stream"], arguments["vectors"], arguments["weight"], EPS, arguments["dtype"]
        )


def test_double_precision_is_refused():
    with jax.enable_x64(True), pytest.raises(ValueError, match="float32 stream, not float64"):
        kernel("residual_norm", "cuda")(jnp.ones((4, 8)), jnp.ones((4, 8)), None, jnp.ones(8), EPS, "float64")


def test_recomputation_runs_forward_again_only_where_its_results_are_asked_for():
    arrays = shapes(64, 2048, BF16)
    once = ["residual_norm_forward", "residual_norm_backward"]
    alone = functools.partial(gradient, wrap=functools.partial(jax.checkpoint, prevent_cse=False))
    assert lowered_kernels(alone, *arrays, platform="rocm") == once

    def block(*arrays, platform):
        policy = jax.checkpoint_policies.save_only_these_names(MATMUL_OUTPUT)

        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
        def product(*arrays):
            new, normed = forward(*arrays, platform=platform)
            return new, jnp.tanh(normed)  # whose gradient needs `normed`

        out, back = jax.vjp(product, *arrays)
        return out, back(jax.tree.map(jnp.ones_like, out))

    assert lowered_kernels(block, *arrays, platform="rocm") == ["residual_norm_forward", *once]


def test_it_runs_where_numbers_are_wide_by_default():
    arrays, gradients = draw(0, (2, 8), F32, F32, scaled=True)
    with jax.enable_x64(True):
        ours = whole(F32).trace(arrays, gradients)
        ours.lower()
        assert lowered_kernels(gradient, *shapes(64, 2048, BF16), platform="rocm")
    chex.assert_type(jax.tree.leaves(ours.out_info), F32)


@pytest.mark.soak
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("width", [96, 1536, 2048, 4096, 8192])
def test_lowers_at_any_width(platform, dtype, scaled, width):
    names = ["residual_norm_forward", "residual_norm_backward"]
    assert lowered_kernels(gradient, *shapes(4096, width, dtype, scaled), platform=platform) == names


def size(*trees):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))


def moved(function, *arrays):
    """Bytes of the arrays that the kernel reads and writes, each once, and of the partial sums read again."""
    total = 0
    for equation in equations(function, *arrays):
        if equation.primitive.name == "pallas_call":
            total += size([v.aval for v in (*equation.invars, *equation.outvars)])
        elif equation.primitive.name == "reduce_sum":
            total += size([v.aval for v in equation.invars])
    return total


@pytest.mark.parametrize(
    ("platform", "dtype", "tokens"),
    [("cuda", BF16, 4096), ("cuda", F32, 32768), ("rocm", BF16, 32768), ("rocm", F32, 4096)],
)
def test_little_more_is_moved_than_must_be(platform, dtype, tokens):
    o, x, vectors, weight = arrays = shapes(tokens, 2048, dtype)
    assert vectors is not None
    out = jax.eval_shape(functools.partial(forward, platform=platform), *arrays)
    ahead = functools.partial(residual_norm_forward, eps=EPS, dtype=dtype, architecture=platform)
    inputs = Inputs(o, x, tuple(vectors), weight)
    assert moved(ahead, inputs) == size(arrays, out)
    # The scales' gradients need o and x; the new stream follows from those.
    back = functools.partial(residual_norm_backward, eps=EPS, architecture=platform)
    assert moved(back, inputs, *out) <= 1.16 * size(arrays, out, arrays)
