"""Rows are written once each, in order, a step late; what was skipped is told with its rows."""

import jax.numpy as jnp
import pytest

from tests.train_helpers import CONFIG, change
from zaya_jax.errors import RunStopped
from zaya_jax.train.evaluate import HeldoutLoss
from zaya_jax.train.journal import Journal


class Rows(list):
    log = list.append
    row = list.append


def metrics(skip=0, skipped=0):
    return {"loss": jnp.float32(2.5), "skip": jnp.int32(skip), "skipped": jnp.int32(skipped)}


@pytest.fixture
def journal():
    rows, shown = Rows(), Rows()
    return Journal(change(CONFIG, {"train.max_skipped_steps": 3}), rows, shown), rows, shown


def test_a_step_is_read_when_the_next_one_runs(journal):
    book, rows, shown = journal
    for step in (1, 2, 3):
        book.begun(step, metrics())
        assert [row["step"] for row in rows] == list(range(1, step))
    book.settle({"a": HeldoutLoss(6.0, 3), "b": HeldoutLoss(2.0, 1)})
    book.settle()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows == shown
    assert rows[0] == {"step": 1, "phase": "train", "tokens_seen": 256, "loss": 2.5, "skipped": 0}
    assert (rows[2]["heldout_loss"], rows[2]["heldout_loss_of"]) == (2.0, {"a": 2.0, "b": 2.0})
    assert "heldout_loss" not in rows[1]


def test_a_skipped_step_is_recorded_with_its_rows_and_many_end_the_run(journal):
    book, rows, _ = journal
    for step, skip in ((1, 2), (2, 3)):
        book.begun(step, metrics(skip, step))
    book.begun(3, metrics(1, 3))
    with pytest.raises(RunStopped, match=r"^3 steps in a row, .* the last one for: not finite\."):
        book.settle()
    assert [(row["skip"], row["rows"]) for row in rows] == [
        ("loss spike", [0, 8]), ("gradient spike", [8, 16]), ("not finite", [16, 24]),
    ]  # fmt: skip
