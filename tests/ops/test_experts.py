"""Dispatch against every token through every expert, masked afterwards."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_close, jit, seeds
from tests.kernel_helpers import kernels
from zaya_jax.ops.experts import dispatch_experts, permute

EXPERTS = {
    "reference": dispatch_experts,
    "fused": kernels("interpret").ops.experts,
    "products": kernels("interpret").without(("experts",)).ops.experts,
}
T, D, F, E = 21, 6, 5, 4


def one_hot(h, expert, weight, gate_up, down):
    """All experts on all tokens, kept where chosen; classes from e on are chosen by none."""
    both = jnp.einsum("td,edf->etf", h, gate_up)
    out = jnp.einsum("etf,efd->etd", jax.nn.silu(both[..., :F]) * both[..., F:], down)
    return jnp.einsum("etd,te,t->td", out, jax.nn.one_hot(expert, E), weight)


@functools.cache
def compiled(name):
    function = one_hot if name == "one_hot" else EXPERTS[name]

    def call(h, expert, weight, gate_up, down, cotangent):
        out, back = jax.vjp(lambda h, w, g, d: function(h, expert, w, g, d), h, weight, gate_up, down)
        return out, back(cotangent)

    return jit(call)


def draw(seed):
    rng = np.random.default_rng(seed)
    shapes = ((T, D), (E, D, 2 * F), (E, F, D), (T, D))
    h, gate_up, down, cotangent = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return h, jnp.asarray(rng.uniform(0.1, 1, T), jnp.float32), gate_up, down, cotangent


@st.composite
def choices(draw):
    """Classes of the tokens, of a few allowed ones: so experts stay empty, get all, or all is skipped."""
    allowed = draw(st.lists(st.integers(0, E + 1), min_size=1, max_size=4))
    return np.array([draw(st.sampled_from(allowed)) for _ in range(T)], np.int32)


def check(name, expert, seed):
    h, weight, gate_up, down, cotangent = draw(seed)
    ours = compiled(name)(h, expert, weight, gate_up, down, cotangent)
    theirs = compiled("one_hot")(h, expert, weight, gate_up, down, cotangent)
    assert_close(ours, theirs, 1e-5, least=1.0)
    out, (dh, dweight, dgate_up, ddown) = ours
    past = expert >= E
    for array in (out, dh, dweight):
        assert not np.any(np.asarray(array)[past]), "skip and padding give nothing and get no gradient"
    for e in set(range(E)) - set(expert.tolist()):
        assert not np.any(dgate_up[e])
        assert not np.any(ddown[e])


@given(expert=choices(), seed=seeds())
def test_equals_the_one_hot_form(expert, seed):
    check("reference", expert, seed)


@pytest.mark.parametrize("only", range(E + 2))
def test_all_tokens_of_one_class(only):
    check("reference", np.full(T, only, np.int32), only)


@jax.jit
def permuted(x, order, inverse, cotangent):
    out, back = jax.vjp(lambda x: permute(x, order, inverse), x)
    return out, *back(cotangent)


@given(seed=seeds())
def test_permute_and_its_gradient_undo_each_other(seed):
    rng = np.random.default_rng(seed)
    x, cotangent = rng.normal(size=(2, 7, 3)).astype(np.float32)
    order = rng.permutation(7)
    out, back = permuted(x, order, np.argsort(order), cotangent)
    np.testing.assert_array_equal(out, x[order])
    np.testing.assert_array_equal(np.asarray(back)[order], cotangent)


def test_bfloat16_stays_bfloat16():
    h, _, gate_up, down, cotangent = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in draw(1))
    expert, weight = (jax.ShapeDtypeStruct((T,), dtype) for dtype in (jnp.int32, jnp.float32))
    out, gradients = jax.eval_shape(compiled("reference"), h, expert, weight, gate_up, down, cotangent)
    chex.assert_type([out, *gradients], [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16])


@pytest.mark.soak
@pytest.mark.parametrize("name", ["fused", "products"])
def test_kernels_equal_the_one_hot_form(name):
    @settings(max_examples=10)
    @given(expert=choices(), seed=seeds())
    def run(expert, seed):
        check(name, expert, seed)

    run()


@pytest.mark.parametrize(
    ("platform", "without", "expected"),
    [
        ("cpu", (), set()),
        ("rocm", (), {"grouped_swiglu", "grouped_product"}),
        ("rocm", ("experts",), {"grouped_product"}),
        ("rocm", ("experts", "grouped_product"), set()),
    ],
)
def test_what_is_not_done_by_a_kernel_as_a_whole_is_done_by_those_of_its_parts(platform, without, expected):
    h, weight, gate_up, down, _ = draw(0)
    experts = kernels(platform).without(without).ops.experts
    text = str(jax.make_jaxpr(experts)(h, np.zeros(T, np.int32), weight, gate_up, down))
    assert {name for name in ("grouped_swiglu", "grouped_product", "ragged_dot") if name in text} == expected


def test_only_the_product_that_has_no_kernel_is_done_by_its_reference():
    h, weight, gate_up, down, _ = draw(0)
    experts = kernels("rocm").without(("experts", "grouped_product_transposed")).ops.experts

    def gradient(h):
        return jax.grad(lambda h: experts(h, np.zeros(T, np.int32), weight, gate_up, down).sum())(h)

    text = str(jax.make_jaxpr(gradient)(h))
    assert "name=grouped_product\n" in text
    assert "grouped_product_transposed" not in text
