"""`evaluation.patience`: a run ends when its held-out loss no longer falls, and trains on where that is asked."""

import dataclasses
import json
import math
from pathlib import Path
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config_helpers import SMALL
from tests.train.test_interruption import metric_rows, train_until
from tests.train_helpers import change, compute_little, differing, shortened
from zaya_jax.aegis.training_command import read_command
from zaya_jax.config import to_yaml
from zaya_jax.config.stages import phase_steps
from zaya_jax.errors import InputError
from zaya_jax.evaluate.heldout import HeldoutEvaluator
from zaya_jax.run.checkpoints import CHECKPOINTS, checkpoint_folder, saved_steps
from zaya_jax.run.patience import Patience, can_act
from zaya_jax.run.run import open_run
from zaya_jax.train.final_report import report
from zaya_jax.train.fit import run_training

LOSSES = st.floats(0, 10) | st.sampled_from([math.nan, math.inf])


@given(phases=st.lists(st.lists(LOSSES, min_size=1, max_size=8), min_size=1, max_size=3), limit=st.integers(0, 4))
def test_a_record_counts_the_evaluations_of_its_phase_since_the_lowest_loss(phases, limit):
    config, record, step = change(SMALL, {"evaluation.patience": limit}), Patience(), 0
    for name, losses in enumerate(phases):
        for count in range(1, len(losses) + 1):
            step += 1
            phase = "train" if name == 0 else str(name)
            record = Patience(**json.loads(json.dumps(record.after(phase, step, losses[count - 1])._asdict())))
            finite = [loss for loss in losses[:count] if math.isfinite(loss)]
            best = losses.index(min(finite)) if finite else -1
            assert record.lowest == min(finite, default=None)
            assert record.since == count - 1 - best
            assert record.is_over(config, 1) == (limit > 0 and count - 1 - best >= limit and name == 0)
            if finite:
                assert record.step == step - record.since


@pytest.fixture
def rising(finished, tmp_path, monkeypatch):
    """The configuration of a run whose held-out loss rises from the first step on."""
    compute_little(monkeypatch)
    changes = {"evaluation.every": 1, "checkpoint.every": 2}
    return change(finished[0], {"run_dir": str(tmp_path / "run"), **changes, "checkpoint.keep": 20})


def test_a_run_ends_when_its_heldout_loss_no_longer_falls_and_trains_on_bitwise(rising, tmp_path):
    whole = run_training(change(rising, {"run_dir": str(tmp_path / "whole")}))
    rows = metric_rows(whole.run_dir)
    losses = [row["heldout_loss"] for row in rows]
    assert losses == sorted(losses)
    best, end = 1, 3

    patient = change(rising, {"evaluation.patience": 2})
    train_until(patient, end)  # the record comes from a checkpoint before the end
    for _ in range(2):  # the second one trains no step
        result = run_training(patient)
        assert result.state.step == end
        assert metric_rows(result.run_dir) == rows[:end]
        assert saved_steps(result.run_dir / CHECKPOINTS)[-1] == end
        command = ["python", "-m", "zaya_jax.main", "--config", str(result.run_dir / "config.yaml")]
        assert read_command(command, 1, None).is_saved()  # for a supervisor, the run has finished
        lines = report(change(patient, {"sample.tokens": 0}), result).splitlines()
        lowest = f"the lowest was {losses[best - 1]:.4f} nats/token at step {best}"
        reason = f"the held-out loss has not fallen for 2 evaluations (evaluation.patience), and {lowest}"
        assert lines[0] == f"Stopped after step {end} of 12: {reason}."
        assert lines[1] == f"Last checkpoint: {result.run_dir / CHECKPOINTS / str(end)}"
        kept = result.run_dir / CHECKPOINTS / "2"
        assert lines[2] == f"Best checkpoint kept: {kept} ({losses[1]:.4f} nats/token)"
        assert json.loads((result.run_dir / "summary.json").read_text())["steps"] == end
    run = open_run(result.run_dir)
    assert (run.status.state, run.status.exit_status) == ("finished", 0)
    assert run.status.message == "evaluation.patience ended it after step 3 of 12."
    with pytest.raises(InputError, match=r"are: none\. Without @train it is the newest checkpoint"):
        checkpoint_folder(f"{result.run_dir}@train")

    on = change(patient, {"evaluation.patience": 0})
    assert not read_command([*command, "evaluation.patience=0"], 1, None).is_saved()
    result = run_training(on)
    assert not differing(result.state, whole.state)
    assert metric_rows(result.run_dir) == rows
    assert not report(change(on, {"sample.tokens": 0}), result).startswith("Stopped")


def test_patience_that_runs_out_with_its_phase_ends_no_other_phase(rising):
    patient = change(shortened(rising, 3), {"evaluation.patience": 2})
    assert run_training(patient).patience == Patience("train", 1, ANY, 2)
    [first] = patient.phases
    longer = change(patient, {"phases": (first, dataclasses.replace(first, name="more"))})
    (file := Path(f"{longer.run_dir}.yaml")).write_text(to_yaml(longer))
    assert not read_command(["python", "-m", "zaya_jax.main", "--config", str(file)], 1, None).is_saved()
    assert run_training(longer).state.step == 6
    whole = change(longer, {"run_dir": f"{rising.run_dir}_whole"})
    assert run_training(whole).state.step == 6
    assert metric_rows(Path(whole.run_dir)) == metric_rows(Path(longer.run_dir))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])  # one of the two has the lower loss
def test_other_heldout_text_is_not_compared_with(rising, before, after):
    assert run_training(change(shortened(rising, 4), {"evaluation.batches": before})).patience.since == 3
    result = run_training(change(shortened(rising, 5), {"evaluation.batches": after}))
    assert result.patience == Patience("train", 5, metric_rows(result.run_dir)[-1]["heldout_loss"])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 4))
def test_a_run_that_patience_cannot_end_is_known(steps, every, patience):
    """The best for it is a loss that rises from the first evaluation of each phase on."""
    phases = tuple(dataclasses.replace(SMALL.phases[0], name=f"p{i}", tokens=256 * n) for i, n in enumerate(steps))
    changes = {"evaluation.patience": patience, "evaluation.every": every}
    config = change(dataclasses.replace(SMALL, phases=phases), changes)
    record, ended = Patience(), False
    for (begin, end), phase in zip(phase_steps(config), config.phases, strict=True):
        for step in range(begin + 1, end + 1):
            if step % every == 0 or step == end:
                record = record.after(phase.name, step, float(step))
            ended |= step < end and record.is_over(config, step)
    assert can_act(config) == (ended or patience == 0)


def test_patience_without_heldout_text_is_refused(rising, monkeypatch):
    monkeypatch.setattr(HeldoutEvaluator, "_read", lambda *_: None)
    with pytest.raises(InputError, match=r"evaluation.patience is 2, but must be 0 without held-out text"):
        run_training(change(rising, {"evaluation.patience": 2}))
