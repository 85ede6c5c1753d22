"""Runs that resume with other settings: longer, with other limits for spikes, or in another folder."""

import dataclasses
import errno
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.train.test_interruption import copied_run, metric_rows, train_until
from tests.train_helpers import CONFIG, STEADY, change, differing, restore, snapshot, trained
from zaya_jax.checkpoint.commands import rollback
from zaya_jax.config import PhaseConfig, SpikeConfig, load_config, to_dict, to_yaml
from zaya_jax.errors import InputError
from zaya_jax.run.manifest import read_manifest
from zaya_jax.run.run import open_run
from zaya_jax.train import fit, trainer
from zaya_jax.train.fit import run_training
from zaya_jax.train.run_checks import warn_about_positions
from zaya_jax.weights.sources import model_config

pytestmark = pytest.mark.usefixtures("quick")


def of_steps(config, steps, **changes):
    """`config` with so many steps."""
    return change(config, {"phases": (PhaseConfig(steps * 128, schedule=STEADY),), **changes})


@pytest.fixture(scope="module")
def long(finished, tmp_path_factory):
    """A run of 14 steps."""
    return trained(of_steps(finished[0], 14, run_dir=str(tmp_path_factory.mktemp("long") / "run")))


def full_at_first(action):
    """`action` on a disk that has no room at its first call."""
    calls = []

    def act(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        action(*arguments)

    return act


def test_a_finished_run_is_lengthened_as_if_it_had_been_that_long(finished, long, tmp_path, monkeypatch, capsys):
    _, uninterrupted = long
    config = of_steps(copied_run(finished, tmp_path), 14)
    for module, name in ((trainer, "record_changes"), (trainer, "plot_run")):
        monkeypatch.setattr(module, name, full_at_first(getattr(module, name)))
    result = run_training(config)
    said = capsys.readouterr().out
    assert "Resuming after step 12 of 14." in said
    assert f"{config.run_dir}/config.yaml cannot be written: No space left on device. Training continues" in said
    assert f"{config.run_dir} can be written again; no row is missing." in said
    assert not differing(result.state, uninterrupted.state)
    rows, others = metric_rows(result.run_dir), metric_rows(uninterrupted.run_dir)
    assert rows[11].pop("heldout_loss")  # taken where the run ended then, and every six steps
    assert others[11].pop("heldout_loss")
    assert rows == others
    assert load_config(result.run_dir / "config.yaml") == config
    assert json.loads((result.run_dir / "changes.jsonl").read_text()) == {
        "step": 12, "changes": {"phases.train.tokens": [12 * 128, 14 * 128]}
    }  # fmt: skip
    assert json.loads((result.run_dir / "phases.json").read_text()) == {"train": 14}


def test_another_run_is_continued_in_a_new_folder(long, tmp_path, monkeypatch, capsys):
    config, uninterrupted = long
    source = change(config, {"run_dir": str(tmp_path / "source")})
    train_until(source, 8)  # its checkpoint is that of step 5
    before = snapshot(tmp_path / "source")
    settings = {"evaluation.every": 7, "checkpoint.every": 4, "train.max_skipped_steps": 3}
    config = change(source, {"run_dir": str(tmp_path / "new"), "resume_from": source.run_dir, **settings})
    train_until(config, 10)
    assert f"Resuming from {tmp_path}/source/checkpoints/5 after step 5 of 14." in capsys.readouterr().out
    Path(source.run_dir).rename(tmp_path / "gone")  # no longer needed
    result = run_training(config)
    assert snapshot(tmp_path / "gone") == before
    assert not differing(result.state, uninterrupted.state)
    rows, others = metric_rows(result.run_dir), metric_rows(uninterrupted.run_dir)[5:]
    for row in rows + others:
        row.pop("heldout_loss", None)
    assert rows == others


def test_what_cannot_be_continued_elsewhere_is_refused(long, tmp_path, monkeypatch):
    config, uninterrupted = long
    base = change(config, {"run_dir": str(tmp_path / "new"), "resume_from": str(uninterrupted.run_dir)})

    def said(changes, match):
        with pytest.raises(InputError, match=match):
            run_training(change(base, changes))
        assert not (tmp_path / "new" / "config.yaml").exists()

    said({}, r"^resume_from=.* is at step 14, but this configuration ends after step 14\. Raise phases\.train\.tokens")
    longer = of_steps(base, 16).phases
    said({"phases": longer, "model.num_experts": 2}, r"^resume_from=.* a different architecture: .*\.num_experts=4 ")
    said({"phases": longer, "seed": 3}, r"^resume_from=.* made with seed=0, but this configuration has 3")
    said({"phases": longer, "optimizer.balance.rule": "sign"}, r"made with optimizer\.balance\.rule='adamw'")
    said({"phases": longer, "data.heldout_fraction": 0.5}, r"^resume_from=.*The saved position belongs to other data")
    said({"phases": longer, "train.batch.tokens": 256}, r"^resume_from=.*train\.batch")
    said({"phases": of_steps(base, 9).phases}, r"^resume_from=.*phases\.train\.tokens is 1,152, but .* 1,792 tokens")
    said({"init_from": str(uninterrupted.run_dir)}, r"^resume_from is .* must be null if init_from is set")
    said({"resume_from": "hf:folder"}, r"^resume_from is 'hf:folder'.* no optimizer state")
    said({"resume_from": str(tmp_path)}, r"^resume_from is .*, but must be a run folder with a checkpoint")


def test_a_run_resumes_with_other_settings_for_spikes_and_says_so(finished, tmp_path, monkeypatch):
    """The history of another window is emptied."""
    config = change(finished[0], {"run_dir": str(tmp_path / "run")})
    narrow = change(config, {"train.spike": SpikeConfig(2, 1e-3), "train.max_skipped_steps": 1})

    class Store(fit.CheckpointStore):
        def save(self, step, state, metadata, ready):
            values, _, skipped = jax.device_get(state.recent)
            recent = state.recent._replace(values=jnp.asarray(values[:, :2]), skipped=jnp.asarray(skipped[:, :2]))
            super().save(step, dataclasses.replace(state, recent=recent), metadata | {"config": to_dict(narrow)}, ready)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "CheckpointStore", Store)
        train_until(config, 8)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(narrow))
    restored, record = [], trainer.Trainer.record_changes
    monkeypatch.setattr(trainer.Trainer, "record_changes",
                        lambda each: restored.append(jax.device_get(each.state.recent)) or record(each))  # fmt: skip
    result = run_training(config)
    (recent,) = restored
    assert recent.values.shape == recent.skipped.shape == (2, config.train.spike.window)
    assert recent.accepted == 0
    assert metric_rows(result.run_dir) == metric_rows(finished[1].run_dir)
    assert load_config(result.run_dir / "config.yaml") == config
    line = json.loads((result.run_dir / "changes.jsonl").read_text())
    assert line["step"] == 5
    assert line["changes"]["train.spike.threshold"] == [1e-3, 10.0]
    assert line["changes"]["train.max_skipped_steps"] == [1, 10]


