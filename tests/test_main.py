"""What a person sees who types something wrong: one sentence, status 2, and everything as it was."""

import errno
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest

from tests.train_helpers import ROOT, compile_once, snapshot, write_run
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig, load_config, to_dict
from zaya_jax.data.loading.text_corpus import open_corpus
from zaya_jax.errors import InputError, RunStopped, Superseded
from zaya_jax.job import process as process_module
from zaya_jax.main import main
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import claim_run, lock_folder, lock_run
from zaya_jax.run.status import read_status, track_status
from zaya_jax.train import fit


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    compile_once(monkeypatch)


def refused(capsys, folder, *arguments):
    """The sentence that `main` says; whatever was in `folder` is as it was."""
    before = snapshot(folder)
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    sentence = err.splitlines()[-1]
    assert sentence.startswith("Error: ")
    assert sentence.endswith(".")
    assert [line for line in err.splitlines()[:-1] if not line.startswith("data: ")] == []
    assert "Traceback" not in err
    assert out == ""
    after = snapshot(folder)
    assert before == {name: after.get(name, "gone") for name in before}
    return sentence


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.hiden_size=3", ["model.hiden_size", "model.hidden_size"]),
        ("phases.0.tokens=many", ["phases.train.tokens", "'many'"]),
        ("train.batch.micro_batch=3", ["train.batch.micro_batch", "3", "phases.train"]),
        ("data.context=65", ["data.context", "65", "model.max_positions"]),
        ("model.vocab_size=200", ["model.vocab_size"]),
        ("steps", ["'steps'", "section.key=value"]),
        ("sample.prompt=" + "x" * 64, ["sample.prompt"]),
        ("data.corpus=/missing", ["data.corpus", "/missing"]),
    ],
)
def test_a_wrong_value_is_named_before_anything_is_made(tmp_path, capsys, override, named):
    path = write_run(tmp_path)
    sentence = refused(capsys, tmp_path, "--config", path, override)
    assert all(text in sentence for text in named), sentence
    assert not list((tmp_path / "run").glob("*.jsonl"))


def test_files_that_are_missing_empty_or_not_text_are_named(tmp_path, capsys):
    path, bad = write_run(tmp_path), tmp_path / "corpus" / "3.txt"
    for missing in (["--config", tmp_path / "no.yaml"], [tmp_path / "no.yaml", "seed=1"], [tmp_path / "no"]):
        assert str(tmp_path / "no") in refused(capsys, tmp_path, *missing)
    (tmp_path / "empty").mkdir()
    assert ".txt" in refused(capsys, tmp_path, "--config", path, f"data.corpus={tmp_path / 'empty'}")
    for key in ("run_dir", "data.cache_dir"):  # a file where a folder should be
        sentence = refused(capsys, tmp_path, "--config", path, f"run_dir={tmp_path / key}", f"{key}={path}")
        assert key in sentence
        assert str(path) in sentence
    bad.write_bytes(b"fine until \xff")
    assert f"{bad} is not UTF-8: the byte at offset 11" in refused(capsys, tmp_path, "--config", path)


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_a_damaged_shard(tmp_path, capsys, damage):
    path = write_run(tmp_path)
    shard = next(open_corpus(load_config(path))[0].glob("train-*.arrayrecord"))
    content = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(content[:-7] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    sentence = refused(capsys, tmp_path, "--config", path)
    assert f"The data file {shard} " in sentence
    assert f"Delete the folder {shard.parent}" in sentence


def test_a_checkpoint_of_another_architecture(tmp_path, capsys):
    path = write_run(tmp_path)
    config = load_config(path)
    with lock_run(config) as folder, CheckpointStore(folder / CHECKPOINTS, CheckpointConfig()) as store:
        claim_run(folder, config)
        tree = to_dict(config)
        other = {**tree, "model": {**tree["model"], "hidden_size": 8}}
        store.save(3, {"x": jnp.ones(1)}, {"config": other})
    assert "model.hidden_size=8 (this configuration has 16)" in refused(capsys, tmp_path, "--config", path)


def test_a_folder_of_another_run(tmp_path, capsys):
    path = write_run(tmp_path)
    with lock_run(load_config(path)) as folder:
        claim_run(folder, load_config(path))
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        assert "is in use by another process" in refused(capsys, tmp_path, "--config", path)
    assert "seed was 0 and is now 3" in refused(capsys, tmp_path, "--config", path, "seed=3")
    (folder / "config.yaml").unlink()
    assert "contains metrics.jsonl but no config.yaml" in refused(capsys, tmp_path, "--config", path)


# --- what goes well, or stops ----------------------------------------------------------------------------------


def test_the_printed_configuration_is_one_that_prints_itself(tmp_path, capsys):
    path = write_run(tmp_path)
    before = snapshot(tmp_path)
    assert main(["--config", str(path), "--print-config", "phases.0.tokens=896", "optimizer.adamw.eps=1e-9"]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    assert snapshot(tmp_path) == before
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert load_config(again) == load_config(path, ["phases.0.tokens=896", "optimizer.adamw.eps=1e-9"])
    assert main(["--config", str(again), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RunStopped("Three steps failed."), 1, "Stopped: Three steps failed.\n"),
        (InputError("A file is bad."), 2, "Error: A file is bad.\n"),
        (Superseded("Others train on."), 3, "Stopped: Others train on.\n"),
        (KeyboardInterrupt(), 130, "Stopped by Ctrl-C.\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "a/b"),
            1,
            "Stopped: a/b: No space left on device. Free some space, then rerun the command.\n",
        ),
    ],
)
def test_each_way_to_stop_has_its_status(tmp_path, monkeypatch, capsys, error, status, message):
    def stop(*_):
        raise error

    monkeypatch.setattr(fit, "run_training", stop)
    assert main(["--config", str(write_run(tmp_path))]) == status
    assert capsys.readouterr().err == message


def test_an_exit_at_once_is_in_the_status_of_the_run(tmp_path, monkeypatch):
    process = process_module.TrainingProcess()
    process.run_dir = str(tmp_path)
    monkeypatch.setattr(process_module, "say_and_exit", lambda sentence, status: None)
    with lock_folder(tmp_path), track_status(tmp_path):
        process.stop(signal.SIGINT)
        stopped = read_status(tmp_path)
    assert stopped is not None
    assert (stopped.state, stopped.exit_status) == ("stopped", 130)
    assert stopped.message.startswith("Stopped by Ctrl-C. ")


def test_a_defect_is_not_taken_for_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "run_training", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["--config", str(write_run(tmp_path))])


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "zaya_jax.main", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_the_process_ends_with_the_status(tmp_path):
    path = write_run(tmp_path)
    done = run("--config", path, "model.hiden_size=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: ")
    assert "model.hiden_size" in done.stderr
    assert done.stderr.count("\n") == 1
    assert run().returncode == 2
    assert "--config" in run("--help").stdout


def test_what_is_said_without_training_needs_no_jax(tmp_path):
    code = (
        "import sys, zaya_jax.main as m; status = m.main(sys.argv[1:]); "
        "print(status, sorted({'jax', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    for extra, status in (("--print-config", 0), ("phases.0.tokens=no", 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, "--config", write_run(tmp_path), extra], cwd=ROOT, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stderr.splitlines()[-1] == f"{status} []"
