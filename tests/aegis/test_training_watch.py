"""A loss that stays high is seen and a single spike is not; a slow process is told from the others."""

import math
import random

import pytest

from zaya_jax.aegis.policy import TrainingPolicy
from zaya_jax.aegis.training_watch import LossWatch, StragglerWatch
from zaya_jax.run.progress_record import Phase, Progress

POLICY = TrainingPolicy(straggler_steps=10)
NAN = float("nan")


def falling(step, rng):
    return 2 + 3 * math.exp(-step / 300) + rng.gauss(0, 0.05)


def look_at(losses):
    watch = LossWatch(POLICY)
    return [(step, each) for step, loss in enumerate(losses, 1) if (each := watch.look(step, loss)) is not None]


@pytest.mark.parametrize("seed", range(10))
def test_a_quiet_run_and_single_spikes_raise_no_alarm(seed):
    rng = random.Random(seed)
    assert not look_at([falling(step, rng) + 10 * (rng.random() < 0.02) for step in range(2000)])


@pytest.mark.parametrize("seed", range(3))
def test_a_divergence_is_seen_after_as_many_steps_as_the_policy_says(seed):
    rng = random.Random(seed)
    seen = look_at([falling(step, rng) + 5 * (step >= 400) for step in range(600)])
    assert [(step, each.code) for step, each in seen] == [(410, "loss-spike")]


def test_losses_that_are_not_finite_are_seen_once():
    seen = look_at([3.0] * 30 + [math.inf, NAN] * 10)
    assert [(step, each.code) for step, each in seen] == [(40, "loss-not-finite")]


def test_the_same_step_counts_once():
    watch = LossWatch(POLICY)
    assert all(watch.look(7, math.inf) is None for _ in range(50))


def records(step, data, rng):
    """Each process works 1 s a step, of which `data` seconds by itself; then all wait for the slowest."""
    longest = max(data)
    rows = {}
    for rank, own in enumerate(data):
        seconds = [0.0] * len(Phase)
        seconds[Phase.DATA] = own * step * (1 + rng.uniform(-0.1, 0.1))
        seconds[Phase.DEVICE_WAIT] = (1 + longest - own) * step
        rows[rank] = Progress(step, 1, Phase.DATA, step, 0, 1.0, 1.0, tuple(seconds), (), None)
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_no_process_of_a_healthy_job_is_called_slow(seed):
    rng, watch = random.Random(seed), StragglerWatch(POLICY)
    assert not [seen for step in range(0, 400) for seen in watch.look(records(step, [0.02, 0.05, 0.03, 0.04], rng))]


def test_a_process_that_doubles_the_step_is_reported_after_two_windows():
    rng, watch = random.Random(0), StragglerWatch(POLICY)
    seen = [(step, each) for step in range(60) for each in watch.look(records(step, [0.02, 0.02, 1.02, 0.02], rng))]
    assert [(step, each.code, each.rank) for step, each in seen] == [(20, "straggler", 2)]
