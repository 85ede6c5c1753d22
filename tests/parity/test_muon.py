"""Muon against `torch.optim.Muon`, which takes one matrix at a time, stored [out, in]."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.config import MuonConfig, OptimizerConfig
from zaya_jax.ops import LOCAL
from zaya_jax.optim.build import make_optimizer

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

SHAPES = {"square": (24, 24), "wide": (16, 40), "tall": (40, 16), "layers": (3, 24, 16), "experts": (2, 3, 16, 24)}
STEPS = 5
RATE, DECAY, MOMENTUM = 0.3, 0.1, 0.9  # of a size that moves say more than where the parameters started


def draw(seed, scale):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def ours(form, nesterov, scaling, iterates):
    muon = MuonConfig(
        learning_rate=RATE, momentum=MOMENTUM, momentum_form=form, nesterov=nesterov, scaling=scaling,
        newton_schulz_dtype=iterates, weight_decay=DECAY,
    )  # fmt: skip
    optimizer = make_optimizer(OptimizerConfig(muon=muon), dict.fromkeys(SHAPES, "expert"), {})
    update = jax.jit(functools.partial(optimizer.update, ops=LOCAL))
    params = jax.tree.map(jnp.asarray, draw(0, 0.1))
    state = optimizer.init(params)
    for step in range(1, STEPS + 1):
        updates, state = update(draw(step, 1.0), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params


def theirs(nesterov, scaling):
    params = {
        (name, index): torch.nn.Parameter(torch.from_numpy(x[index].T.copy()))
        for name, x in draw(0, 0.1).items()
        for index in np.ndindex(x.shape[:-2])
    }
    optimizer = torch.optim.Muon(
        params.values(), lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, nesterov=nesterov, adjust_lr_fn=scaling
    )
    for step in range(1, STEPS + 1):
        grads = draw(step, 1.0)
        for (name, index), parameter in params.items():
            parameter.grad = torch.from_numpy(grads[name][index].T.copy())
        optimizer.step()
    stacked = {name: np.empty(shape, np.float32) for name, shape in SHAPES.items()}
    for (name, index), parameter in params.items():
        stacked[name][index] = parameter.detach().numpy().T
    return stacked


def worst(result, reference):
    return max(np.linalg.norm(result[name] - x) / np.linalg.norm(x) for name, x in reference.items())


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_torchs_muon(nesterov, scaling, monkeypatch):
    """Torch keeps a mean without correction; that is our sum times 1 − μ, which Newton–Schulz takes out.

    Torch's iterates are in bfloat16, always. Here its cast to that gives a copy in float32 instead; a copy,
    since what follows is in place and would reach the momentum. The algorithm stays what it is.
    """
    in_bfloat16 = theirs(nesterov, scaling)
    assert worst(ours("sum", nesterov, scaling, "bfloat16"), in_bfloat16) < 0.02
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.to(torch.float32, copy=True))
    in_float32 = theirs(nesterov, scaling)
    assert worst(in_bfloat16, in_float32) > 1e-3, "the cast was replaced"
    assert worst(ours("sum", nesterov, scaling, "float32"), in_float32) < 1e-5


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_ema_form_is_torchs_only_where_its_correction_is_a_factor(nesterov, monkeypatch):
    """Without Nesterov the correction is one factor; with it, two that differ in the first steps."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.to(torch.float32, copy=True))
    error = worst(ours("ema", nesterov, "original", "float32"), theirs(nesterov, "original"))
    assert (1e-3 < error < 0.2) if nesterov else error < 1e-5
