"""What other tools learn of a run without jax: `open_run`, the status file, exit codes, the launcher, the tokenizer."""

import errno
import json
import re
import signal
import subprocess
import sys

import pytest

from tests.checkpoint.saved_helpers import save_run
from tests.train_helpers import ROOT, small_run
from tests.users_helpers import OTHER, needs_root, public_folder, user
from zaya_jax.errors import ExitCode, InputError, Preempted, RunStopped, exit_message
from zaya_jax.run.folder import claim_run, is_locked, lock_folder
from zaya_jax.run.launcher import detect_launcher
from zaya_jax.run.run import Run, open_run
from zaya_jax.run.signals import NAMES
from zaya_jax.run.status import mark_stopped, track_status
from zaya_jax.run.tokenizer import copy_tokenizer, run_tokenizer, special_ids

PROPERTIES = [name for name, value in vars(Run).items() if isinstance(value, property)]


def test_all_of_a_run_is_read_without_jax(tmp_path):
    config, folder = small_run(tmp_path), save_run(tmp_path / "run", [1, 2, 3], {2: 1.5})
    claim_run(folder, config)
    (folder / "phases.json").write_text('{"one": 2}')
    then = {"evaluation.every": [1, 2], "phases.one.batch.micro": [4, 2]}  # as an earlier version wrote it
    (folder / "changes.jsonl").write_text(json.dumps({"step": 1, "changes": then}) + "\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    (folder / "timings.jsonl").write_text('{"step": 1, "seconds": 0.5}\n')
    (folder / "tokenizer").mkdir()
    checkpoints = folder / "checkpoints"
    (checkpoints / "2" / "PINNED").touch()
    (checkpoints / "2" / "VERIFIED").touch()
    lost = max((checkpoints / "3").rglob("d/*"), key=lambda path: path.stat().st_size)
    lost.unlink()
    (checkpoints / "0.corrupt-20260101T000000").mkdir()

    run = open_run(str(folder))
    assert (run.config, run.phases, run.status) == (config, {"one": 2}, None)
    assert run.changes == [{"step": 1, "changes": {"evaluation.every": [1, 2], "phases.one.batch.micro_batch": [4, 2]}}]
    assert (run.metrics, run.timings) == ([{"step": 1, "loss": 2.0}], [{"step": 1, "seconds": 0.5}])
    assert (run.tokenizer, run.quarantined) == (folder / "tokenizer", [checkpoints / "0.corrupt-20260101T000000"])
    first, second, third = run.checkpoints
    assert (second.step, second.phase, second.tokens, second.heldout_loss) == (2, "one", 200, 1.5)
    assert (first.is_pinned, first.is_verified, second.is_pinned, second.is_verified) == (False, False, True, True)
    assert [checkpoint.is_usable for checkpoint in run.checkpoints] == [True, True, False]
    assert third.problem == f"damaged: {lost} is missing."

    code = (f"import sys; from zaya_jax.run.run import open_run; run = open_run({str(folder)!r})\n"
            f"print([getattr(run, name) for name in {PROPERTIES}])\n"
            "assert not {'jax', 'numpy'} & set(sys.modules)")  # fmt: skip
    read = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert read.stdout.strip() == str([getattr(run, name) for name in PROPERTIES])


def test_a_folder_without_a_run_and_a_run_without_files_are_told_apart(tmp_path):
    with pytest.raises(InputError, match=r"nowhere does not exist\.$"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"is not a run folder: it contains neither config\.yaml nor checkpoints/\.$"):
        open_run(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    run = open_run(tmp_path)  # as import-hf leaves it
    assert [getattr(run, name) for name in PROPERTIES if name != "config"] == [[], {}, None, [], [], [], [], None]
    with pytest.raises(InputError, match=r"config\.yaml"):
        _ = run.config


@pytest.mark.parametrize(
    ("count", "listed"), [(1, "{0}/r0"), (5, "{0}/r0, {0}/r1, {0}/r2, {0}/r3, {0}/r4"), (7, ".*{0}/r4, 2 more")]
)
def test_the_runs_inside_a_folder_that_is_none_are_named(count, listed, tmp_path):
    (tmp_path / "data").mkdir()
    for index in range(count):
        (tmp_path / f"r{index}" / ("checkpoints" if index % 2 else "config.yaml")).mkdir(parents=True)
    with pytest.raises(InputError, match=rf" Name one of the runs inside: {listed.format(tmp_path)}\.$"):
        open_run(f"{tmp_path}/")


TRAINED = """
import os, sys, time
from pathlib import Path
from zaya_jax.run.folder import lock_folder
from zaya_jax.run.status import track_status
with lock_folder(Path(sys.argv[1])), track_status(Path(sys.argv[1])):
    print("begun", flush=True)
    time.sleep(60)
"""


def status(folder):
    (folder / "checkpoints").mkdir(exist_ok=True)
    saved = open_run(folder).status
    assert saved is not None
    return saved


def test_the_status_of_a_process_that_runs_and_then_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", TRAINED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (status(tmp_path).state, status(tmp_path).pid) == ("running", process.pid)
        assert is_locked(tmp_path)
        process.kill()
    assert (status(tmp_path).state, status(tmp_path).exit_status) == ("killed", None)
    with lock_folder(tmp_path), track_status(tmp_path):
        assert status(tmp_path).state == "running"
    assert (status(tmp_path).state, status(tmp_path).exit_status) == ("finished", ExitCode.OK)
    with lock_folder(tmp_path), track_status(tmp_path):
        mark_stopped(tmp_path, 130, "Stopped by Ctrl-C.")
        stopped = status(tmp_path)
        mark_stopped(tmp_path, 143, "Stopped by SIGTERM.")  # it has stopped already
        assert status(tmp_path) == stopped
    assert (stopped.state, stopped.exit_status, stopped.message) == ("stopped", 130, "Stopped by Ctrl-C.")
    (tmp_path / "status.json").write_text('{"state": "run')
    assert open_run(tmp_path).status is None


@needs_root
def test_a_user_who_may_only_read_a_run_sees_that_its_process_was_killed():
    """The lock is the owner's, who alone can test it."""
    with public_folder() as run:
        process = subprocess.Popen([sys.executable, "-c", TRAINED, str(run)], cwd=ROOT, stdout=subprocess.PIPE)
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            (run / "checkpoints").mkdir()
            with user(OTHER):
                assert status(run).state == "running"
            process.kill()
        with user(OTHER):
            assert status(run).state == "killed"
        saved = json.loads((run / "status.json").read_text())
        for pid in (None, "1", 2**64):
            (run / "status.json").write_text(json.dumps(saved | {"pid": pid}))
            with user(OTHER):
                assert status(run).state == "killed"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("no"), ExitCode.BAD_INPUT),
        (RunStopped("no"), ExitCode.STOPPED),
        (OSError(errno.ENOSPC, "no"), ExitCode.STOPPED),
        (ZeroDivisionError("no"), ExitCode.STOPPED),
        (Preempted("no", ExitCode(128 + signal.SIGTERM)), ExitCode.TERMINATED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    ],
)
def test_the_status_of_a_process_that_stopped_is_its_exit_status_and_sentence(tmp_path, error, code):
    with pytest.raises(type(error)), track_status(tmp_path):
        raise error
    stopped = status(tmp_path)
    assert (stopped.state, stopped.exit_status) == ("stopped", code)
    assert stopped.message == exit_message(error)[0]