def test_a_run_rolled_back_before_bad_rows_equals_one_that_never_read_them(finished, tmp_path, capsys):
    config = change(finished[0], {"checkpoint.every": 4, "run_dir": str(tmp_path / "bad")})
    skip = {"data.skip_rows": ((18, 23), (30, 31))}  # of 4 rows a step
    clean = change(config, {**skip, "run_dir": str(tmp_path / "clean")})
    train_until(clean, 8)
    uninterrupted = run_training(clean)
    assert [row["loss"] for row in metric_rows(uninterrupted.run_dir)] != [
        row["loss"] for row in metric_rows(finished[1].run_dir)
    ]
    assert restore(clean, 12)[1]["sequences"] == 12 * 4 + 6
    assert read_manifest(tmp_path / "clean" / "checkpoints" / "12").metadata["config"]["data"]["skip_rows"] == [
        [18, 23], [30, 31]
    ]  # fmt: skip

    train_until(config, 11)
    before = snapshot(tmp_path / "bad")
    with pytest.raises(InputError, match=r"^data\.skip_rows has the new range \[18, 23\], but the checkpoint at step "
                       r"8 .* first unread row is 32\. .* checkpoint of step 4 or earlier: .* rollback"):  # fmt: skip
        run_training(change(config, skip))
    assert snapshot(tmp_path / "bad") == before
    elsewhere = change(config, {**skip, "run_dir": str(tmp_path / "new"), "resume_from": config.run_dir})
    with pytest.raises(InputError, match=r"^resume_from=.*: data\.skip_rows has the new range"):
        run_training(elsewhere)
    again = run_training(change(elsewhere, {"resume_from": f"{config.run_dir}/checkpoints/4"}))
    assert not differing(again.state, uninterrupted.state)

    rollback(tmp_path / "bad", 4)
    capsys.readouterr()
    result = run_training(change(config, skip))
    assert "Resuming after step 4 of 12." in capsys.readouterr().out
    assert not differing(result.state, uninterrupted.state)
    assert metric_rows(result.run_dir) == metric_rows(uninterrupted.run_dir)
    assert restore(config, 12)[1] == restore(clean, 12)[1]
    assert json.loads((result.run_dir / "changes.jsonl").read_text()) == {
        "step": 4, "changes": {"data.skip_rows": [[], [[18, 23], [30, 31]]]}
    }  # fmt: skip
    assert len(open_run(result.run_dir).quarantined) == 1


