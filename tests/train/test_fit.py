import dataclasses
import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.train.test_interruption import copied_run, metric_rows, train_until
from tests.train_helpers import change, differing, make_program, restore, small_run, snapshot
from zaya_jax.config import load_config
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.evaluate.heldout import HeldoutEvaluator
from zaya_jax.generate.decode import Continuation
from zaya_jax.main import main
from zaya_jax.model.tree import balancing_biases, parameters
from zaya_jax.ops.registry import KernelSelection
from zaya_jax.ops.target import current_target
from zaya_jax.run.checkpoints import saved_steps
from zaya_jax.run.run import open_run
from zaya_jax.train import fit, initialization
from zaya_jax.train.fit import run_training
from zaya_jax.train.program import Programs

pytestmark = pytest.mark.usefixtures("quick")


# --- a whole run -----------------------------------------------------------------------------------------------


def test_a_run_leaves_its_configuration_rows_checkpoints_and_a_picture(finished):
    config, result = finished
    folder = Path(config.run_dir)
    assert result.run_dir == folder
    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert names == {"config.yaml", "metrics.jsonl", "timings.jsonl", "checkpoints", "loss.png", "phases.json",
                     "status.json", "tokenizer"}  # fmt: skip
    assert open_run(folder).status.state == "finished"
    assert load_config(folder / "config.yaml") == config
    rows, compressors = json.loads((folder / "loss.png").read_text())
    assert rows == metric_rows(folder)
    assert compressors.keys() >= {"gzip", "xz"}
    assert saved_steps(folder / "checkpoints") == [10, 12]  # the newest two of 5, 10, 12


def test_each_step_has_one_row_with_everything(finished):
    config, result = finished
    rows = metric_rows(result.run_dir)
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        evaluated, detailed = row["step"] in (6, 12), row["step"] % 4 == 0
        assert set(row) == {
            "step", "loss", "grad_norm", "learning_rate", "tokens", "skipped", "load_entropy", "max_load", "skip_rate",
            "bias_range", "phase", "tokens_seen", *(["heldout_loss"] if evaluated else []),
            *(["expert_counts", "grad_norm_by_role", "update_norm_by_role", "loss_by_source"] if detailed else []),
        }  # fmt: skip
        assert all(len(row[name]) == 2 for name in ("load_entropy", "max_load", "skip_rate", "bias_range"))
        assert row["skipped"] == 0
        assert 0 < row["tokens"] <= config.train.batch.tokens
        assert (row["phase"], row["tokens_seen"]) == ("train", row["step"] * config.train.batch.tokens)
    assert [row["learning_rate"] for row in rows[:2]] == pytest.approx([0.01 / 2, 0.01], rel=1e-5)
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    assert rows[-1]["heldout_loss"] < rows[5]["heldout_loss"]