def test_a_status_that_cannot_be_written_costs_nothing(tmp_path):
    with track_status(tmp_path / "nowhere"):
        pass
    assert not (tmp_path / "nowhere").exists()


def test_exit_codes_are_those_of_shells():
    assert [ExitCode(128 + number) for number in NAMES] == [ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.HUNG_UP]


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, "Slurm"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}, "Kubernetes"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod of its own
    ],
)
def test_launchers_are_known_by_what_they_set(environment, launcher):
    assert detect_launcher(environment) == launcher


@pytest.mark.parametrize("tasks", ["", "two", "2.0", "-1", "4(x2)"])
def test_a_number_of_tasks_that_is_none_is_refused_with_its_variable(tasks):
    with pytest.raises(InputError, match=rf"SLURM_NTASKS is {re.escape(repr(tasks))}, but must be"):
        detect_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": tasks})


@pytest.mark.parametrize("line", ["[]", "{}", '{"changes": 1}', "no JSON"])
def test_changes_that_are_damaged_are_told(tmp_path, line):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "changes.jsonl").write_text(line)
    with pytest.raises(InputError, match=r"changes\.jsonl cannot be read"):
        _ = open_run(tmp_path).changes


def test_files_and_ids_are_copied_into_a_run_and_nothing_where_there_are_none(tmp_path):
    source, run = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    checkpoint = run / "checkpoints" / "0"
    (source / "model.safetensors").write_text("weights")
    copy_tokenizer(source, run)
    assert run_tokenizer(checkpoint) is None
    (source / "tokenizer.json").write_text("tokens")
    (source / "config.json").write_text('{"eos_token_id": [1, 2], "hidden_size": 3}')
    copy_tokenizer(source, run)
    folder = run_tokenizer(checkpoint)
    assert folder is not None
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "generation_config.json"}
    assert special_ids(folder) == {"bos_token_id": None, "eos_token_id": [1, 2], "pad_token_id": None}


def test_ids_of_the_configuration_come_before_those_of_generation(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "bos_token_id": 2, "top_k": 3}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert special_ids(tmp_path) == {"bos_token_id": 2, "eos_token_id": 4, "pad_token_id": None}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json is not a JSON object"):
        special_ids(tmp_path)
