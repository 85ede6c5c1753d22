"""The whole model by kernels: emulated, what the references compute; lowered for GPUs, where each kernel stands."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, assert_trees_close, jit, random_model
from tests.kernel_helpers import TARGETS, kernel_names, kernels, lower, traced_kernels
from zaya_jax.config import ModelConfig
from zaya_jax.model import tree
from zaya_jax.model.zaya import abstract_model, init_cache
from zaya_jax.ops import LOCAL
from zaya_jax.ops.experts import MOST_UNSORTED
from zaya_jax.ops.registry import OPERATIONS, KernelSelection

SHAPES = ModelConfig(
    vocab_size=37, hidden_size=48, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=64, num_experts=3,
    expert_size=24, router_size=16, max_positions=64, rope_base=1.0e4, layer_pattern=("full", "sliding"),
    sliding_window=5, sliding_rope_base=500.0,
)  # fmt: skip
# Both of its layers are of one kind, and so the body of the scan, which is compiled, holds one.
SLIDING = dataclasses.replace(SHAPES, layer_pattern=("sliding",))
DOCUMENTS = [[1] * 9 + [2] + [3] * 8 + [0] * 3, [1] * 21]
LENGTH = 21


def batch():
    tokens = np.random.default_rng(0).integers(0, SHAPES.vocab_size, (2, LENGTH)).astype(np.int32)
    return tokens, np.array(DOCUMENTS, np.int32)


def values(seed, config=SHAPES):
    model = random_model(config, seed)
    return tree.parameters(model), tree.balancing_biases(model)


def loss(params, biases, tokens, segments, ops, config=SHAPES, remat="dots"):
    model = tree.with_values(abstract_model(config), {**params, **biases})
    out = model(tokens, segments, ops=ops, remat=remat)
    weights = jnp.cos(jnp.arange(out.hidden_bsd.size, dtype=out.hidden_bsd.dtype)).reshape(out.hidden_bsd.shape)
    return (out.hidden_bsd * weights * (segments != 0)[..., None]).sum(), out.stats.expert_counts_le


# Every kernel alone beside references, and the default ones together.
FORCED = {
    "default": kernels("interpret"),
    **{f"{operation.name} {kernel.name}": KernelSelection(kernels("interpret").target, {operation.name: kernel.name})
       for operation in OPERATIONS.values() for kernel in operation.kernels
       if operation.name in ("residual_norm", "cca_mix", "attention", "experts", *OPERATIONS["experts"].uses)},
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize(("selection", "config"), [
    *(pytest.param(selection, SLIDING, id=name) for name, selection in FORCED.items()),
    pytest.param(kernels("interpret"), SHAPES, id="default, both kinds of layers"),
])  # fmt: skip
def test_forward_and_backward_are_those_of_the_references(selection, config):
    """In rows of packed documents and padding."""
    params, biases = values(0, config)
    results = [
        jit(jax.value_and_grad(functools.partial(loss, ops=ops, config=config), has_aux=True))(params, biases, *batch())
        for ops in (LOCAL, selection.ops)
    ]
    ((expected, counts), reference), ((value, counts_there), grads) = results
    np.testing.assert_array_equal(counts_there, counts)
    assert abs(value - expected) < 1e-6 * batch()[0].size * config.hidden_size  # a sum of as many terms, which cancel
    assert_trees_close(grads, reference, 2e-4)


def test_tokens_one_by_one_are_those_of_the_references():
    """In a ring of `sliding_window` slots that is written round, with a row that ends."""
    config = dataclasses.replace(SLIDING, num_layers=1)
    model, tokens = random_model(config, 1), batch()[0]
    kept = np.arange(8) < np.array([[8], [3]])

    @functools.partial(jit, static_argnums=2)
    def step(tokens, cache, kernel):
        out = model(tokens, kept_now(cache), cache=cache, ops=kernels("interpret").ops if kernel else LOCAL)
        return out.hidden_bsd, out.cache

    def kept_now(cache):
        return (cache.length_b[:, None] < kept.sum(1, keepdims=True)).astype(jnp.int32)

    ours = theirs = init_cache(config, 2, 8, model.dtype)
    for at in range(8):
        (out, ours), (expected, theirs) = (step(tokens[:, [at]], *side) for side in ((ours, True), (theirs, False)))
        real = kept[:, at]
        assert_close(out[real], expected[real], 1e-4)
    assert_trees_close(*(dict(enumerate(jax.tree.leaves(cache))) for cache in (ours, theirs)), 1e-4)
    assert ours.length_b.tolist() == kept.sum(1).tolist()


def shapes(config=SHAPES):
    params, biases = jax.eval_shape(lambda: values(0, config))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params), biases


# Traced, of layers of one kind; lowered are each operation in tests/ops and the forward pass in tests/parallel.
each_program = pytest.mark.parametrize(
    ("platform", "config"),
    [(None, SLIDING), *(pytest.param(platform, SHAPES, marks=pytest.mark.soak) for platform in TARGETS)],
)


def launched(platform, function, *arrays):
    """How often each kernel is in a program that is lowered for a platform, or traced for None."""
    if platform is None:
        return Counter(traced_kernels(function, *arrays))
    return Counter(kernel_names(lower(function, *arrays, platform=platform)))


@each_program
def test_a_step_backward_has_each_kernel_once_a_layer_and_what_is_recomputed_twice(platform, config):
    """Products, the mix and attention, which `remat` keeps, are not done again; norms and merges are."""
    ops = kernels(platform or "rocm").ops
    gradient = jax.grad(functools.partial(loss, ops=ops, config=config), has_aux=True)
    tokens, segments = (jax.ShapeDtypeStruct((2, LENGTH), jnp.int32) for _ in range(2))
    launches = launched(platform, gradient, *shapes(config), tokens, segments)
    layers = len(config.period)  # those in the body of the scan
    once = ("attention", "attention_backward_keys", "attention_backward_queries", "cca_mix", "cca_mix_backward_norm",
            "cca_mix_backward_rows", "cca_mix_backward_matrices", "grouped_swiglu", "grouped_product",
            "grouped_swiglu_backward")  # fmt: skip
    assert {name: launches[name] for name in once} == dict.fromkeys(once, layers)
    assert launches["class_sort"] == launches["residual_norm_backward"] == 2 * layers
    # The last is traced for its gradient alone: nothing uses its results.
    assert launches["residual_norm_forward"] == 3 * layers


@each_program
def test_a_decode_step_has_the_kernel_for_few_queries(platform, config):
    config = dataclasses.replace(config, num_layers=len(config.period))
    empty, ops = abstract_model(config), kernels(platform or "rocm").ops
    params, biases = shapes(config)
    cache = jax.eval_shape(lambda: init_cache(config, 2, LENGTH, jnp.bfloat16))

    def step(params, biases, tokens, cache):
        return tree.with_values(empty, {**params, **biases})(tokens, cache=cache, ops=ops)

    token = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    launches = launched(platform, step, params, biases, token, cache)
    assert not launches.keys() & {"attention", "cca_mix"}
    for name in ("attention_decode", "cca_mix_step", "router_step", "grouped_swiglu"):
        assert launches[name] == config.num_layers, name
    assert launches["residual_norm_forward"] == 2 * config.num_layers
    config = dataclasses.replace(config, max_positions=2 * MOST_UNSORTED)
    cache = jax.eval_shape(lambda: init_cache(config, 1, 2 * MOST_UNSORTED, jnp.bfloat16))
    empty = abstract_model(config)
    prompt = jax.ShapeDtypeStruct((1, MOST_UNSORTED + 1), jnp.int32)
    assert not launched(platform, step, params, biases, prompt, cache).keys() & {"cca_mix_step", "router_step"}
