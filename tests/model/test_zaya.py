"""What the whole model must be: causal, blind between documents, deaf to padding, the same in every way to run it."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import (
    ABLATIONS,
    VARIANTS,
    assert_close,
    assert_trees_close,
    jit,
    packed_rows,
    random_model,
    random_values,
    seeds,
    tiny_config,
)
from zaya_jax.errors import InputError
from zaya_jax.model import tree
from zaya_jax.model.layers import MATRIX_ROLES
from zaya_jax.model.loss import chunked_loss
from zaya_jax.model.zaya import Zaya, abstract_model, head, init_cache, logits

ROWS, LENGTH = 6, 20
DIFFERENTIATED = ("plain", "biased", "sliding", *ABLATIONS)
# Where a variant takes long: of the others, `gqa` is decoded one token at a time, which sees nothing later.
some_variants = pytest.mark.parametrize(
    "variant", [pytest.param(variant, marks=[] if variant == "sliding" else pytest.mark.soak)
                for variant in [*VARIANTS, *ABLATIONS]],
)  # fmt: skip
every_gradient = pytest.mark.parametrize(
    "variant",
    [pytest.param(variant, marks=[] if variant == "plain" else pytest.mark.soak) for variant in DIFFERENTIATED],
)


def config_of(variant):
    """One of the shared variants, or 'short': `gqa` with a group less, since decoding is unrolled."""
    return tiny_config("gqa", num_layers=2) if variant == "short" else tiny_config(variant)


@functools.cache
def run(variant: str, remat: str = "none"):
    """(values, tokens, segments, targets, weights) → ((loss, (hidden, counts)), gradients), compiled.

    Its results are NumPy arrays: of a JAX array each slice of another size is compiled.
    """
    empty = abstract_model(tiny_config(variant))

    def loss(params, biases, tokens, segments, targets, weights):
        model = tree.with_values(empty, {**params, **biases})
        out = model(tokens, segments, remat=remat)
        bias = model.head_bias[...] if model.config.head_bias else None
        hidden = out.hidden_bsd.reshape(ROWS * LENGTH, -1)
        total, _ = chunked_loss(hidden, model.embedding[...], bias, targets.reshape(-1), weights.reshape(-1))
        return total, (out.hidden_bsd, out.stats.expert_counts_le)

    compiled = jit(jax.value_and_grad(loss, has_aux=True))

    def call(values, tokens, segments, targets, weights):
        params = {name: x for name, x in values.items() if "balancing_bias" not in name}
        biases = {name: x for name, x in values.items() if "balancing_bias" in name}
        return jax.device_get(compiled(params, biases, tokens, segments, targets, weights))

    return call


@functools.cache
def forward(variant: str):
    """(values, tokens, segments) → (hidden, counts), by the same program as `run` where the quick run has one."""
    if variant != "plain":
        empty = abstract_model(config_of(variant))

        def compute(values, tokens, segments):
            out = tree.with_values(empty, values)(tokens, segments)
            return out.hidden_bsd, out.stats.expert_counts_le

        compiled = jit(compute)
        return lambda *arguments: jax.device_get(compiled(*arguments))
    zeros = np.zeros((ROWS, LENGTH))

    def call(values, tokens, segments):
        (_, out), _ = run(variant)(values, tokens, segments, zeros.astype(np.int32), zeros.astype(np.float32))
        return out

    return call


def draw_tokens(config, seed, rows=ROWS):
    rng = np.random.default_rng(seed)
    return rng.integers(0, config.vocab_size, (2, rows, LENGTH)).astype(np.int32)


def weigh(segments):
    """A weight for each real token, so that none of their losses can stand for another's."""
    return np.where(segments > 0, 0.1 + np.arange(segments.size).reshape(segments.shape) % 7, 0).astype(np.float32)


def documents(segments):
    """(row, tokens' places) of each document."""
    return [(r, np.flatnonzero(row == number)) for r, row in enumerate(segments) for number in np.unique(row[row > 0])]


@some_variants
@given(data=st.data(), seed=seeds(), at=st.integers(0, LENGTH - 1))
def test_a_token_changes_nothing_before_it(variant, data, seed, at):
    config = config_of(variant)
    values = random_values(config)
    first, other = draw_tokens(config, seed)
    segments = data.draw(packed_rows(ROWS, LENGTH)) if seed % 2 else np.ones((ROWS, LENGTH), np.int32)
    second = first.copy()
    second[:, at] = np.where(other[:, at] == first[:, at], (first[:, at] + 1) % config.vocab_size, other[:, at])
    hidden1, _ = forward(variant)(values, first, segments)
    hidden2, _ = forward(variant)(values, second, segments)
    np.testing.assert_array_equal(hidden1[:, :at], hidden2[:, :at])
    assert (np.abs(hidden1[:, at] - hidden2[:, at]).max(-1) > 0).all(), "the change shows where it is made"


