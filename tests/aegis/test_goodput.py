"""The buckets equal traces computed by hand, exactly, and always add up to the time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.goodput import measure_goodput


def start(attempt, unix):
    return {"kind": "start", "code": "attempt", "attempt": attempt, "unix": unix}


def end(attempt, unix, code="finished", first=None, last=None, **times):
    steps = {} if first is None else {"first_step": first, "last_step": last}
    return {"kind": "end", "code": code, "attempt": attempt, "unix": unix, "times": times} | steps


def seconds(goodput):
    return {bucket: value for bucket, value in goodput.buckets.items() if value}


def test_a_run_that_is_not_disturbed():
    goodput = measure_goodput([
        start(1, 100.0),
        end(1, 160.0, first=0, last=10, start=2, join=1, open=1, restore=3, compile=8, data=4, dispatch=10,
            device_wait=20, evaluate=5, save=2, finish=1),
    ])  # fmt: skip
    assert seconds(goodput) == {
        "productive": 30, "data_loading": 4, "device_initialization": 1, "training_preparation": 3,
        "program_startup": 8, "checkpoint_restore": 3, "checkpoint_save": 2, "evaluation": 5, "other": 1 + 3,
    }  # fmt: skip
    assert (goodput.fraction, goodput.steps, goodput.wasted_steps) == (0.5, 10, 0)


def test_steps_that_are_done_again_are_wasted_the_first_time():
    """Steps 9 to 12 of the first attempt are done again; from its end at 60 to the next start at 63 nothing runs."""
    goodput = measure_goodput([
        start(1, 0.0), end(1, 60.0, "signal-SIGKILL", 0, 12, compile=10, dispatch=36, device_wait=12),
        start(2, 63.0), end(2, 103.0, first=8, last=20, compile=4, dispatch=30, device_wait=6),
    ])  # fmt: skip
    assert seconds(goodput) == {
        "productive": 48 * 8 / 12 + 36, "wasted_progress": 48 * 4 / 12, "program_startup": 14,
        "infrastructure_recovery": 2 + 3,
    }  # fmt: skip
    assert (goodput.steps, goodput.wasted_steps) == (20, 4)


def test_an_older_checkpoint_wastes_steps_of_several_attempts():
    goodput = measure_goodput([
        start(1, 0.0), end(1, 10.0, "exit-1", 0, 10, dispatch=10),
        start(2, 10.0), end(2, 14.0, "exit-1", 8, 12, dispatch=4),
        start(3, 14.0), end(3, 20.0, first=4, last=10, dispatch=6),
    ])  # fmt: skip
    assert seconds(goodput) == {"productive": 4 + 6, "wasted_progress": 2 + 4 + 4}
    assert (goodput.steps, goodput.wasted_steps) == (10, 2 + 4 + 4)


def test_a_save_that_overlaps_steps_counts_only_while_it_blocks_them():
    """The record is in the phase `save` only while the loop waits; the rest of a save is within the steps."""
    goodput = measure_goodput([start(1, 0.0), end(1, 11.0, first=0, last=10, dispatch=10, save=1)])
    assert seconds(goodput) == {"productive": 10, "checkpoint_save": 1}


def test_drills_are_left_out():
    quiet = [start(1, 0.0), end(1, 10.0, "preempted", 0, 5, dispatch=10)]
    drill = [start(2, 10.0), {"kind": "inject", "attempt": 2, "unix": 12.0, "code": "sigkill"},
             end(2, 15.0, "signal-SIGKILL", 5, 9, dispatch=4)]  # fmt: skip
    after = [start(3, 20.0), end(3, 25.0, first=5, last=10, dispatch=5)]
    goodput = measure_goodput([*quiet, *drill, *after])
    assert seconds(goodput) == {"productive": 15}
    assert (goodput.seconds, goodput.attempts, goodput.steps) == (15, 2, 10)


@pytest.mark.parametrize(("now", "expected"), [(None, 0.0), (30.0, 20.0)])
def test_an_attempt_that_runs_counts_up_to_now(now, expected):
    assert measure_goodput([start(1, 10.0)], now).seconds == expected


def test_a_supervisor_that_was_killed_wrote_no_end():
    goodput = measure_goodput([start(1, 0.0), start(2, 8.0), end(2, 10.0, first=0, last=2, dispatch=2)])
    assert seconds(goodput) == {"infrastructure_recovery": 8, "productive": 2}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(0, 40), st.integers(0, 9)), max_size=12))
def test_buckets_add_up_to_the_time_and_none_is_negative(attempts):
    events, now, done = [], 0.0, 0
    for index, (back, steps, work, pause) in enumerate(attempts):
        first = max(done - back, 0)
        done = first + steps
        events += [start(index, now), end(index, now + work + 1, "exit-1", first, done, dispatch=work)]
        now += work + 1 + pause
    goodput = measure_goodput(events)
    assert sum(goodput.buckets.values()) == pytest.approx(goodput.seconds)
    assert all(value >= -1e-9 for value in goodput.buckets.values())
    assert goodput.steps == done
    assert goodput.steps + goodput.wasted_steps == sum(steps for _, steps, _, _ in attempts)


def test_the_pause_after_a_finished_run_is_no_failure_s():
    goodput = measure_goodput([
        start(1, 0.0), end(1, 10.0, first=0, last=5, dispatch=10),
        start(2, 90_000.0), end(2, 90_010.0, first=5, last=10, dispatch=10),
    ])  # fmt: skip
    assert (goodput.seconds, goodput.fraction) == (20, 1)


def test_the_time_of_a_first_step_that_did_not_end_is_wasted():
    goodput = measure_goodput([start(1, 0.0), end(1, 10.0, "exit-1", 4, 4, dispatch=10)])
    assert seconds(goodput) == {"wasted_progress": 10}


def test_a_clock_that_is_set_changes_no_attempt():
    first, last = (
        start(1, 0.0) | {"monotonic": 100.0},
        end(1, -3600.0, first=0, last=5, dispatch=9) | {"monotonic": 110.0},
    )
    goodput = measure_goodput([first, last])
    assert seconds(goodput) == {"productive": 9, "other": 1}
    assert goodput.seconds == 10
