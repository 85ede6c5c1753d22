import dataclasses

import pytest

from tests.train_helpers import small_run
from zaya_jax.config import BatchConfig, ParallelConfig, ScheduleConfig
from zaya_jax.errors import InputError
from zaya_jax.train.run_checks import check_past


@pytest.fixture
def config(tmp_path):
    return small_run(tmp_path)


def test_how_a_begun_phase_is_computed_may_change(config):
    def phase(**changes):
        (phase,) = config.phases
        return dataclasses.replace(config, phases=(dataclasses.replace(phase, **changes),))

    before = phase(batch=BatchConfig(tokens=128, micro_batch=2))
    check_past(before, phase(batch=BatchConfig(tokens=128), remat="full", parallel=ParallelConfig(context=2)), 12)
    with pytest.raises(InputError, match="batch was"):
        check_past(before, phase(batch=BatchConfig(tokens=256, micro_batch=2)), 12)


def with_phases(config, *phases):
    return dataclasses.replace(config, phases=phases)


CONSTANT, COSINE = ScheduleConfig("constant", warmup_tokens=256), ScheduleConfig(warmup_tokens=256)
WSD = ScheduleConfig("wsd", decay_tokens=512)  # its last four steps of twelve


@pytest.mark.parametrize(
    ("schedule", "step", "fits"),
    [(CONSTANT, 12, True), (WSD, 8, True), (COSINE, 2, True), (WSD, 9, False), (WSD, 12, False), (COSINE, 3, False)],
)
def test_a_run_can_become_longer_where_no_step_that_is_done_had_another_rate(config, schedule, step, fits):
    (phase,) = config.phases
    before = with_phases(config, dataclasses.replace(phase, schedule=schedule))
    longer = with_phases(config, dataclasses.replace(phase, schedule=schedule, tokens=2 * phase.tokens))
    appended = with_phases(config, *before.phases, dataclasses.replace(phase, name="more", schedule=None))
    for after in (longer, appended):
        check_past(before, after, step, rates=False)
        if fits:
            check_past(before, after, step)
            continue
        with pytest.raises(
            InputError, match=rf"^phases\.train: the {schedule.shape} schedule spanned 1,536 .* now spans"
        ):
            check_past(before, after, step)
    own = dataclasses.replace(phase, name="more", schedule=COSINE)
    check_past(before, with_phases(config, *before.phases, own), step)


def test_a_run_can_become_shorter_down_to_what_is_done(config):
    (phase,) = config.phases
    shorter = with_phases(config, dataclasses.replace(phase, tokens=640, schedule=CONSTANT))
    before = with_phases(config, dataclasses.replace(phase, schedule=CONSTANT))
    check_past(before, shorter, 5)
    with pytest.raises(InputError, match=r"^phases\.train\.tokens is 640, but .* 768 tokens"):
        check_past(before, shorter, 6)
    bigger = dataclasses.replace(before, train=dataclasses.replace(config.train, batch=BatchConfig(tokens=256)))
    with pytest.raises(InputError, match=r"train\.batch"):
        check_past(before, bigger, 6)
