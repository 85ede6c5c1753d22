"""The overlap of experts is that of their singular subspaces, whatever basis they are written in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from tests.helpers import assert_close, random_model, seeds, tiny_config
from zaya_jax import expert_redundancy
from zaya_jax.errors import InputError
from zaya_jax.model.redundancy import _overlap
from zaya_jax.model.tree import map_variables, parameters

E, D, X, RANK = 3, 12, 8, 4
overlap = jax.jit(_overlap, static_argnums=1)


def rotation(rng, size):
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def draw(seed):
    rng = np.random.default_rng(seed)
    return rng, rng.normal(size=(E, D, X)).astype(np.float32)


@settings(max_examples=25)
@given(seeds())
def test_it_is_the_definition_by_singular_values(seed):
    _, x = draw(seed)
    result = overlap(x, RANK)
    u, s, _ = np.linalg.svd(x.astype(np.float64))
    q = u[:, :, :RANK]
    expected = np.square(np.einsum("idr,jdq->ijrq", q, q)).sum((2, 3)) / RANK
    gap = (s[:, RANK - 1] - s[:, RANK]).min() / s.max()  # near-equal singular values have no definite subspace
    assert_close(result.overlap_lee, expected, 1e-5 / gap)
    assert_close(result.energy_le, np.square(s[:, :RANK]).sum(1) / np.square(s).sum(1), 1e-5)
    assert np.all((np.asarray(result.overlap_lee) > -1e-5) & (np.asarray(result.overlap_lee) < 1 + 1e-5))
    assert_close(np.diagonal(result.overlap_lee), np.ones(E), 1e-5)


@settings(max_examples=25)
@given(seeds())
def test_bases_and_scales_do_not_matter(seed):
    """Neither a rotation of the residual stream for all experts, nor of an expert's own width, nor its scale."""
    rng, x = draw(seed)
    s = np.linalg.svd(x, compute_uv=False)
    gap = (s[:, RANK - 1] - s[:, RANK]).min() / s.max()
    scale = np.exp(rng.uniform(-2, 2, (E, 1, 1)))
    turned = np.einsum("cd,edx,exy->ecy", rotation(rng, D), x * scale, np.stack([rotation(rng, X) for _ in range(E)]))
    assert_close(overlap(turned.astype(np.float32), RANK), overlap(x, RANK), 1e-5 / gap)


def test_equal_experts_overlap_wholly_and_orthogonal_ones_not_at_all():
    rng, x = draw(0)
    same = np.stack([x[0], x[0] @ rotation(rng, X) * 3, x[0]]).astype(np.float32)
    assert_close(overlap(same, RANK).overlap_lee, np.ones((E, E)), 1e-5)
    apart = np.zeros_like(x)
    for expert in range(E):
        rows = slice(expert * RANK, (expert + 1) * RANK)
        apart[expert, rows] = x[expert, rows]
    result = overlap(apart, RANK)
    np.testing.assert_allclose(result.overlap_lee, np.eye(E), atol=1e-5)
    assert_close(result.energy_le, np.ones(E), 1e-5)


def test_random_experts_are_at_the_floor_and_each_layer_is_its_own():
    config = dataclasses.replace(tiny_config("sliding"), hidden_size=48, num_experts=6)  # two stacks of two layers
    model = random_model(config)

    def repeat(name, x):
        """Experts of layer 2, which is group 1 of position 0, read alike; those of layer 1 write alike."""
        if name == "blocks.0.mixture.experts.gate_up":
            x = np.array(x)
            x[1] = x[1, :1]
        if name == "blocks.1.mixture.experts.down":
            x = np.array(x)
            x[0] = x[0, :1]
        return jnp.asarray(x)

    result = expert_redundancy(map_variables(model, repeat), rank=12)
    assert result.floor == 0.25
    assert_close(result.input.mean_l[2], 1.0, 1e-4)
    assert_close(result.output.mean_l[1], 1.0, 1e-4)
    others = [*np.delete(result.input.mean_l, 2), *np.delete(result.output.mean_l, 1)]
    np.testing.assert_allclose(others, result.floor, atol=0.03)
    low = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(jnp.bfloat16)), model)
    assert expert_redundancy(low, 12).output.overlap_lee.dtype == jnp.float32
    assert parameters(low)["blocks.0.mixture.experts.down"].dtype == jnp.bfloat16


def test_a_rank_that_matrices_do_not_have_is_refused():
    model = random_model(tiny_config())
    for rank in (0, 13):
        with pytest.raises(InputError, match=f"rank.*{rank}.*at most 12"):
            expert_redundancy(model, rank)