def test_each_step_has_its_times(finished):
    rows = [json.loads(line) for line in (finished[1].run_dir / "timings.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert set(row) == {"step", "seconds", "data_wait", "tokens_per_second", "flops_per_second", "mfu"}
        assert row["seconds"] > 0
        assert row["data_wait"] >= 0  # while the step before runs, so that it may be longer than the step itself
        assert row["mfu"] is None  # the peak of a CPU is not known


def test_evaluation_saving_and_samples_do_not_count_as_the_time_of_steps(finished, tmp_path, monkeypatch):
    now = [0.0]

    def takes_long(function):
        def call(*arguments):
            now[0] += 100
            return function(*arguments)

        return call

    monkeypatch.setattr("zaya_jax.train.step_logger.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(HeldoutEvaluator, "evaluate", takes_long(HeldoutEvaluator.evaluate))
    monkeypatch.setattr(fit.CheckpointStore, "save", takes_long(fit.CheckpointStore.save))
    monkeypatch.setattr("zaya_jax.train.trainer.draw_sample", takes_long(lambda *_: {"prompt": "", "continuation": ""}))
    result = run_training(change(finished[0], {"run_dir": str(tmp_path / "run"), "sample.every": 4}))
    assert now[0] == 100 * (2 + 3 + 2)
    rows = [json.loads(line) for line in (result.run_dir / "timings.jsonl").read_text().splitlines()]
    assert [row["seconds"] for row in rows] == [0] * 12


def test_the_result_holds_the_last_state_as_a_model(finished):
    config, result = finished
    assert int(result.state.step) == 12
    assert not differing(parameters(result.model), result.state.params)
    assert not differing(balancing_biases(result.model), result.state.balance)
    assert not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(result.model))
    state, position = restore(config, 12)
    assert not differing(state, result.state)
    assert position["sequences"] == 12 * 4


def test_the_heldout_loss_of_the_result_is_that_of_the_last_row(finished):
    result = finished[1]
    assert result.heldout_by_source == {"corpus": result.heldout}
    assert result.heldout.nats_per_token == metric_rows(result.run_dir)[-1]["heldout_loss"]
    held = result.prepared.sources["corpus"].manifest.heldout
    assert result.heldout.tokens < held.tokens - held.documents  # else it is no part, and anything would be equal


def test_a_run_is_the_same_again_elsewhere(finished, tmp_path):
    config, result = finished
    other = change(config, {"run_dir": str(tmp_path / "other"), "data.cache_dir": str(tmp_path / "cache"),
                            "checkpoint.every": 12, "checkpoint.keep": 1})  # fmt: skip
    again = run_training(other)
    assert (again.run_dir / "metrics.jsonl").read_bytes() == (result.run_dir / "metrics.jsonl").read_bytes()
    assert not differing(again.state, result.state)


def test_the_command_ends_with_the_report_of_its_run(tmp_path, monkeypatch, capsys):
    generated = [Continuation([5, 6], [], False)]
    monkeypatch.setattr("zaya_jax.train.sample.generate_tokens", lambda *_, **__: generated)
    config = small_run(tmp_path)
    for _ in range(2):
        assert main(["--config", str(tmp_path / "run.yaml")]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == f"Run folder: {config.run_dir}"
        assert "Held-out loss over" in out


class Norm:
    """An evaluator: the largest master weight."""

    name, label, ranks_checkpoints = "largest_weight", "largest", False

    def evaluate(self, model):
        return {self.name: max(float(np.abs(x).max()) for x in model.params.values())}


class Calls(list):
    """A sink that keeps what it is told."""

    def write(self, metrics, timings):
        self.append((metrics, timings))

    def sync(self):
        self.append("sync")
        return ""

    def close(self):
        self.append("close")


def test_evaluators_and_sinks_are_added_to_two_lists(finished, tmp_path, monkeypatch, capsys):
    calls = Calls()
    open_sinks, console = fit.open_sinks, fit.ConsoleReport

    def with_norm(*arguments, evaluators, **more):
        evaluators.append(Norm())  # of the list that the trainer has, too
        return console(*arguments, evaluators=evaluators, **more)

    monkeypatch.setattr(fit, "ConsoleReport", with_norm)
    monkeypatch.setattr(fit, "open_sinks", lambda *arguments: [*open_sinks(*arguments), calls])
    result = run_training(change(finished[0], {"run_dir": str(tmp_path / "run")}))
    rows, others = metric_rows(result.run_dir), metric_rows(finished[1].run_dir)
    assert calls[-1] == "close"
    assert [call[0] for call in calls if isinstance(call, tuple)] == rows
    assert all(call[1]["seconds"] > 0 for call in calls if isinstance(call, tuple))
    kept = [call if isinstance(call, str) else call[0]["step"] for call in calls]
    assert kept[kept.index("sync") - 1] == 5  # all rows up to a checkpoint are synced before it
    assert [row["step"] for row in rows if row.pop(Norm.name, None)] == [6, 12]
    assert rows == others
    assert " | largest " in capsys.readouterr().out


class Finished(Exception):
    """Ends a run where its loop would begin."""


def finish(trainer):
    raise Finished


def test_a_trainer_can_be_stepped_evaluated_and_saved_by_hand(finished, tmp_path, monkeypatch):
    """As training does it, through an evaluation that is due: all rows but for the score are the same."""
    rows = []

    def by_hand(trainer):
        assert trainer.evaluate()["heldout_loss"] > 0
        for _ in range(7):
            trainer.step()
        rows.append(trainer.evaluate())
        trainer.save()
        assert trainer.store.wait()
        raise Finished

    run_dir = tmp_path / "run"
    monkeypatch.setattr(fit.Trainer, "record_changes", by_hand)
    with pytest.raises(Finished):
        run_training(change(finished[0], {"run_dir": str(run_dir)}))
    assert saved_steps(run_dir / "checkpoints") == [7]
    ours, others = (
        [{name: x for name, x in row.items() if name != "heldout_loss"} for row in metric_rows(folder)[:7]]
        for folder in (run_dir, finished[1].run_dir)
    )
    assert ours == others
    assert metric_rows(run_dir)[-1]["heldout_loss"] == rows[0]["heldout_loss"]
    assert open_run(run_dir).checkpoints[-1].heldout_loss == rows[0]["heldout_loss"]


def test_kernels_are_tried_before_the_state_takes_its_memory(finished, tmp_path, monkeypatch):
    calls, validate, initialize = [], fit.validated_kernels, fit.initialize
    monkeypatch.setattr(fit, "validated_kernels", lambda *arguments: calls.append("kernels") or validate(*arguments))
    monkeypatch.setattr(fit, "initialize", lambda *arguments: calls.append("state") or initialize(*arguments))
    monkeypatch.setattr(fit.Trainer, "record_changes", finish)
    with pytest.raises(Finished):
        run_training(change(finished[0], {"run_dir": str(tmp_path / "run")}))
    assert calls == ["kernels", "state"]


# --- what is refused -------------------------------------------------------------------------------------------


def refused(config, match):
    """The run folder is as it was after the refusal."""
    before = snapshot(Path(config.run_dir))
    with pytest.raises(InputError, match=match):
        run_training(config)
    assert snapshot(Path(config.run_dir)) == before


def test_a_corpus_that_changed_is_refused_before_anything_is_written(finished, tmp_path):
    config = copied_run(finished, tmp_path)
    other = shutil.copytree(config.data.corpus, tmp_path / "corpus")
    (other / "1.txt").write_text("something else")
    path = Path(config.run_dir) / "config.yaml"
    path.write_text(path.read_text().replace(config.data.corpus, str(other)))
    refused(change(config, {"data.corpus": str(other)}), "The saved position belongs to other data")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"train.batch.tokens": 12 * 32}, r"train\.batch gives 12 sequences.* × micro_batch 2"),
        ({"train.batch.tokens": 6 * 32, "train.batch.micro_batch": None}, r"train\.batch gives 6 sequences"),
    ],
)
def test_batches_that_the_devices_do_not_divide_are_refused_before_a_folder_is_made(
    tmp_path, monkeypatch, changes, key
):
    config = change(small_run(tmp_path), changes)
    simulated = functools.partial(Programs, kernels=KernelSelection(current_target()), devices=4)
    monkeypatch.setattr(fit, "make_programs", simulated)
    with pytest.raises(InputError, match=f"^{key}") as caught:
        run_training(config)
    assert "4 data-parallel shards" in str(caught.value)
    assert not Path(config.run_dir).exists()


