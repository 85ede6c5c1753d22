"""A loss that stays high is seen and a single spike is not; a slow process is told from the others."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train_helpers import ROOT
from zaya_jax.aegis.policy import TrainingPolicy
from zaya_jax.aegis.training_watch import LossWatch, StragglerWatch, level_changes
from zaya_jax.config import from_dict, load_config, to_dict
from zaya_jax.run.progress_record import Phase, Progress

POLICY = TrainingPolicy(straggler_steps=10)
NAN = float("nan")


def falling(step, rng):
    return 2 + 3 * math.exp(-step / 300) + rng.gauss(0, 0.05)


def look_at(losses, changes=None):
    watch = LossWatch(POLICY, changes)
    return [(step, each) for step, loss in enumerate(losses, 1) if (each := watch.look(step, loss)) is not None]


@pytest.mark.parametrize("seed", range(10))
def test_a_quiet_run_and_single_spikes_raise_no_alarm(seed):
    rng = random.Random(seed)
    assert not look_at([falling(step, rng) + 10 * (rng.random() < 0.02) for step in range(2000)])


LEVELS = {"level": st.floats(0.5, 10), "noise": st.floats(0.001, 0.02), "start": st.integers(40, 300),
          "seed": st.integers(0, 2**32)}  # fmt: skip


@given(**LEVELS, ratio=st.floats(0.3, 1.8))
def test_losses_that_settle_at_another_level_may_be_a_phase_that_the_watch_does_not_know(
    level, noise, start, seed, ratio
):
    rng = random.Random(seed)
    losses = [level * (1 if step < start else ratio) * (1 + rng.gauss(0, noise)) for step in range(start + 300)]
    assert look_at(losses) == []
    seen = look_at(losses, [(0, 0)])  # no phase starts there
    assert [each.code for _, each in seen] == ["loss-spike"] * (ratio > 1.3) or 1 < ratio <= 1.3
    assert look_at(losses, [(0, 0), (start, start)]) == []


@given(**LEVELS, kind=st.sampled_from(["jumps", "rises on", "is noisy", "leaves a new level"]))
def test_a_loss_that_jumps_or_rises_on_or_is_noisy_diverges(level, noise, start, seed, kind):
    rng = random.Random(seed)

    def diverged(since):
        if kind == "jumps":
            return 2.3
        if kind == "rises on":
            return min(1.2 + 0.01 * since, 1.9)
        if kind == "is noisy":
            return rng.uniform(1.3, 1.9)
        return 1.3 if since < 50 else 2.5

    losses = [level * (1 if step < start else diverged(step - start)) * (1 + rng.gauss(0, noise))
              for step in range(start + 100)]  # fmt: skip
    ((step, seen),) = look_at(losses)
    assert seen.code == "loss-spike"
    assert start + POLICY.spike_steps <= step
    assert kind != "jumps" or step == start + POLICY.spike_steps
    assert seen.good_steps == start


def test_the_warm_up_of_a_phase_may_change_the_loss_and_what_follows_may_not():
    rising = [2 + 0.05 * max(0, min(step - 100, 40)) + 2 * (step > 200) for step in range(250)]
    assert [step for step, _ in look_at(rising, [(0, 0), (100, 140)])] == [211]
    assert [step for step, _ in look_at(rising, [(0, 0)])] != [211]


TINY = to_dict(load_config(ROOT / "configs" / "tiny.yaml"))


# Of each schedule: parts of a warm-up, and the steps of the phases that it spans.
SCHEDULES = st.lists(st.tuples(st.floats(0, 1), st.lists(st.integers(1, 40), min_size=1, max_size=3)),
                     min_size=1, max_size=3)  # fmt: skip


@given(SCHEDULES)
def test_the_loss_may_change_when_a_phase_starts_and_while_its_schedule_warms_up(schedules):
    tokens, phases, expected, first = TINY["train"]["batch"]["tokens"], [], [], 0
    for part, spanned in schedules:
        warmed = first + round(part * sum(spanned))
        own = {"schedule": {"warmup_tokens": tokens * (warmed - first)}}
        for steps in spanned:
            phases.append({"name": f"p{len(phases)}", "tokens": tokens * steps, **own})
            expected.append((first, min(max(first, warmed), first + steps)))
            first, own = first + steps, {}
    assert level_changes(from_dict({**TINY, "phases": phases})) == expected


def test_a_loss_that_is_not_finite_from_the_first_step_is_seen_and_none_before_it_is_missed():
    for first in (0, 40):
        watch = LossWatch(POLICY)
        seen = [each for step in range(first, first + 30) for _ in range(3)
                if (each := watch.look(step, NAN, first)) is not None]  # fmt: skip
        assert [(each.code, each.good_steps) for each in seen] == [("loss-not-finite", first)]
        assert f"until step {first + POLICY.spike_steps}." in seen[0].text


def test_losses_that_are_not_finite_are_seen_once():
    seen = look_at([3.0] * 30 + [math.inf, NAN] * 10)
    assert [(step, each.code) for step, each in seen] == [(40, "loss-not-finite")]


@pytest.mark.parametrize("seed", range(5))
def test_losses_of_which_half_are_not_finite_are_seen_once_and_a_few_are_the_trainers_to_skip(seed):
    rng = random.Random(seed)
    half = [loss for _ in range(50) for loss in rng.sample([3.0, NAN], 2)]
    [(step, seen)] = look_at([3.0] * 30 + half)
    assert (seen.code, seen.good_steps in (30, 31)) == ("loss-not-finite", True)
    assert step - 30 <= 2 * POLICY.spike_steps
    assert not look_at([NAN if step % 3 == 0 else 3.0 for step in range(300)])


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
