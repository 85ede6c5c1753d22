"""Experts in fused launches, emulated, against dispatch in float64; lowered, alone and rematerialised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers import assert_close, jit, seeds
from tests.kernel_helpers import kernel, kernels, lower, lowered_kernels, shape
from zaya_jax.ops.experts import EXPERTS, MOST_SORTED, dispatch_experts
from zaya_jax.ops.stacked import StackedLayer

# The largest error of a result over the largest of its values. Between a token and its output in bf16 stand four
# roundings: of gate and up, of hidden, of the output, and of what the reference is given.
WITHIN = {"float32": 1e-5, "bfloat16": 2**-6}
# Tokens, width, expert width, experts: ragged tiles of rows and of width, and an odd number of tiles of expert width.
SHAPE = (37, 20, 48, 3)
FORWARD = ["class_sort", "grouped_swiglu", "grouped_product"]
BACKWARD = ["grouped_swiglu_backward", "grouped_outer", "grouped_outer", "grouped_product_transposed"]


@functools.cache
def compiled(platform, name=None):
    return both_passes(kernel("experts", platform, name))


def both_passes(function):
    def call(h, expert, weight, gate_up, down, cotangent):
        out, back = jax.vjp(lambda h, w, g, d: function(h, expert, w, g, d), h, weight, gate_up, down)
        return out, *back(cotangent)

    return jit(call)


def draw(dims, dtype, seed):
    t, d, f, e = dims
    rng = np.random.default_rng(seed)
    sizes = ((t, d), (e, d, 2 * f), (e, f, d), (t, d))
    h, gate_up, down, cotangent = (jnp.asarray(rng.normal(size=size) / size[-2] ** 0.5, dtype) for size in sizes)
    return h, jnp.asarray(rng.uniform(0.1, 1, t), jnp.float32), gate_up, down, cotangent


def choices(tokens, experts):
    """Classes of the tokens, of a few allowed ones: so experts stay empty, get all, or all is skipped."""
    allowed = st.lists(st.integers(0, experts + 1), min_size=1, max_size=3)
    return st.tuples(allowed, seeds()).map(
        lambda drawn: np.random.default_rng(drawn[1]).choice(drawn[0], tokens).astype(np.int32)
    )


def in_float64(expert, h, weight, gate_up, down, cotangent):
    with jax.enable_x64(True):
        h, weight, gate_up, down, cotangent = (
            jnp.asarray(np.asarray(array, np.float64)) for array in (h, weight, gate_up, down, cotangent)
        )
        found = compiled("cpu")(h, jnp.asarray(expert), weight, gate_up, down, cotangent)
        return [np.asarray(array) for array in found]


def check(dims, dtype, expert, seed, name=None):
    h, weight, gate_up, down, cotangent = draw(dims, dtype, seed)
    ours = compiled("interpret", name)(h, expert, weight, gate_up, down, cotangent)
    wants = in_float64(expert, h, weight, gate_up, down, cotangent)
    scales = [np.abs(want).max() for want in wants]
    # The gradient of a weight is a sum that may cancel, and is one number where there is one token.
    scales[2] = (np.abs(np.asarray(cotangent, np.float64) * wants[0]).sum(1) / np.asarray(weight)).max()
    dtypes = [dtype, dtype, "float32", dtype, dtype]
    for array, want, scale, kind in zip(ours, wants, scales, dtypes, strict=True):
        assert array.dtype == kind
        error = np.abs(np.asarray(array, np.float64) - want).max()
        assert error <= WITHIN[dtype] * max(scale, 1e-30), (error, scale)
    out, dh, dweight, dgate_up, ddown = (np.asarray(array) for array in ours)
    none = expert >= dims[3]
    assert not out[none].any()
    assert not dh[none].any()
    assert not dweight[none].any()
    for e in set(range(dims[3])) - set(expert.tolist()):
        assert not dgate_up[e].any()
        assert not ddown[e].any()


@pytest.mark.parametrize("name", [each.name for each in EXPERTS.kernels])
@settings(max_examples=4)
@example(expert=(np.arange(37) % 5).astype(np.int32), seed=0)
@given(expert=choices(SHAPE[0], SHAPE[3]), seed=seeds())
def test_equals_dispatch_in_double_precision(name, expert, seed):
    check(SHAPE, "float32", expert, seed, name)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize(
    "dims", [SHAPE, (37, 16, 20, 3), (1, 8, 8, 1), (32, 32, 64, 4), (65, 24, 40, 5), (200, 64, 48, 16)]
)
def test_other_shapes(dims, dtype):
    @settings(max_examples=8)
    @given(expert=choices(dims[0], dims[3]), seed=seeds())
    def run(expert, seed):
        check(dims, dtype, expert, seed)

    run()


def of_8b(dtype, tokens=16_384):
    """Tokens, classes, weights, gate and up, down, and the gradient of the output."""
    return (shape(tokens, 2048, dtype=dtype), shape(tokens, dtype=jnp.int32), shape(tokens, dtype=jnp.float32),
            shape(16, 2048, 4096, dtype=dtype), shape(16, 2048, 2048, dtype=dtype),
            shape(tokens, 2048, dtype=dtype))  # fmt: skip


def gradient(h, expert, weight, gate_up, down, cotangent, *, platform):
    experts = kernel("experts", platform)

    def layer(h, weight, gate_up, down):
        # An output that the gradient needs, as that of a layer whose merge has a scale to train.
        return experts(h, expert, weight, gate_up, down).astype(jnp.float32) ** 2

    out, back = jax.vjp(layer, h, weight, gate_up, down)
    return out, back(cotangent.astype(jnp.float32))


def test_a_sort_and_two_launches_forward_and_four_backward():
    assert lowered_kernels(gradient, *of_8b(jnp.bfloat16), platform="rocm") == FORWARD + BACKWARD


@pytest.mark.soak
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("tokens", [1, 100, 4096, 262_144])
def test_lowers_in_fp32_and_for_other_numbers_of_tokens(platform, tokens):
    for dtype in (jnp.bfloat16, jnp.float32):
        launched = FORWARD[tokens > MOST_SORTED :] + BACKWARD
        assert lowered_kernels(gradient, *of_8b(dtype, tokens), platform=platform) == launched


def test_without_a_gradient_gate_and_up_are_not_written():
    def forward(h, expert, weight, gate_up, down, platform):
        return kernel("experts", platform)(h, expert, weight, gate_up, down)

    *arrays, _ = of_8b(jnp.bfloat16)
    text = lower(functools.partial(forward, platform="cuda"), *arrays, platform="cuda").as_text()
    assert "16384x4096" not in text


@pytest.mark.parametrize("experts", [
    kernel("experts", "interpret"), kernel("experts", "interpret", "pallas_gathered"), dispatch_experts,
    pytest.param(kernels("interpret").without(("experts",)).ops.experts, marks=pytest.mark.soak),
], ids=["kernel", "gathered", "reference", "products"])  # fmt: skip
def test_in_the_stack_of_all_layers_a_gradient_is_added_to_its_layer_alone(experts):
    (t, *_, e), layers = SHAPE, (2, 0)  # of three; each adds to the sums
    h, weight, gate_up, down, cotangent = draw(SHAPE, "float32", 3)
    stacks = [np.stack([x * np.float32(scale) for scale in (0.5, -1, 1)]) for x in map(np.asarray, (gate_up, down))]
    expert = (np.arange(t) % (e + 1)).astype(np.int32)

    @jax.jit
    def stacked(totals, layer):
        references = [jax.new_ref(total) for total in totals]

        def call(h, weight, probe):
            matrices = (StackedLayer(x, layer, total, probe) for x, total in zip(stacks, references, strict=True))
            return experts(h, expert, weight, *matrices)

        out, back = jax.vjp(call, h, weight, jnp.zeros(()))
        dh, dweight, _ = back(cotangent)
        return out, dh, dweight, [jax.freeze(x) for x in references]

    totals, expected = ([np.full_like(x, 3) for x in stacks] for _ in range(2))
    for layer in layers:
        *ours, totals = stacked(totals, jnp.int32(layer))
        *alone, dgate_up, ddown = compiled("interpret")(h, expert, weight, *(x[layer] for x in stacks), cotangent)
        for total, gradient in zip(expected, (dgate_up, ddown), strict=True):
            total[layer] += gradient
        assert_close(ours, alone, 1e-6)
        assert_close(totals, expected, 1e-6)


def refused(h=(8, 4), expert=(8,), weight=(8,), gate_up=(2, 4, 12), down=(2, 6, 4), dtypes=("float32",) * 3):
    jax.eval_shape(
        kernel("experts", "interpret"), shape(*h, dtype=dtypes[0]), shape(*expert, dtype="int32"),
        shape(*weight, dtype="float32"), shape(*gate_up, dtype=dtypes[1]), shape(*down, dtype=dtypes[2]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtypes": ("float16",) * 3}, "all in float32, not float16"),
        ({"dtypes": ("bfloat16", "bfloat16", "float32")}, "not bfloat16, bfloat16, float32"),
        ({"gate_up": (2, 4, 6)}, r"\[e, d, 2f\].*not \(2, 4, 6\)"),
        ({"down": (2, 6, 5)}, r"\[e, f, d\].*\(2, 6, 5\)"),
        ({"expert": (7,)}, "Class and weight of 8 tokens"),
        ({"weight": (8, 1)}, "Class and weight of 8 tokens"),
    ],
)
def test_refusals(given, message):
    refused()
    with pytest.raises(ValueError, match=message):
        refused(**given)
