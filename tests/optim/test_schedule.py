"""The factor of each step against one reckoned in float64, token by token of the run."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.config_helpers import SMALL, changed
from tests.helpers import jit
from zaya_jax.config import BatchConfig, BatchSizeConfig, PhaseConfig, ScheduleConfig
from zaya_jax.config.stages import phase_steps, schedule_spans, stage_at, tokens_before, total_steps
from zaya_jax.optim.schedule import learning_rate_factor

SHAPES = ["constant", "cosine", "linear", "wsd"]
MOST = 2048
TRILLIONS = 8 * 10**12


def run(*phases, context=8, **batch):
    """A configuration of such phases, checked."""
    config = changed(SMALL, {"data.context": context, "model.max_positions": 4096,
                             "train.batch": BatchConfig(**{"tokens": 64, **batch}), "phases": phases})  # fmt: skip
    config.check()
    return config


def reference(config, step):
    """The factor of a step in float64."""
    schedule, begun, tokens = schedule_spans(config)[stage_at(config, step).phase]
    token = tokens_before(config, step + 1) - begun  # of the span, up to the step's end
    if token < schedule.warmup_tokens:
        return schedule.peak * token / schedule.warmup_tokens
    left = tokens - token
    match schedule.shape:
        case "constant":
            return schedule.peak
        case "wsd":
            part = min(left / schedule.decay_tokens, 1)
        case "linear":
            part = left / (tokens - schedule.warmup_tokens) if left else 0
        case "cosine":
            turn = left / (tokens - schedule.warmup_tokens) if left else 0
            part = math.sin(math.pi * turn / 2) ** 2  # (1 - cos) / 2, exact near 0 too
    return schedule.final + (schedule.peak - schedule.final) * part


def factors(config, steps):
    """The factors of some steps, at most `MOST`; always as many are reckoned."""
    padded = np.zeros(MOST, np.int32)
    padded[: len(steps)] = steps
    return np.asarray(jit(jax.vmap(learning_rate_factor(config)))(padded))[: len(steps)]


@st.composite
def schedules(draw, tokens):
    """Schedules that fit into a budget of `tokens`."""
    shape = draw(st.sampled_from(SHAPES))
    peak = draw(st.sampled_from([1.0, 0.3, 2.5]))
    warmup = draw(st.sampled_from([0, 1, tokens // 7, tokens // 2]))
    decay = draw(st.integers(1, tokens // 2)) if shape == "wsd" else None
    return ScheduleConfig(shape, peak, draw(st.sampled_from([0.0, 0.1, 1.0])) * peak, warmup, decay)


@st.composite
def runs(draw):
    """Up to three phases, some with schedules and batches of their own."""
    phases = []
    for index in range(draw(st.integers(1, 3))):
        tokens = draw(st.integers(2, 3000))
        batch = draw(st.sampled_from([
            None, BatchConfig(96), BatchConfig(160, start=32, ramp_tokens=2000),
            BatchConfig(48, stepped=(BatchSizeConfig(200, 8), BatchSizeConfig(900, 128))),
        ]))  # fmt: skip
        schedule = draw(st.none() | schedules(tokens))
        phases.append(PhaseConfig(tokens, f"p{index}", batch=batch, schedule=schedule))
    return run(*phases)


@settings(max_examples=6 * settings.default.max_examples // 10)
@given(runs())
def test_every_step_has_the_factor_of_the_reference(config):
    steps = range(total_steps(config))
    ours = factors(config, steps)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, [reference(config, step) for step in steps], rtol=1e-5, atol=1e-9)


BATCHES = [{"tokens": 1024, "start": 64, "ramp_tokens": 9000}, {"tokens": 512, "start": 256, "ramp_tokens": 20_000},
           {"tokens": 128, "stepped": (BatchSizeConfig(1024, 32), BatchSizeConfig(8192, 256))}]  # fmt: skip


@pytest.mark.parametrize(("shape", "batch"), [*zip(SHAPES, [*BATCHES, BATCHES[0]], strict=True)], ids=str)
def test_no_batch_size_bends_it(shape, batch):
    schedule = ScheduleConfig(shape, 0.7, 0.05, 5000, 10_000 if shape == "wsd" else None)
    bent = run(PhaseConfig(2**15, schedule=schedule), PhaseConfig(2**14, "b"), **batch)
    read = [tokens_before(bent, end) - tokens_before(bent, first) for first, end in phase_steps(bent)]
    flat = run(PhaseConfig(read[0], schedule=schedule), PhaseConfig(read[1], "b"), tokens=32)
    by_token = []
    for config in (bent, flat):
        steps = range(total_steps(config))
        ends = [tokens_before(config, step + 1) for step in steps]
        by_token.append(dict(zip(ends, factors(config, steps), strict=True)))
    assert by_token[0].keys() <= by_token[1].keys()
    assert len(by_token[0]) > 50
    np.testing.assert_allclose(list(by_token[0].values()), [by_token[1][token] for token in by_token[0]], rtol=1e-5)


def test_a_schedule_goes_on_through_phases_and_one_of_its_own_begins_anew():
    first = ScheduleConfig("linear", warmup_tokens=128, final=0.2)
    whole = run(PhaseConfig(64 * 60, schedule=first))
    parts = run(PhaseConfig(64 * 20, "a", schedule=first), PhaseConfig(64 * 25, "b"), PhaseConfig(64 * 15, "c"))
    np.testing.assert_allclose(factors(parts, range(60)), factors(whole, range(60)), rtol=1e-6)
    second = ScheduleConfig("cosine", peak=0.2, final=0.0, warmup_tokens=64 * 4)
    again = run(PhaseConfig(64 * 60, "a", schedule=first), PhaseConfig(64 * 10, "b", schedule=second),
                PhaseConfig(64 * 10, "c"))  # fmt: skip
    np.testing.assert_allclose(factors(again, range(60)), factors(whole, range(60)), rtol=1e-6)
    alone = run(PhaseConfig(64 * 20, schedule=second))
    np.testing.assert_allclose(factors(again, range(60, 80)), factors(alone, range(20)), rtol=1e-6)


@pytest.mark.parametrize(("schedule", "size"), [
    (ScheduleConfig("cosine", final=0.0, warmup_tokens=10**9), 4096),
    (ScheduleConfig("linear", final=0.0, warmup_tokens=10**9), 4096),
    (ScheduleConfig("wsd", final=0.0, warmup_tokens=2000, decay_tokens=10**10), 4096),
    (ScheduleConfig("wsd", final=0.1, warmup_tokens=TRILLIONS // 3, decay_tokens=TRILLIONS // 2), 16 * 2**20),
    (ScheduleConfig("constant", warmup_tokens=TRILLIONS // 2), 16 * 2**20),
], ids=str)  # fmt: skip
def test_trillions_of_tokens_are_told_apart(schedule, size):
    batch = {"tokens": size, "start": size // 4, "ramp_tokens": 10**11}
    config = run(PhaseConfig(TRILLIONS // 2, "a", schedule=schedule), PhaseConfig(TRILLIONS // 2, "b"),
                 context=1024, **batch)  # fmt: skip
    (_, middle), (_, end) = phase_steps(config)
    assert end < 2**31
    rng = np.random.default_rng(0)
    near = [edge + away for edge in (middle, end) for away in (-1000, -100, -10, -2, -1, 0) if edge + away < end]
    steps = sorted({*rng.integers(0, end, 200).tolist(), *range(5), *near})
    expected = np.array([reference(config, step) for step in steps])
    np.testing.assert_allclose(factors(config, steps), expected, rtol=1e-5)


def test_after_the_end_it_is_the_final_one():
    config = run(PhaseConfig(64 * 10, schedule=ScheduleConfig(final=0.25)))
    assert (factors(config, [9, 10, 11, 10**9]) == np.float32(0.25)).all()
