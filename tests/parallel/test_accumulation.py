"""Gradients that layers add to the sums of a step in place, against autodiff's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, jit
from tests.kernel_helpers import equations, kernels, traced_kernels
from zaya_jax.model.layers import Carrier, fused_merge
from zaya_jax.model.zaya import POLICIES
from zaya_jax.ops.residual_norm import MergeVectors
from zaya_jax.ops.stacked import Accumulated, kept_rows
from zaya_jax.parallel.accumulation import scan_layers

LAYERS, WIDTH = 3, 16


def layer(remat):
    def apply(x, w):
        return jnp.tanh(x @ w["matrix"] + w["bias"].astype(x.dtype))

    return jax.checkpoint(apply, prevent_cse=False) if remat else apply


def loss(stacks, x, remat):
    x, means = scan_layers(lambda x, w: (layer(remat)(x, w), x.mean()), x, stacks)
    return (x.astype(jnp.float32) ** 2).sum() + means.sum()


def accumulated(stacks, totals, x, remat=False):
    """The sums `totals` after the gradient of `loss` was added to them."""
    references = jax.tree.map(jax.new_ref, totals)

    def of_probe(probe):
        layers = jax.tree.map(lambda stack, total: Accumulated(stack, total, probe, False), stacks, references)
        return loss(layers, x, remat)

    jax.grad(of_probe)(jnp.zeros(()))
    return jax.tree.map(jax.freeze, references)


def draw(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    stacks = {"matrix": rng.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5, "bias": rng.normal(size=(LAYERS, WIDTH))}
    return jax.tree.map(lambda x: x.astype(dtype), stacks), rng.normal(size=(5, WIDTH)).astype(dtype)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_add_their_gradient_to_the_sums(remat):
    stacks, x = draw()
    totals = jax.tree.map(lambda s: np.full(s.shape, 7.0, np.float32), stacks)
    gradient = jit(jax.grad(loss), static_argnums=2)(stacks, x, remat)
    ours = jit(functools.partial(accumulated, remat=remat))(stacks, totals, x)
    assert_close(ours, jax.tree.map(np.add, totals, jax.device_get(gradient)), 1e-6)


def test_gradients_in_bf16_are_added_in_fp32():
    stacks, x = draw(jnp.bfloat16)
    totals = jax.tree.map(lambda s: np.full(s.shape, 4096.0, np.float32), stacks)  # bf16 would lose all below 16
    gradient = jit(jax.grad(loss), static_argnums=2)(stacks, x, False)
    ours = jax.device_get(jit(accumulated)(stacks, totals, x))
    exact = jax.tree.map(np.float32, jax.device_get(gradient))
    assert_close(jax.tree.map(lambda x: x - 4096, ours), exact, 2**-7)


def test_no_further_stack_is_in_memory():
    """Beside the sums themselves, whose memory is donated, there are activations and gradients of one layer."""
    shapes = {"matrix": (64, 64, 64), "bias": (64, 64)}
    stacks = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in shapes.items()}
    x = jax.ShapeDtypeStruct((2, 64), jnp.float32)
    lowered = jax.jit(accumulated, donate_argnums=1).lower(stacks, stacks, x)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 64**3 * 4 / 2


def gradient_of_experts(keep, remat, platform, stacks, x_td, vectors_ld, expert_lt, other_rows=0):
    """Loss, gradient and sums of a model whose layers are experts and a merge, with or without space to `keep` rows."""
    ops, totals = kernels(platform).ops, jax.tree.map(lambda x: jax.new_ref(jnp.ones(x.shape)), stacks)

    def layer(carry, parts):
        (x_td, carrier), (expert_t, matrices, (weight_d, *vectors)) = carry, parts
        out = ops.experts(carrier.value, expert_t, jnp.cos(x_td[:, 0]), *matrices)
        out_td, *kept = out if isinstance(out, tuple) else (out,)
        return fused_merge(ops, 1e-5, (out_td, x_td, MergeVectors(*vectors)), weight_d, carrier, kept), None

    def of_values(probe, x_td, vectors_ld):
        space = [kept_rows(stack, len(x_td) + other_rows) if keep else None for stack in stacks]
        layers = [Accumulated(*parts, probe, True, rows) for *parts, rows in zip(stacks, totals, space, strict=True)]
        step = jax.checkpoint(layer, policy=POLICIES["dots"], prevent_cse=False) if remat else layer
        carry, _ = scan_layers(step, (x_td, Carrier(jnp.sin(x_td))), (expert_lt, layers, vectors_ld))
        return (carry[0] ** 2).sum() + jnp.tanh(carry[1].value).sum()

    value, gradient = jax.value_and_grad(of_values, argnums=(0, 1, 2))(jnp.zeros(()), x_td, vectors_ld)
    return value, gradient, jax.tree.map(jax.freeze, totals)


def test_space_for_another_number_of_rows_is_not_used():
    """With several experts for a token, there are more rows than tokens."""
    stacks = [np.zeros((LAYERS, 2, *sizes), np.float32) for sizes in ((WIDTH, 32), (16, WIDTH))]
    x_td, vectors = np.zeros((24, WIDTH), np.float32), [np.zeros((LAYERS, WIDTH), np.float32)] * 5
    arrays = stacks, x_td, vectors, np.zeros((LAYERS, 24), np.int32)
    saved = [saved_elements(functools.partial(gradient_of_experts, keep, True, "interpret", other_rows=1), *arrays)
             for keep in (True, False)]  # fmt: skip
    assert saved[0] == saved[1]


def saved_elements(function, *arrays):
    """The number of elements that the loop over layers stacks for its backward pass."""
    scan = next(x for x in equations(function, *arrays) if x.primitive.name == "scan")
    return sum(x.aval.size for x in scan.outvars[scan.params["num_carry"] :])


@pytest.mark.parametrize("platform", ["interpret", "cpu"])
@pytest.mark.parametrize("remat", [False, True])
def test_rows_are_kept_in_place_for_the_backward_pass(remat, platform):
    """Results are those without space for the rows, and no kernel runs again."""
    rng, (tokens, experts, width) = np.random.default_rng(1), (24, 2, 16)
    shapes = (LAYERS, experts, WIDTH, 2 * width), (LAYERS, experts, width, WIDTH), (tokens, WIDTH), (5, LAYERS, WIDTH)
    gate_up, down, x_td, vectors = (rng.normal(size=size).astype(np.float32) / 4 for size in shapes)
    expert_lt = rng.integers(0, experts + 1, (LAYERS, tokens)).astype(np.int32)
    functions = [functools.partial(gradient_of_experts, keep, remat, platform) for keep in (True, False)]
    arrays = [gate_up, down], x_td, list(vectors), expert_lt
    ours, theirs = (jax.device_get(jit(function)(*arrays)) for function in functions)
    assert_close(ours, theirs, 1e-6)
    launched = [sorted(traced_kernels(function, *arrays)) for function in functions]
    assert launched[0] == launched[1]
    assert platform == "cpu" or launched[0].count("grouped_product") == launched[0].count("grouped_swiglu") == 1
    in_place, stacked = (saved_elements(function, *arrays) for function in functions)
    assert stacked - in_place == (platform == "interpret") * LAYERS * tokens * (WIDTH + 2 * width)


@pytest.mark.parametrize(("platform", "uninitialized"), [("cuda", 2), ("rocm", 2), ("cpu", 0)])
def test_gpus_do_not_fill_the_stacks_that_a_loop_writes(platform, uninitialized):
    """Forward, the loop writes the means and what the backward pass needs."""
    stacks, x = draw()
    forward = jax.jit(lambda *arguments: jax.vjp(functools.partial(loss, remat=True), *arguments))
    lowered = forward.trace(stacks, x).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("@AllocateBuffer") == uninitialized


def test_loops_over_split_arrays_keep_their_split():
    """Where stacks are split over devices or vary over them, jax itself makes them."""
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    split = jax.P(None, "x")

    def double(x):
        return scan_layers(lambda carry, row: (carry, 2 * row), 0, x)[1]

    rows = np.arange(6.0).reshape(2, 3)
    with jax.set_mesh(mesh):
        explicit = jax.jit(double)(jax.device_put(rows, split))
        assert jax.typeof(explicit).sharding.spec == split
        varying = jax.jit(jax.shard_map(double, out_specs=split))(jax.device_put(rows, split))
    np.testing.assert_array_equal([explicit, varying], [2 * rows] * 2)
