"""Runs that are interrupted, by a signal, by an error, on another machine, resume as if nothing had happened."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.train_helpers import change, differing, restore, snapshot
from zaya_jax.errors import InputError, Preempted, exit_message
from zaya_jax.evaluate.evaluator import ModelSnapshot
from zaya_jax.run.checkpoints import saved_steps
from zaya_jax.run.run import open_run
from zaya_jax.train import fit, resumption, sinks, trainer
from zaya_jax.train.fit import run_training

pytestmark = pytest.mark.usefixtures("quick", "signals_arrive")


def metric_rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Interrupted(Exception):
    pass


def interrupt(monkeypatch, step):
    """Let the next run end with an exception when it has `step`'s metrics, before they are written."""

    class Sink(sinks.JsonlSink):
        def write(self, metrics, timings):
            if metrics["step"] == step:
                raise Interrupted
            super().write(metrics, timings)

    monkeypatch.setattr(sinks, "JsonlSink", Sink)


def train_until(config, step):
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, step)
        with pytest.raises(Interrupted):
            run_training(config)


# --- signals ------------------------------------------------------------------------------------


def at_row(patch, step, sent):
    """Send a signal when the row of `step` is written, while the next step runs or is evaluated."""

    class Sink(sinks.JsonlSink):
        def write(self, metrics, timings):
            super().write(metrics, timings)
            if metrics["step"] == step:
                os.kill(os.getpid(), sent)

    patch.setattr(sinks, "JsonlSink", Sink)


def in_evaluation(patch, number, sent):
    """Send a signal when the batch of that number is evaluated: one follows step 6, one the last step."""
    seen, loss = [], ModelSnapshot.loss

    def ask(model, batch):
        seen.append(batch)
        if len(seen) == number:
            os.kill(os.getpid(), sent)
        return loss(model, batch)

    patch.setattr(ModelSnapshot, "loss", ask)


@pytest.mark.parametrize(
    ("when", "number", "saved", "sent"),
    [
        # Before the evaluation after step 6, which is finished: the row is that of an undisturbed run.
        (at_row, 5, 6, signal.SIGTERM),
        (in_evaluation, 2, 12, signal.SIGHUP),
        pytest.param(at_row, 7, 8, signal.SIGHUP, marks=pytest.mark.soak),
        pytest.param(at_row, 1, 2, signal.SIGHUP, marks=pytest.mark.soak),
        pytest.param(at_row, 11, 12, signal.SIGHUP, marks=pytest.mark.soak),
        pytest.param(in_evaluation, 1, 6, signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_a_preempted_run_resumes_bitwise(tmp_path, finished, when, number, saved, sent):
    config = change(finished[0], {"run_dir": str(tmp_path / "run")})
    with pytest.MonkeyPatch.context() as patch:
        when(patch, number, sent)
        with pytest.raises(Preempted, match=f"^Stopped by {sent.name} after") as ended:
            run_training(config)
    sentence, status = exit_message(ended.value)
    assert status == 128 + sent
    assert open_run(config.run_dir).status[-2:] == (status, sentence)
    assert "which is saved" in sentence
    assert saved_steps(Path(config.run_dir) / "checkpoints")[-1] == saved
    result = run_training(config)
    assert not differing(result.state, finished[1].state)
    assert restore(config, 12)[1] == restore(finished[0], 12)[1]
    rows, others = metric_rows(result.run_dir), metric_rows(finished[1].run_dir)
    assert rows == others


# --- resuming --------------------------------------------------------------------------------------------------


def copied_run(finished, tmp_path):
    """The configuration of a copy of the finished run."""
    config, result = finished
    shutil.copytree(result.run_dir, tmp_path / "copy")
    return change(config, {"run_dir": str(tmp_path / "copy")})


def test_a_finished_run_returns_its_result_again_and_redraws_a_missing_plot(finished, tmp_path):
    config, before = copied_run(finished, tmp_path), snapshot(finished[1].run_dir)
    (tmp_path / "copy" / "loss.png").unlink()
    result = run_training(config)
    assert not differing(result.state, finished[1].state)
    assert result.heldout == finished[1].heldout
    assert snapshot(result.run_dir) == before


def test_a_finished_run_whose_checkpoints_are_not_mounted_is_left_as_it_is(finished, tmp_path):
    config = copied_run(finished, tmp_path)
    shutil.rmtree(tmp_path / "copy" / "checkpoints")
    (tmp_path / "copy" / "checkpoints").mkdir()
    before = snapshot(tmp_path / "copy")
    with pytest.raises(InputError, match=r"copy/checkpoints has no checkpoint, but phases\.json names that of step 12"):
        run_training(config)
    assert snapshot(tmp_path / "copy") == before


def test_no_checkpoint_is_newer_than_the_plot(finished, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(trainer, "plot_run", lambda rows, *_: drawn.append(len(rows)))

    class Store(fit.CheckpointStore):
        def save(self, step, *arguments):
            if step == 12:
                raise Interrupted
            super().save(step, *arguments)

    monkeypatch.setattr(fit, "CheckpointStore", Store)
    with pytest.raises(Interrupted):
        run_training(change(finished[0], {"run_dir": str(tmp_path / "run")}))
    assert drawn == [6, 12]


@pytest.mark.parametrize("step", [6, *(pytest.param(step, marks=pytest.mark.soak) for step in (4, 5, 8, 12))])
def test_an_interrupted_run_resumes_bitwise(finished, tmp_path, step):
    config = change(finished[0], {"run_dir": str(tmp_path / "run")})
    train_until(config, step)
    assert [row["step"] for row in metric_rows(tmp_path / "run")] == list(range(1, step))
    result = run_training(config)
    uninterrupted = finished[1]
    assert (result.run_dir / "metrics.jsonl").read_bytes() == (uninterrupted.run_dir / "metrics.jsonl").read_bytes()
    assert not differing(result.state, uninterrupted.state)
    assert result.heldout == uninterrupted.heldout


def test_the_console_says_whether_a_run_resumes_or_starts_over_and_names_another_machine(
    finished, tmp_path, capsys, monkeypatch
):
    config = change(finished[0], {"run_dir": str(tmp_path / "run")})
    train_until(config, 4)
    capsys.readouterr()
    train_until(config, 8)
    assert "No checkpoint covers the 3 steps in metrics.jsonl" in capsys.readouterr().out
    there = resumption.environment(None)
    monkeypatch.setattr(resumption, "environment", lambda digest: there | {"cpus": 999})
    result = run_training(config)
    out = capsys.readouterr().out
    assert "Resuming after step 5 of 12." in out
    assert f"Resuming with cpus=999; the checkpoint was saved with cpus={there['cpus']!r}." in out
    assert "Resuming with jax" not in out
    assert metric_rows(result.run_dir) == metric_rows(finished[1].run_dir)
    assert not differing(result.state, finished[1].state)
