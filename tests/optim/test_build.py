"""Who is moved by what."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.helpers import jit, random_values, tiny_config
from zaya_jax.config import AdamWConfig, MuonConfig, OptimizerConfig, RoleConfig, RolesConfig
from zaya_jax.model import tree
from zaya_jax.model.layers import MATRIX_ROLES, ROLES
from zaya_jax.model.zaya import abstract_model
from zaya_jax.ops import LOCAL
from zaya_jax.optim.build import OPTIMIZERS, Optimizer, make_optimizer
from zaya_jax.optim.muon import scale_by_muon

CONFIG = tiny_config("biased")
ROLES_BY_NAME = tree.roles(abstract_model(CONFIG))
FUSED = tree.fused(abstract_model(CONFIG))
PARAMS = {name: np.asarray(random_values(CONFIG)[name]) for name in ROLES_BY_NAME}
GRADIENTS = [
    {name: np.random.default_rng(seed).normal(size=x.shape).astype(np.float32) for name, x in PARAMS.items()}
    for seed in range(3)
]
OPTIMIZER = OptimizerConfig(
    muon=MuonConfig(learning_rate=0.01, weight_decay=0.3, newton_schulz_steps=2, newton_schulz_dtype="float32"),
    adamw=AdamWConfig(learning_rate=0.002, b1=0.8, b2=0.9, eps=1e-4, weight_decay=0.7),
)
DECAYED = {"attention", "router", "expert", "embedding", "convolution"}
# Each role keeps its defaults under one matrix optimizer, and has other factors under the other.
ROLE_CONFIGS = {role: RoleConfig(learning_rate=1.5 + number, weight_decay=0.25 * number)
                for number, role in enumerate(ROLES)}  # fmt: skip
EVEN, ODD = (RolesConfig(**{role: ROLE_CONFIGS[role] for role in ROLES[first::2]}) for first in (0, 1))
SPLIT = dataclasses.replace(OPTIMIZER.muon, scaling="original", gate_up="split")
CONFIGS = {
    "muon": dataclasses.replace(OPTIMIZER, roles=EVEN, muon=SPLIT),
    "adamw": dataclasses.replace(OPTIMIZER, roles=ODD, matrices="adamw"),
}


def moved_by_muon(config):
    return {name for name, role in ROLES_BY_NAME.items() if role in MATRIX_ROLES and config.matrices == "muon"}


def rate_and_decay(name, config):
    role = ROLES_BY_NAME[name]
    section = config.muon if name in moved_by_muon(config) else config.adamw
    own = getattr(config.roles, role)
    decay = float(role in DECAYED) if own.weight_decay is None else own.weight_decay
    return section.learning_rate * own.learning_rate, section.weight_decay * decay


@functools.cache
def transform(config):
    optimizer = make_optimizer(config, ROLES_BY_NAME, FUSED)
    return jit(optimizer.init), jit(functools.partial(optimizer.update, ops=LOCAL))


@functools.cache
def follow(config):
    """Parameters after three steps."""
    init, update = transform(config)
    params, state = PARAMS, init(PARAMS)
    for grads in GRADIENTS:
        updates, state = update(grads, state, params)
        params = jax.tree.map(np.add, params, updates)
    return params


def assert_moves_close(ours, theirs, names):
    for name in names:
        move, expected = ours[name] - PARAMS[name], theirs[name] - PARAMS[name]
        assert np.any(expected), name
        assert np.linalg.norm(move - expected) < 1e-3 * np.linalg.norm(expected), name


def test_the_parameters_of_zaya1_have_the_roles_they_should():
    """docs/reference.md §3.1: projections, router and expert matrices to Muon, all else to AdamW."""
    assert set(ROLES_BY_NAME.values()) == set(ROLES), "this model has them all"
    assert {role.name for role in dataclasses.fields(RolesConfig)} == set(ROLES)
    muon = {name.rsplit(".", 1)[-1] for name, role in ROLES_BY_NAME.items() if role in MATRIX_ROLES}
    assert muon == {"query", "key", "value_current", "value_delayed", "output", "down", "hidden1", "hidden2", "gate_up"}
    decayed = {name.removeprefix("blocks.0.") for name, role in ROLES_BY_NAME.items() if role in DECAYED}
    others = {"embedding", "attention.depthwise", "attention.grouped"}
    assert {name for name in decayed if name.rsplit(".", 1)[-1] not in muon} == others
    assert FUSED == {"blocks.0.mixture.experts.gate_up": 2}


@pytest.mark.parametrize("which", CONFIGS)
def test_decay_is_of_the_role_and_of_the_base_rate(which):
    init, update = transform(CONFIGS[which])
    updates, _ = update(jax.tree.map(np.zeros_like, PARAMS), init(PARAMS), PARAMS)
    for name, x in updates.items():
        rate, decay = rate_and_decay(name, CONFIGS[which])
        np.testing.assert_allclose(x, -rate * decay * PARAMS[name], rtol=1e-5, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("which", CONFIGS)
def test_adamw_moves_its_roles_as_its_paper_says(which):
    config = CONFIGS[which]

    def alone(name):
        """Loshchilov & Hutter's Algorithm 2, in float64."""
        (rate, decay), x, mean, square = rate_and_decay(name, config), PARAMS[name].astype(np.float64), 0.0, 0.0
        for step, grads in enumerate(GRADIENTS, 1):
            mean, square = 0.8 * mean + 0.2 * grads[name], 0.9 * square + 0.1 * np.square(grads[name], dtype=np.float64)
            direction = mean / (1 - 0.8**step) / (np.sqrt(square / (1 - 0.9**step)) + 1e-4)
            x = x - rate * (direction + decay * x)
        return x

    names = set(PARAMS) - moved_by_muon(config)
    assert_moves_close(follow(config), {name: alone(name) for name in names}, names)