@every_gradient
@settings(max_examples=6)
@given(data=st.data(), seed=seeds())
def test_packed_documents_are_the_same_documents_alone(variant, data, seed):
    config = tiny_config(variant)
    values = random_values(config)
    segments = np.zeros((ROWS, LENGTH), np.int32)
    segments[:2] = data.draw(packed_rows(2, LENGTH))
    for row, places in documents(segments)[ROWS:]:
        segments[row, places] = 0  # only as many documents as there are rows to put them into
    tokens, targets = draw_tokens(config, seed)
    weights = weigh(segments)

    alone = {name: np.zeros_like(x) for name, x in (("segments", segments), ("weights", weights))}
    alone["tokens"], alone["targets"] = draw_tokens(config, seed + 1)
    for new, (row, places) in enumerate(documents(segments)):
        for name, source in (("tokens", tokens), ("targets", targets), ("weights", weights)):
            alone[name][new, : len(places)] = source[row, places]
        alone["segments"][new, : len(places)] = 1
    (loss1, (hidden1, counts1)), gradient1 = run(variant)(values, tokens, segments, targets, weights)
    (loss2, (hidden2, counts2)), gradient2 = run(variant)(
        values, alone["tokens"], alone["segments"], alone["targets"], alone["weights"]
    )
    for new, (row, places) in enumerate(documents(segments)):
        assert_close(hidden1[row, places], hidden2[new, : len(places)], 1e-4)
    np.testing.assert_array_equal(counts1, counts2)
    np.testing.assert_allclose(loss1, loss2, rtol=1e-5)
    if documents(segments):
        assert_trees_close(gradient1, gradient2)


def test_logits_are_of_the_tied_head():
    config = tiny_config("bare", head_bias=True)
    model, tokens = random_model(config), draw_tokens(config, 5)[0]
    segments = np.repeat([[1, 3, 0]], [4, 13, 3], 1).repeat(ROWS, 0).astype(np.int32)
    scores, out = jax.device_get(jit(lambda *x: (logits(*x), x[0](*x[1:])))(model, tokens, segments))
    chex.assert_type(scores, jnp.float32)
    expected = out.hidden_bsd.astype(np.float64) @ np.asarray(model.embedding[...], np.float64).T
    expected += np.asarray(model.head_bias[...])
    assert_close(scores, expected, 1e-4)
    assert_close(head(model, out.hidden_bsd), expected, 1e-4)


@every_gradient
@settings(max_examples=6)
@given(data=st.data(), seed=seeds())
def test_what_stands_in_padding_changes_nothing(variant, data, seed):
    config = tiny_config(variant)
    values = random_values(config)
    segments = data.draw(packed_rows(ROWS, LENGTH))
    (tokens, targets), (others, other_targets) = draw_tokens(config, seed), draw_tokens(config, seed + 1)
    real, weights = segments > 0, weigh(segments)
    (loss1, (hidden1, counts1)), gradient1 = run(variant)(values, tokens, segments, targets, weights)
    (loss2, (hidden2, counts2)), gradient2 = run(variant)(
        values, np.where(real, tokens, others), segments, np.where(real, targets, other_targets), weights
    )
    np.testing.assert_array_equal(np.asarray(hidden1)[real], np.asarray(hidden2)[real])
    np.testing.assert_array_equal(loss1, loss2)
    np.testing.assert_array_equal(counts1, counts2)
    np.testing.assert_array_equal(counts1.sum(-1), [real.sum()] * config.num_layers)
    if real.any():
        assert_trees_close(gradient1, gradient2, rtol=1e-6)


@every_gradient
def test_the_loss_moves_every_parameter_of_every_layer(variant):
    config = tiny_config(variant)
    tokens, targets = draw_tokens(config, 12)
    segments = np.ones((ROWS, LENGTH), np.int32)
    _, gradient = run(variant)(random_values(config), tokens, segments, targets, weigh(segments))
    assert gradient.keys() == tree.roles(abstract_model(config)).keys()
    for name, x in gradient.items():
        layers = np.asarray(x).reshape(config.num_groups if name.startswith("blocks.") else 1, -1)
        if name == "blocks.0.mixture.router.state_scale":
            layers = layers[1:]  # inert in the first layer
        assert (np.abs(layers).max(1) > 0).all(), name


@functools.cache
def at():
    """(positions) → (hidden, counts) of some tokens, by a model without residual scaling."""
    model, tokens = random_model(UNSCALED), draw_tokens(UNSCALED, 13)[0]

    @jit
    def compute(model, positions):
        out = model(tokens, None, positions)
        return out.hidden_bsd, out.stats.expert_counts_le

    return lambda positions: jax.device_get(compute(model, positions))