def test_a_corpus_that_was_misspelled_can_be_set_right(finished, tmp_path):
    config = change(finished[0], {"run_dir": str(tmp_path / "run")})
    with pytest.raises(InputError, match="is not a folder"):
        run_training(change(config, {"data.corpus": str(tmp_path / "misspelled")}))
    train_until(config, 2)


def test_another_architecture_is_refused(finished, tmp_path):
    config = change(copied_run(finished, tmp_path), {"model.num_experts": 2})
    path = Path(config.run_dir) / "config.yaml"
    refused(config, r"model\.num_experts was 4 and is now 2")
    path.write_text(path.read_text().replace("num_experts: 4", "num_experts: 2"))
    refused(config, rf"step 12 in {config.run_dir} .* model\.num_experts=4 ")


# --- steps that are not finite ---------------------------------------------------------------------------------


@pytest.fixture
def poisoned(monkeypatch):
    """Runs start with a weight that is not a number, so that no loss is one."""
    init = initialization.init_state

    def init_poisoned(*arguments):
        state = init(*arguments)
        name = "blocks.0.attention.query"
        return dataclasses.replace(state, params={**state.params, name: np.full_like(state.params[name], np.nan)})

    monkeypatch.setattr(initialization, "init_state", init_poisoned)


def test_a_run_stops_after_steps_in_a_row_that_are_not_finite(finished, tmp_path, poisoned):
    most = 3
    config = change(finished[0], {"run_dir": str(tmp_path / "run"), "train.max_skipped_steps": most})
    match = rf"in a row reached train\.max_skipped_steps={most} at step {most} \(.*: not finite\).*resume_from="
    for _ in range(2):  # the same command says the same
        with pytest.raises(RunStopped, match=match):
            run_training(config)
        rows = metric_rows(tmp_path / "run")
        assert [row["skipped"] for row in rows] == list(range(1, most + 1))
        assert all(row["loss"] is None and row["grad_norm"] is None for row in rows)
        assert [(row["skip"], row["rows"]) for row in rows] == [
            ("not finite", [4 * step, 4 * step + 4]) for step in range(most)
        ]


def test_a_run_may_go_on_where_more_is_allowed(finished, tmp_path, poisoned):
    config = change(finished[0], {"run_dir": str(tmp_path / "run"), "train.max_skipped_steps": 13})
    result = run_training(config)
    assert int(result.state.skipped) == 12
    assert metric_rows(result.run_dir)[-1]["heldout_loss"] is None
    assert not differing(result.state.opt_state, initialization.init_state(make_program(config)).opt_state)
