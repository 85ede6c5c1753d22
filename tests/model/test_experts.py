"""The mixture as a layer: each token's own expert, times its weight; padding through none, counted nowhere."""

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
    routing = mixture.router(h, state, LOCAL)
    both = jnp.einsum("bsd,edf->bsef", h, mixture.experts.gate_up[...])
    f = CONFIG.expert_size
    out = jnp.einsum("bsef,efd->bsed", jax.nn.silu(both[..., :f]) * both[..., f:], mixture.experts.down[...])
    chosen = jax.nn.one_hot(routing.expert_bs, E) * routing.weight_bs[..., None] * (segments > 0)[..., None]
    counts = (jax.nn.one_hot(routing.expert_bs, E + 1) * (segments > 0)[..., None]).sum((0, 1))
    return jnp.einsum("bsed,bse->bsd", out, chosen), routing.state_bsr, counts.astype(jnp.int32)


def with_gradient(function):
    def loss(mixture, h, state, segments, cotangent):
        out = function(mixture, h, state, segments)
        return (out[0] * cotangent).sum() + out[1].sum(), out

    return jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


sorted_form = with_gradient(lambda mixture, h, state, segments: mixture(h, state, segments, LOCAL))
dense_form = with_gradient(dense)


@given(data=st.data(), seed=seeds())
def test_equals_all_experts_on_all_tokens(data, seed):
    rng = np.random.default_rng(seed)
    h, cotangent = rng.normal(size=(2, B, S, CONFIG.hidden_size)).astype(np.float32)
    state = rng.normal(size=(B, S, CONFIG.router_size)).astype(np.float32)
    segments = data.draw(packed_rows(B, S))
    ours = sorted_form(mixture(), h, state, segments, cotangent)
    theirs = dense_form(mixture(), h, state, segments, cotangent)
    assert_close(ours, theirs, 1e-4, least=1.0)
    (_, (out, _, counts)), (gradient, *_) = ours
    assert not np.any(np.asarray(out)[segments == 0])
    assert counts.sum() == (segments > 0).sum()
    assert counts[3] == 0
    assert not np.any(gradient.experts.gate_up[...][3])


def test_some_tokens_are_skipped_and_most_are_not():
    rng = np.random.default_rng(1)
    h = rng.normal(size=(B, S, CONFIG.hidden_size)).astype(np.float32)
    zeros = np.zeros((B, S, CONFIG.router_size), np.float32)
    (_, (out, _, counts)), _ = sorted_form(mixture(), h, zeros, np.ones((B, S), np.int32), h)
    assert 0 < counts[-1] < B * S / 2
    assert (~np.any(out, -1)).sum() == counts[-1]
