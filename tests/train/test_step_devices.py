"""The training step on one device and on several."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from tests.helpers import assert_close
from tests.train_helpers import CONFIG, fast_jit, leaves, make_batch, make_program, on_devices, placed_step, setup
from zaya_jax.config.stages import total_steps
from zaya_jax.parallel.mesh import batch_sharding, replicated
from zaya_jax.train.state import init_state

COLLECTIVE = re.compile(
    r"= [^=]*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(-start)?\("
)


def test_one_device_needs_no_collective():
    text = setup().compiled.as_text()
    assert "while(" in text  # it is the program that is looked at
    assert not COLLECTIVE.search(text)


def two_steps(devices):
    """Metrics and state after two small steps, and the loss of an evaluation then."""
    program = make_program(CONFIG, devices)
    mesh = program.placement.mesh
    if devices == 1:
        _, _, state, step, _ = setup()
        batch = make_batch()
    else:
        shardings = program.placement.shardings(program.abstract_state)
        state = fast_jit(lambda: init_state(program), out_shardings=shardings)()
        step, batch = placed_step(program)
    # Adam's first update of a gradient that is zero but for rounding is as large as any: at small rates it is small.
    last = jax.device_put(np.int32(total_steps(CONFIG)), replicated(mesh))
    state, _ = step(dataclasses.replace(state, step=last), batch)
    state, metrics = step(state, batch)
    evaluation = fast_jit(program.evaluation_step)
    flat = jax.device_put(jax.tree.map(lambda a: a[0], make_batch()), batch_sharding(mesh))
    sums = evaluation(state.params, state.balance, flat)
    return leaves(metrics), leaves(state), leaves(sums)


@pytest.mark.soak
def test_four_devices_give_what_one_gives():
    for alone, split in zip(two_steps(1), on_devices(4, "tests.train.test_step_devices:two_steps", 4), strict=True):
        assert alone.keys() == split.keys()
        assert_close(split, alone, 1e-4)
