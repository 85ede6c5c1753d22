import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.saved_helpers import save_run
from tests.config_helpers import row_ranges
from tests.train_helpers import CONFIG, change, small_run
from zaya_jax.config import BatchConfig, ParallelConfig, ScheduleConfig
from zaya_jax.config.stages import rows_before, step_rows
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


@pytest.mark.parametrize(("saved", "damaged", "advice"), [
    ([3, 6, 9], [], r"resume_from=.*/run/checkpoints/6\.$"),
    ([3, 6, 9], [6], r"resume_from=.*/run/checkpoints/3\.$"),
    ([9], [], r", or start anew in another run_dir\.$"),
])  # fmt: skip
def test_other_rates_are_refused_with_the_newest_checkpoint_before_them(config, saved, damaged, advice):
    run = save_run(Path(config.run_dir), saved)
    for step in damaged:
        next((run / "checkpoints" / str(step)).glob("manifest-*")).unlink()
    (phase,) = config.phases
    before = with_phases(config, dataclasses.replace(phase, schedule=WSD))
    longer = with_phases(config, dataclasses.replace(phase, schedule=WSD, tokens=2 * phase.tokens))
    with pytest.raises(InputError, match=advice):
        check_past(before, longer, 9)


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


def rows_read(config, steps):
    return [step_rows(config, step) for step in range(steps)]


@given(row_ranges(), row_ranges(), st.integers(0, 30))
def test_rows_to_skip_may_change_after_the_position_alone(ranges, others, step):
    old = change(CONFIG, {"data.skip_rows": ranges})
    unread = rows_before(old, step)
    ahead = tuple(ends for ends in others if ends[0] >= unread)
    behind = tuple(ends for ends in ranges if ends[0] < unread)
    check_past(old, change(old, {"data.skip_rows": (*behind, *ahead)}), step)
    other = change(old, {"data.skip_rows": others})
    if rows_read(old, step) != rows_read(other, step):
        with pytest.raises(InputError, match=r"^data\.skip_rows .* the first unread row is"):
            check_past(old, other, step, rates=False)


def test_what_to_do_about_rows_that_were_read_is_said():
    def refusal(old, new, step):
        old, new = (change(CONFIG, {"data.skip_rows": ranges}) for ranges in (old, new))
        with pytest.raises(InputError) as caught:
            check_past(old, new, step)
        return str(caught.value)

    check_past(CONFIG, change(CONFIG, {"data.skip_rows": ((80, 200),)}), 10)
    assert refusal((), ((79, 200),), 10) == (  # of 8 rows a step
        "data.skip_rows has the new range [79, 200], but the checkpoint at step 10 is past its start: the first unread "
        "row is 80. Restore the old value, or go back to a checkpoint of step 9 or earlier: in this run_dir with "
        "python -m zaya_jax.checkpoint rollback RUN_DIR STEP, in a new one with resume_from=RUN_DIR/checkpoints/STEP."
    )
    assert refusal(((16, 24), (40, 41)), ((16, 24),), 10).startswith(
        "data.skip_rows no longer has the range [40, 41], but the checkpoint at step 10 is past its start: the first "
        "unread row is 89. Restore the old value, or go back to a checkpoint of step 4 or earlier: "
    )
    assert refusal((), ((7, 8),), 1).endswith("Restore the old value, or start a new run_dir.")
