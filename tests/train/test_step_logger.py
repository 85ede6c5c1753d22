"""Rows are written once each, in order, a step late; a skipped step is recorded with its rows of data."""

import jax.numpy as jnp
import pytest

from tests.train_helpers import CONFIG, change
from zaya_jax.config import SourceConfig, Table
from zaya_jax.errors import RunStopped
from zaya_jax.evaluate.heldout import HeldoutLoss
from zaya_jax.run.metrics import StepFiles
from zaya_jax.train import step_logger as module
from zaya_jax.train.step_logger import StepLogger


class Rows(list):
    log = list.append

    def row(self, row, seconds):
        self.append((row, seconds))

    def throughput(self, step, tokens, seconds):
        return {"tokens_per_second": tokens / max(seconds, 1e-9)}


def metrics(skip=0, skipped=0, **more):
    return {"loss": jnp.float32(2.5), "tokens": jnp.float32(100), "skip": jnp.int32(skip),
            "skipped": jnp.int32(skipped), "expert_counts": jnp.array([[3, 4]]),
            "grad_norm_by_role": {"router": jnp.float32(1)}, "update_norm_by_role": {"router": jnp.float32(2)},
            **more}  # fmt: skip


DETAILS = {"expert_counts": [[3, 4]], "grad_norm_by_role": {"router": 1.0}, "update_norm_by_role": {"router": 2.0}}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [50.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def journal(clock):
    rows, timings, shown = Rows(), Rows(), Rows()
    config = change(CONFIG, {"train.max_skipped_steps": 3, "train.log_every": 2})
    return StepLogger(config, StepFiles(rows, timings), shown), rows, timings, shown


def test_a_step_is_read_when_the_next_one_runs(journal):
    book, rows, _, shown = journal
    for step in (1, 2, 3):
        book.begun(step, metrics(), 0.0)
        assert [row["step"] for row in rows] == list(range(1, step))
    book.settle({"a": HeldoutLoss(6.0, 3), "b": HeldoutLoss(2.0, 1)})
    book.settle()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows == [row for row, _ in shown]
    assert rows[0] == {"step": 1, "phase": "train", "tokens_seen": 256, "loss": 2.5, "tokens": 100, "skipped": 0}
    assert rows[1] == {"step": 2, "phase": "train", "tokens_seen": 512, "loss": 2.5, "tokens": 100, "skipped": 0,
                       "loss_by_source": {"corpus": 2.5}, **DETAILS}  # fmt: skip
    assert (rows[2]["heldout_loss"], rows[2]["heldout_loss_by_source"]) == (2.0, {"a": 2.0, "b": 2.0})


def test_evaluation_and_saving_are_no_part_of_a_steps_time(journal, clock):
    book, _, timings, shown = journal
    clock[0] += 30  # compilation
    book.restart_clock()
    clock[0] += 1  # data and dispatch of the first step
    book.begun(1, metrics(), 0.25)
    clock[0] += 3
    book.begun(2, metrics(), 0.5)
    clock[0] += 2
    book.wait()
    clock[0] += 100  # evaluation
    book.settle({"a": HeldoutLoss(6.0, 3)})
    clock[0] += 100  # saving
    book.restart_clock()
    clock[0] += 5
    book.begun(3, metrics(), 0.0)
    book.settle()
    assert [(row["step"], row["seconds"], row["data_wait"]) for row in timings] == [
        (1, 4, 0.25),
        (2, 2, 0.5),
        (3, 5, 0),
    ]
    assert [row["tokens_per_second"] for row in timings] == [25, 50, 20]
    assert [seconds for _, seconds in shown] == [4, 2, 5]


def test_the_loss_of_each_source_that_was_read_is_a_mean_over_its_tokens():
    rows, sources = Rows(), {name: SourceConfig(name) for name in "abc"}
    config = change(CONFIG, {"data.sources": Table(sources), "train.log_every": 1})
    book = StepLogger(config, StepFiles(rows, Rows()), Rows())
    book.begun(1, metrics(source_loss=jnp.array([6.0, 0.0, 5.0]), source_tokens=jnp.array([3.0, 0.0, 2.0])), 0.0)
    book.settle()
    assert rows[0]["loss_by_source"] == {"a": 2.0, "c": 2.5}
    assert not {"source_loss", "source_tokens"} & rows[0].keys()


def test_a_skipped_step_is_recorded_with_its_rows_and_many_end_the_run(journal):
    book, rows, *_ = journal
    for step, skip in ((1, 2), (2, 3)):
        book.begun(step, metrics(skip, step), 0.0)
    book.begun(3, metrics(1, 3), 0.0)
    with pytest.raises(RunStopped, match=r"^3 steps in a row, .* the last one for: not finite, .*resume_from="):
        book.settle()
    assert [(row["skip"], row["rows"]) for row in rows] == [
        ("loss spike", [0, 8]), ("gradient spike", [8, 16]), ("not finite", [16, 24]),
    ]  # fmt: skip