UNSCALED = tiny_config("plain", residual_scaling=False)
POSITIONS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))


def test_without_residual_scaling_is_with_neutral_scales_and_biases():
    config, values = tiny_config("plain"), random_values(UNSCALED)
    neutral = {name: (np.zeros if name.endswith("bias") else np.ones)(x.shape, np.float32)
               for name, x in tree.abstract_weights(config).items() if name not in values}  # fmt: skip
    assert {name.split(".")[-1] for name in neutral} == {
        "input_scale", "input_bias", "hidden_scale", "hidden_bias", "residual_scale", "residual_bias",
    }  # fmt: skip
    tokens = draw_tokens(config, 13)[0]
    hidden, counts = forward("plain")({**values, **neutral}, tokens, np.ones_like(tokens))
    assert_close(at()(POSITIONS)[0], hidden, 1e-4)
    np.testing.assert_array_equal(at()(POSITIONS)[1], counts)


def test_a_document_may_stand_anywhere():
    hidden, _ = at()(POSITIONS)
    assert_close(at()(POSITIONS + 31)[0], hidden, 1e-3)
    assert np.abs(at()(5 * POSITIONS)[0] - hidden).max() > 1e-2, "distances between tokens do matter"


@given(seed=seeds())
def test_counts_are_of_the_tokens_and_the_skip_class_comes_last(seed):
    config = tiny_config("sliding")
    tokens = draw_tokens(config, seed)[0]
    _, counts = forward("sliding")(random_values(config), tokens, np.ones((ROWS, LENGTH), np.int32))
    chex.assert_shape(counts, (config.num_layers, config.num_experts + 1))
    chex.assert_type(counts, jnp.int32)
    np.testing.assert_array_equal(counts.sum(-1), ROWS * LENGTH)
    # Layers 0 and 1 are of the first group, whose skip bias is −1; after it skip wins now and then.
    assert (counts[:2, -1] == 0).all()
    assert counts[2:, -1].sum() > 0


@pytest.mark.soak
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_recomputation_changes_nothing(remat):
    config = tiny_config("plain")
    values = random_values(config)
    tokens, targets = draw_tokens(config, 11)
    segments = np.ones((ROWS, LENGTH), np.int32)
    plain = run("plain")(values, tokens, segments, targets, weigh(segments))
    again = run("plain", remat)(values, tokens, segments, targets, weigh(segments))
    assert_close(again[0], plain[0], 1e-4)
    assert_trees_close(again[1], plain[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("sliding", [4] * 5),
        ("short", [1] * LENGTH),
        *(
            pytest.param(variant, (4, 1, 1, 4, 1, 4, 1, 4), marks=pytest.mark.soak)
            for variant in [*VARIANTS, *ABLATIONS]
        ),
    ],
)
@settings(max_examples=4)
@given(data=st.data(), seed=seeds())
def test_decoding_is_the_whole_sequence_at_every_position(variant, sizes, data, seed):
    config = config_of(variant)
    values = random_values(config)
    tokens = draw_tokens(config, seed)[0]
    segments = data.draw(packed_rows(ROWS, LENGTH))
    hidden, counts = forward(variant)(values, tokens, segments)
    cache = init_cache(config, ROWS, LENGTH + 3)
    parts, part_counts, start = [], np.zeros_like(counts), 0
    for size in sizes:
        end = start + size
        out = step(variant)(values, tokens[:, start:end], segments[:, start:end], cache)
        cache = out.cache
        parts.append(out.hidden_bsd)
        part_counts += np.asarray(out.stats.expert_counts_le)
        start = end
    assert start == LENGTH
    real = segments > 0
    assert_close(np.concatenate(parts, 1)[real], np.asarray(hidden)[real], 1e-4)
    np.testing.assert_array_equal(part_counts, counts)


@functools.cache
def step(variant: str):
    empty = abstract_model(config_of(variant))
    return jit(lambda values, tokens, segments, cache: tree.with_values(empty, values)(tokens, segments, cache=cache))


def test_tokens_outside_every_document_have_finite_states():
    config = tiny_config("plain")
    tokens, targets = draw_tokens(config, 9)
    nothing = np.zeros((ROWS, LENGTH), np.int32)
    (loss, (hidden, counts)), gradient = run("plain")(random_values(config), tokens, nothing, targets, weigh(nothing))
    assert loss == 0
    assert counts.sum() == 0
    chex.assert_tree_all_finite(hidden)
    chex.assert_trees_all_equal(gradient, jax.tree.map(np.zeros_like, gradient))


