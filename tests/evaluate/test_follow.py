"""A run that is followed: each finished checkpoint is scored once, whatever happens to it."""

import json

import pytest

from tests.users_helpers import OTHER, needs_root, public_folder, user
from zaya_jax.errors import InputError
from zaya_jax.evaluate import evaluate_command as module
from zaya_jax.evaluate.evaluate_command import check_followed, follow, has_ended
from zaya_jax.run.folder import CONFIG, lock_folder
from zaya_jax.run.metrics import append_row, read_rows
from zaya_jax.run.status import FINISHED, RUNNING, Status, track_status


class Training:
    """A training, of which each look shows the next state: (state of the process, verified steps)."""

    def __init__(self, monkeypatch, run, *looks):
        self.looks, self.scored, self.slept = list(looks), [], []
        (run / CONFIG).write_text("")
        monkeypatch.setattr(module, "read_status", self.status)
        monkeypatch.setattr(module.time, "sleep", self.sleep)
        monkeypatch.setattr(module, "finished_steps", lambda _: self.looks[0][1])
        monkeypatch.setattr(module, "verify_checkpoint", lambda folder: ["It is."] * (folder.name == "7"))

    def status(self, _):
        return None if self.looks[0][0] is None else Status(self.looks[0][0], "", "", 1)

    def score(self, step):
        self.scored.append(step)
        return {"score": step / 10}

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.looks.pop(0)


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(module, "print", lines.append, raising=False)
    return lines


def test_each_checkpoint_is_scored_once_until_training_ends(tmp_path, monkeypatch, said):
    path = tmp_path / "evaluations" / "scores.jsonl"
    looks = (RUNNING, []), (RUNNING, [5]), (RUNNING, [5, 10]), (FINISHED, [10, 12])
    training = Training(monkeypatch, tmp_path, *looks)
    follow(tmp_path, path, "a-1", training.score)
    assert training.scored == [5, 10, 12]
    assert training.slept == [30, 30, 30]
    assert read_rows(path) == [{"name": "a-1", "score": step / 10, "step": step} for step in (5, 10, 12)]
    assert "3 checkpoints" in said[-1]


def test_what_was_scored_before_is_not_scored_again_and_half_a_line_is_cut_off(tmp_path, monkeypatch, said):
    path = tmp_path / "scores.jsonl"
    append_row(path, {"name": "a-1", "step": 5})
    append_row(path, {"name": "a-2", "step": 10})  # of another evaluation
    with path.open("a") as file:
        file.write('{"step": 10, "sc')
    training = Training(monkeypatch, tmp_path, (None, [5, 10]))
    follow(tmp_path, path, "a-1", training.score)
    assert training.scored == [10]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["name"], row["step"]) for row in rows] == [("a-1", 5), ("a-2", 10), ("a-1", 10)]
    assert said[-1].endswith("the scores of 2 checkpoints.")


def test_a_checkpoint_that_retention_removes_meanwhile_is_left_out(tmp_path, monkeypatch, said):
    training = Training(monkeypatch, tmp_path, (FINISHED, [5, 10]))

    def score(step):
        if step == 5:
            training.looks[0] = (FINISHED, [10])
            raise InputError("It is gone.")
        return training.score(step)

    follow(tmp_path, tmp_path / "scores.jsonl", "a-1", score)
    assert training.scored == [10]
    assert said[0] == "Step 5 is not scored: its checkpoint was removed first."


def test_a_damaged_checkpoint_is_left_out(tmp_path, monkeypatch, said):
    training = Training(monkeypatch, tmp_path, (FINISHED, [7, 10]))

    def score(step):
        if step == 7:
            raise InputError("It is damaged.")
        return training.score(step)

    follow(tmp_path, tmp_path / "scores.jsonl", "a-1", score)
    assert training.scored == [10]
    assert said[0] == "Step 7 is not scored: its checkpoint is damaged."


def test_an_intact_checkpoint_that_cannot_be_scored_is_an_error(tmp_path, monkeypatch, said):
    Training(monkeypatch, tmp_path, (RUNNING, [5]))

    def score(step):
        raise InputError("It does not fit.")

    with pytest.raises(InputError, match="does not fit"):
        follow(tmp_path, tmp_path / "scores.jsonl", "a-1", score)


def test_a_training_that_starts_has_not_ended(tmp_path):
    assert not has_ended(tmp_path)
    with lock_folder(tmp_path):
        (tmp_path / CONFIG).write_text("")
        assert not has_ended(tmp_path)  # it has not written its status yet
        with track_status(tmp_path):
            assert not has_ended(tmp_path)
    assert has_ended(tmp_path)


@needs_root
def test_a_user_who_may_only_read_a_run_sees_when_it_ends():
    """The lock is the owner's, who alone can test it."""
    with public_folder() as run:
        with lock_folder(run):
            (run / CONFIG).write_text("")
            with user(OTHER):
                assert not has_ended(run)  # it has not written its status yet
                check_followed(run)
            with track_status(run), user(OTHER):
                assert not has_ended(run)
        with user(OTHER):
            assert has_ended(run)


def test_a_training_that_has_not_begun_is_waited_for(tmp_path, monkeypatch, said):
    training = Training(monkeypatch, tmp_path, (None, []), (None, []), (FINISHED, [1]))
    (tmp_path / CONFIG).unlink()

    def sleep(seconds):
        training.sleep(seconds)
        if len(training.looks) == 1:
            (tmp_path / CONFIG).write_text("")

    monkeypatch.setattr(module.time, "sleep", sleep)
    follow(tmp_path, tmp_path / "scores.jsonl", "a-1", training.score)
    assert training.scored == [1]
    assert said == [f"Waiting for a training to start in {tmp_path}.",
                    f"The training has ended; {tmp_path / 'scores.jsonl'} has the scores of 1 checkpoint."]  # fmt: skip


def test_only_a_run_or_a_folder_for_one_is_followed(tmp_path):
    with pytest.raises(InputError, match=r"--follow .*nowhere is not a folder"):
        check_followed(tmp_path / "nowhere")
    check_followed(tmp_path)
    (tmp_path / "evaluations").mkdir()  # of an earlier --follow
    with lock_folder(tmp_path):
        (tmp_path / "checkpoints").mkdir()
        check_followed(tmp_path)  # a training has started, but not written its configuration yet
    with pytest.raises(InputError, match=r"--follow .* has files but no run"):
        check_followed(tmp_path)
    (tmp_path / CONFIG).write_text("")
    check_followed(tmp_path)
