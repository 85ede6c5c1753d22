"""Rows are written once each, in order, a step late; a skipped step is recorded with its rows of data."""

import jax.numpy as jnp
import pytest

from tests.train_helpers import CONFIG, change
from zaya_jax.config import SourceConfig, Table
from zaya_jax.errors import RunStopped
from zaya_jax.train import step_logger as module
from zaya_jax.train.step_logger import StepLogger


class Rows:
    """A sink that keeps the rows it is given."""

    def __init__(self):
        self.metrics, self.timings = [], []

    def write(self, metrics, timings):
        self.metrics.append(metrics)
        self.timings.append(timings)


def throughput(step, tokens, seconds):
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
def logger(clock):
    config = change(CONFIG, {"train.max_skipped_steps": 3, "train.log_every": 2})
    return StepLogger(config, [rows := Rows(), Rows()], throughput), rows


def test_a_step_is_recorded_when_the_next_one_runs(logger):
    logger, rows = logger
    for step in (1, 2, 3):
        logger.begin(step, metrics(), 0.0)
        assert [row["step"] for row in rows.metrics] == list(range(1, step))
    logger.record({"score": 2.0, "parts": {"a": 1}})
    logger.record()
    usual = {"phase": "train", "loss": 2.5, "tokens": 100, "skipped": 0}
    assert rows.metrics == [
        {"step": 1, "tokens_seen": 256, **usual},
        {"step": 2, "tokens_seen": 512, **usual, "loss_by_source": {"corpus": 2.5}, **DETAILS},
        {"step": 3, "tokens_seen": 768, **usual, "score": 2.0, "parts": {"a": 1}},
    ]


def test_evaluation_and_saving_are_no_part_of_a_steps_time(logger, clock):
    logger, rows = logger
    clock[0] += 30  # compilation
    logger.restart_clock()
    clock[0] += 1  # data and dispatch of the first step
    logger.begin(1, metrics(), 0.25)
    clock[0] += 3
    logger.begin(2, metrics(), 0.5)
    clock[0] += 2
    logger.wait()
    clock[0] += 100  # evaluation
    logger.record({"score": 1.0})
    clock[0] += 100  # saving
    logger.restart_clock()
    clock[0] += 5
    logger.begin(3, metrics(), 0.0)
    logger.record()
    assert rows.timings == [
        {"step": 1, "seconds": 4, "data_wait": 0.25, "tokens_per_second": 25},
        {"step": 2, "seconds": 2, "data_wait": 0.5, "tokens_per_second": 50},
        {"step": 3, "seconds": 5, "data_wait": 0.0, "tokens_per_second": 20},
    ]


def test_the_loss_of_each_source_that_was_read_is_a_mean_over_its_tokens():
    config = change(CONFIG, {"data.sources": Table({name: SourceConfig(name) for name in "abc"}),
                             "train.log_every": 1})  # fmt: skip
    logger = StepLogger(config, [rows := Rows()], throughput)
    logger.begin(1, metrics(source_loss=jnp.array([6.0, 0.0, 5.0]), source_tokens=jnp.array([3.0, 0.0, 2.0])), 0.0)
    logger.record()
    assert rows.metrics[0]["loss_by_source"] == {"a": 2.0, "c": 2.5}
    assert not {"source_loss", "source_tokens"} & rows.metrics[0].keys()


def test_a_skipped_step_is_recorded_with_its_rows_and_many_end_the_run(logger):
    logger, rows = logger
    for step, skip in ((1, 2), (2, 3)):
        logger.begin(step, metrics(skip, step), 0.0)
    logger.begin(3, metrics(1, 3), 0.0)
    with pytest.raises(RunStopped, match=r"^3 steps in a row, .*: not finite, .*resume_from="):
        logger.record()
    assert [(row["skip"], row["rows"]) for row in rows.metrics] == [
        ("loss spike", [0, 8]), ("gradient spike", [8, 16]), ("not finite", [16, 24]),
    ]  # fmt: skip