def test_checkpoints_without_a_history_of_skipped_steps_resume(finished, tmp_path, monkeypatch):
    config = change(finished[0], {"run_dir": str(tmp_path / "run")})

    class Store(fit.CheckpointStore):
        def save(self, step, state, metadata, ready):
            state = dataclasses.replace(state, recent=state.recent._replace(skipped=None))
            metadata = {key: value for key, value in metadata.items() if key != "first_step"}
            del metadata["config"]["data"]["skip_rows"]  # nor the keys that came later
            super().save(step, state, metadata, ready)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "CheckpointStore", Store)
        train_until(config, 8)
    result = run_training(config)
    assert not differing(result.state, finished[1].state)
    assert metric_rows(result.run_dir) == metric_rows(finished[1].run_dir)


def test_another_base_of_the_positions_is_told(finished, tmp_path, capsys):
    config = finished[0]
    # Refused after that, so that nothing is compiled.
    base = change(config, {"run_dir": str(tmp_path / "run"), "optimizer.balance.rule": "sign"})
    with pytest.raises(InputError, match=r"optimizer\.balance\.rule"):
        run_training(change(base, {"init_from": config.run_dir, "model.rope_base": 5.0e5}))
    out = capsys.readouterr().out
    assert (
        f"Warning: init_from ({config.run_dir}) was trained with a RoPE base of 10000, but model.rope_base is 500000"
        in out
    )
    with pytest.raises(InputError):
        run_training(change(base, {"init_from": config.run_dir}))
    assert "RoPE" not in capsys.readouterr().out


def test_each_base_is_compared_with_that_of_the_phase(capsys):
    model = dataclasses.replace(
        CONFIG.model, layer_pattern=("full", "sliding"), sliding_window=3, sliding_rope_base=3.0
    )
    config = change(CONFIG, {"model": model, "phases": (PhaseConfig(256), PhaseConfig(256, "long", rope_base=7.0))})
    theirs = model_config({"config": to_dict(config), "phase": "long"})
    warn_about_positions(config, theirs, "X", 1)
    assert capsys.readouterr().out == ""
    warn_about_positions(change(config, {"model.sliding_rope_base": 4.0}), theirs, "X", 0)
    full, sliding = capsys.readouterr().out.splitlines()
    assert full.startswith("Warning: X was trained with a RoPE base of 7, but model.rope_base is 10000")
    assert sliding.startswith("Warning: X was trained with a RoPE base of 3, but model.sliding_rope_base is 4")