def test_muon_moves_matrices_and_splits_what_it_is_told_to():
    config = CONFIGS["muon"]
    muon = scale_by_muon(config.muon, FUSED)
    # One matrix of each role, and that which may be split.
    names = {role: name for name, role in sorted(ROLES_BY_NAME.items()) if name in moved_by_muon(config)}.values()
    names = {*names, *FUSED}
    theirs = {name: PARAMS[name] for name in names}
    state, update = muon.init(theirs), jit(functools.partial(muon.update, ops=LOCAL))
    for grads in GRADIENTS:
        directions, state = update({name: grads[name] for name in names}, state)
        for name in names:
            rate, decay = rate_and_decay(name, config)
            theirs[name] = (1 - rate * decay) * theirs[name] - rate * np.asarray(directions[name])
    assert_moves_close(follow(config), theirs, names)


@dataclasses.dataclass(frozen=True)
class SignConfig:
    learning_rate: float = 0.5
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class WithSign(OptimizerConfig):
    sign: SignConfig = SignConfig()


def test_a_section_and_an_entry_in_the_table_are_another_optimizer(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "sign", Optimizer(lambda config, fused: optax.scale_by_sign()))
    optimizer = make_optimizer(WithSign(matrices="sign"), ROLES_BY_NAME, FUSED)  # pyright: ignore[reportArgumentType]
    updates, _ = jit(optimizer.update)(GRADIENTS[0], jit(optimizer.init)(PARAMS), PARAMS)
    for name, role in ROLES_BY_NAME.items():
        by_sign = np.array_equal(updates[name], -0.5 * np.sign(GRADIENTS[0][name]))
        assert by_sign == (role in MATRIX_ROLES), name


def test_matrices_are_not_moved_without_the_operations_of_a_placement():
    """References in their place would give the same numbers, only slower."""
    optimizer = make_optimizer(OPTIMIZER, ROLES_BY_NAME, FUSED)
    with pytest.raises(TypeError, match="'ops'"):
        optimizer.update(GRADIENTS[0], optimizer.init(PARAMS), PARAMS)


def test_a_parameter_without_a_role_is_refused():
    class Bare(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones((2, 2)))

    with pytest.raises(ValueError, match=r"no role: weight\."):
        tree.roles(Bare())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="bare"):
        make_optimizer(OPTIMIZER, ROLES_BY_NAME, FUSED).init({**PARAMS, "bare": jnp.ones((2, 2))})
    with pytest.raises(ValueError, match="other"):
        make_optimizer(OPTIMIZER, {"w": "other"}, {}).init({"w": jnp.ones((2, 2))})  # pyright: ignore[reportArgumentType]
