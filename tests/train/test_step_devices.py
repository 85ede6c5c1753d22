"""The training step on one device and on several."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from tests.helpers import assert_close
from tests.train_helpers import CONFIG, fast_jit, leaves, make_batch, on_devices, setup
from zaya_jax.config.stages import total_steps
from zaya_jax.parallel.mesh import batch_sharding, make_mesh, replicated
from zaya_jax.train.state import init_state, layout_of, make_blueprint
from zaya_jax.train.step import make_evaluation_step, make_train_step

COLLECTIVE = re.compile(
    r"= [^=]*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(-start)?\("
)


def test_one_device_needs_no_collective():
    text = setup().hlo
    assert "while(" in text  # it is the program that is looked at
    assert not COLLECTIVE.search(text)


def two_steps(devices):
    """Metrics and state after two small steps, and the loss of an evaluation then."""
    mesh = make_mesh(devices=jax.devices()[:devices])
    blueprint = make_blueprint(CONFIG)
    if devices == 1:
        _, _, state, step, _ = setup()
        batch = make_batch()
    else:
        shardings = layout_of(CONFIG, blueprint, mesh).shardings(jax.eval_shape(lambda: init_state(CONFIG, blueprint)))
        state = fast_jit(lambda: init_state(CONFIG, blueprint), out_shardings=shardings)()
        batch = jax.device_put(make_batch(), batch_sharding(mesh, leading=1))
        step = fast_jit(make_train_step(CONFIG, blueprint, mesh), out_shardings=(shardings, replicated(mesh)))
    # Adam's first update of a gradient that is zero but for rounding is as large as any: at small rates it is small.
    last = jax.device_put(np.int32(total_steps(CONFIG)), replicated(mesh))
    state, _ = step(dataclasses.replace(state, step=last), batch)
    state, metrics = step(state, batch)
    evaluation = fast_jit(make_evaluation_step(CONFIG, blueprint, mesh))
    flat = jax.device_put(jax.tree.map(lambda a: a[0], make_batch()), batch_sharding(mesh))
    sums = evaluation(state.params, state.balance, flat)
    return leaves(metrics), leaves(state), leaves(sums)


@pytest.mark.soak
def test_four_devices_give_what_one_gives():
    for one, four in zip(two_steps(1), on_devices(4, "tests.train.test_step_devices:two_steps", 4), strict=True):
        assert one.keys() == four.keys()
        assert_close(four, one, 1e-4)