def test_a_sequence_longer_than_allowed_is_refused():
    config = tiny_config("plain", max_positions=8)
    model = random_model(config)
    for call in (
        lambda: model(jnp.zeros((1, 9), jnp.int32)),
        lambda: model(jnp.zeros((1, 1), jnp.int32), cache=init_cache(config, 1, 9)),
    ):
        with pytest.raises(InputError, match=r"9 tokens long.*model\.max_positions.*8"):
            call()
    with pytest.raises(InputError, match="5 tokens do not fit in the cache, which holds 4"):
        model(jnp.zeros((1, 5), jnp.int32), cache=init_cache(config, 1, 4))
    jax.eval_shape(lambda model: model(jnp.zeros((1, 8), jnp.int32)).hidden_bsd, model)


def test_bfloat16_computes_close_to_float32():
    config = tiny_config("plain")
    values = {name: np.array(x) for name, x in random_values(config).items()}
    for name, value in values.items():
        if "balancing" in name:
            value[..., 0] += 2.0  # more than all probabilities: rounding cannot send a token elsewhere
    empty = abstract_model(config)
    params = {name: x for name, x in values.items() if "balancing" not in name}
    dtypes = tree.compute_dtypes(tree.roles(empty), jnp.bfloat16)
    low = {**values, **{name: x.astype(dtypes[name]) for name, x in params.items()}}
    tokens = draw_tokens(config, 6)[0]
    low_hidden = jit(lambda values: tree.with_values(empty, values)(tokens).hidden_bsd)(low)
    hidden, _ = forward("plain")(values, tokens, np.ones_like(tokens))
    chex.assert_type([low_hidden, hidden], [jnp.bfloat16, jnp.float32])
    error = np.linalg.norm(np.asarray(low_hidden, np.float32) - hidden) / np.linalg.norm(hidden)
    assert 1e-5 < error < 0.03


def test_parameters_start_as_documented():
    config = dataclasses.replace(
        tiny_config("biased", num_layers=3), vocab_size=400, hidden_size=64, init_std=0.05, num_kv_heads=2
    )
    draw = jit(functools.partial(Zaya, config))
    model, again = (jax.device_get(draw(jax.random.key(1))) for _ in range(2))
    roles = tree.roles(model)
    for name, x in tree.parameters(model).items():
        chex.assert_type(x, jnp.float32)
        if roles[name] in (*MATRIX_ROLES, "embedding"):
            std = 0.05 if name == "embedding" else x.shape[-2] ** -0.5
            assert abs(np.std(x) / std - 1) < 5 / np.sqrt(2 * x.size), name
            assert abs(np.mean(x)) < 5 * std / np.sqrt(x.size), name
        elif roles[name] == "convolution":
            taps, channels = (4, 1) if name.endswith("depthwise") else (3, config.head_dim)
            bound = (taps * channels) ** -0.5
            assert 0.9 * bound < np.abs(x).max() <= bound, name
            assert abs(np.std(x) / (bound / 3**0.5) - 1) < 0.2, name
        else:
            assert np.all(x == (0 if roles[name] == "bias" else 1)), name
    layers = tree.parameters(model)["blocks.0.attention.query"]
    chex.assert_axis_dimension(layers, 0, 3)
    assert np.abs(np.corrcoef(layers.reshape(3, -1)) - np.eye(3)).max() < 0.1, "no two layers are drawn alike"
    for bias in tree.balancing_biases(model).values():
        np.testing.assert_array_equal(bias, [[0] * config.num_experts + [-1]] * 3)
    chex.assert_trees_all_equal(tree.parameters(model), tree.parameters(again))


def test_patterns_of_one_kind_of_layer_share_a_program():
    sliding = tiny_config("sliding", layer_pattern=("sliding", "sliding"))
    assert (len(sliding.period), sliding.num_groups) == (1, 4)
    assert len(abstract_model(sliding).blocks) == 1


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 8), (17,)])
def test_the_head_of_few_rows_is_that_of_many(shape):
    model = random_model(tiny_config())
    hidden = jax.random.normal(jax.random.key(0), (*shape, model.config.hidden_size))
    expected = np.asarray(hidden, np.float64) @ np.asarray(model.embedding[...], np.float64).T
    np.testing.assert_allclose(head(model, hidden), expected, rtol=0, atol=1e-5)
    text = jax.jit(head).trace(model, hidden).lower(lowering_platforms=("cuda",)).as_text()
    (rows,) = re.findall(r"dot_general.*: \(tensor<([\dx]+)xf32>", text)
    padded = math.prod(shape) + -math.prod(shape) % 8 if math.prod(shape) <= 16 else math.prod(shape)
    assert math.prod(map(int, rows.split("x")[:-1])) == padded  # not one row, which would cast the head
