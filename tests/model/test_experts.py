"""The mixture as a layer: each token's own expert, times its weight; padding through none, counted nowhere.

Gradients of dispatch are compared in tests/ops/test_experts.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close, jit, packed_rows, seeds, tiny_config
from zaya_jax.model.experts import MixtureOfExperts
from zaya_jax.ops import LOCAL

CONFIG = tiny_config()
E, B, S = CONFIG.num_experts, 3, 9


@functools.cache
def mixture():
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(MixtureOfExperts, CONFIG), jax.random.key(0))
    drawn = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.7, x.shape), jnp.float32), shapes)
    leaves, tree = jax.tree.flatten(drawn)
    bias = jnp.asarray([0.1, 0.0, -0.1, -9.0, 0.5])  # the fourth expert gets nobody, skip gets some
    return jax.tree.unflatten(tree, [bias if x.shape == (E + 1,) else x for x in leaves])


def dense(mixture, h, state, segments):
    """Every token through every expert, the chosen one kept."""
    routing = mixture.router(h, state, segments > 0, LOCAL)
    both = jnp.einsum("bsd,edf->bsef", h, mixture.experts.gate_up[...])
    f = CONFIG.expert_size
    out = jnp.einsum("bsef,efd->bsed", jax.nn.silu(both[..., :f]) * both[..., f:], mixture.experts.down[...])
    chosen = jax.nn.one_hot(routing.expert_bs, E) * routing.weight_bs[..., None] * (segments > 0)[..., None]
    counts = (jax.nn.one_hot(routing.expert_bs, E + 1) * (segments > 0)[..., None]).sum((0, 1))
    return jnp.einsum("bsed,bse->bsd", out, chosen), routing.state_bsr, counts.astype(jnp.int32)


sorted_form = jit(lambda mixture, h, state, segments: mixture(h, state, segments, LOCAL))
dense_form = jit(dense)


@given(data=st.data(), seed=seeds())
def test_equals_all_experts_on_all_tokens(data, seed):
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(B, S, CONFIG.hidden_size)).astype(np.float32)
    state = rng.normal(size=(B, S, CONFIG.router_size)).astype(np.float32)
    segments = data.draw(packed_rows(B, S))
    out, _, counts, _ = ours = sorted_form(mixture(), h, state, segments)
    assert_close(tuple(ours[:3]), dense_form(mixture(), h, state, segments), 1e-4, least=1.0)
    assert not np.any(np.asarray(out)[segments == 0])
    assert counts.sum() == (segments > 0).sum()
    assert counts[3] == 0


def test_some_tokens_are_skipped_and_most_are_not():
    rng = np.random.default_rng(1)
    h = rng.normal(size=(B, S, CONFIG.hidden_size)).astype(np.float32)
    zeros = np.zeros((B, S, CONFIG.router_size), np.float32)
    out, _, counts, _ = jax.device_get(sorted_form(mixture(), h, zeros, np.ones((B, S), np.int32)))
    assert 0 < counts[-1] < B * S / 2
    assert (~np.any(out, -1)).sum() == counts[-1]
