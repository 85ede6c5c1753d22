"""`python -m zaya_jax.evaluate` on a run, on text files and on bad input; lm-eval's tasks are in tests/parity."""

import errno
import functools
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trained_helpers import trained_run
from zaya_jax.evaluate import heldout_run
from zaya_jax.evaluate.__main__ import main
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import read_rows
from zaya_jax.weights.load import load_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run, what training returned, and an export."""
    folder, result, export = trained_run(tmp_path_factory.getbasetemp())
    return Path(shutil.copytree(folder, tmp_path_factory.mktemp("evaluate") / "run")), result, export


@pytest.fixture(autouse=True)
def compile_once(monkeypatch):
    monkeypatch.setattr(heldout_run, "_program", _program)


_program = functools.cache(heldout_run._program)


def test_the_heldout_loss_is_what_training_recorded(run, capsys):
    folder, result, _ = run
    assert main([f"{folder}@train"]) == 0
    assert "corpus " in capsys.readouterr().out
    record = json.loads((folder / "evaluations" / "heldout-12.json").read_text())
    (row,) = [row for row in read_rows(folder / METRICS) if row["step"] == 12]
    loss = record["heldout"]["corpus"]
    assert loss["nats_per_token"] == pytest.approx(row["heldout_loss"], rel=1e-6)
    assert loss["perplexity"] == pytest.approx(math.exp(row["heldout_loss"]), rel=1e-5)
    assert loss["tokens"] == result.heldout.tokens
    assert loss["bits_per_byte"] == pytest.approx(result.heldout.bits_per_byte(loss["bytes"]), rel=1e-6)
    assert record["step"] == 12
    assert {"jax", "device", "cpu"} <= record["environment"].keys()
    assert {"zaya-jax", "numpy"} <= record["versions"].keys()
    assert main([str(folder), "--follow"]) == 0
    (followed,) = (row for row in read_rows(folder / "evaluations" / "heldout.jsonl") if row["step"] == 12)
    assert followed["heldout"] == record["heldout"]


def test_texts_are_scored_alike_in_a_run_and_in_its_export(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _, export = run
    text = "the model reads one token, then writes another. " * 9
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("é", encoding="utf-8")
    records = []
    for path in (folder, f"hf:{export}"):
        output = tmp_path / "out" / "scores.json"
        files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
        assert main([str(path), "--text", *files, "--output", str(output), "--batch-tokens", "128"]) == 0
        assert "Wrote out/scores.json" in capsys.readouterr().out
        records.append(json.loads(output.read_text()))
    assert records[0]["fingerprint"] == records[1]["fingerprint"]
    assert records[0]["dtype"] == "float32"
    long, short = (records[0]["texts"][file] for file in files)
    _, tokenizer = load_model(folder)
    assert tokenizer is not None
    assert (long["tokens"], long["bytes"]) == (len(tokenizer.encode(text)), len(text))
    assert short["bytes"] == 2
    assert long["bits_per_byte"] == pytest.approx(long["nats_per_token"] * long["tokens"] / math.log(2) / len(text))
    assert records[1]["texts"] == records[0]["texts"]


def test_training_and_text_need_no_lm_eval():
    code = (
        "import sys; sys.modules['lm_eval'] = None; import zaya_jax.train.fit, zaya_jax.evaluate.evaluate_command; "
        "print('datasets' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "PATH is 'nowhere'"),
        (["RUN@phase"], "finished phases"),
        (["EXPORT"], "has no held-out data"),
        (["RUN", "--text", "nowhere.txt"], "--text nowhere.txt cannot be read"),
        (["RUN", "--text", "EMPTY"], "is empty"),
        (["RUN", "--text", "EMPTY/x"], "cannot be read: No such file or directory."),
        (["RUN", "--text", "/"], "--text / cannot be read: Is a directory."),
        (["RUN", "--tasks", "a", "--config", "b"], "--tasks and --config"),
        (["RUN", "--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["RUN", "--tasks", "a,,b"], "--tasks is 'a,,b', but must be names of tasks"),
        (["RUN", "--tasks", "a,b,a"], "--tasks is 'a,b,a', but must be names of tasks"),
        (["RUN", "--limit", "3"], "--limit is only for tasks"),
        (["RUN", "--seed", "0"], "--seed is only for tasks"),
        (["RUN", "--text", "TEXT", "--batch-rows", "2"], "--batch-rows is only for tasks"),
        (["RUN", "--dtype", "float32"], "--dtype is only for tasks and texts"),
        (["RUN", "--tokenizer", "RUN"], "--tokenizer is only for tasks and texts"),
        (["RUN", "--batch-tokens", "9"], "--batch-tokens is only for tasks and texts"),
        (["RUN", "--peer", "hf:x"], "--peer is only for tasks"),
        (["RUN", "--run-generated-code"], "--run-generated-code is only for tasks"),
        (["RUN", "--tasks", "a", "--limit", "0"], "--limit is 0"),
        (["RUN", "--batch-tokens", "0"], "--batch-tokens is 0"),
        (["RUN", "--tasks", "a", "--peer", "hf:x", "--follow"], "--peer does not go with --follow"),
        (["nowhere", "--follow"], "is not a folder"),
        (["EXPORT", "--follow"], "has files but no run"),
        (["RUN", "--output", "RUN"], "The scores cannot be written to"),
        (["RUN", "--process", "1"], "must be given together"),
        (["DAMAGED"], "DAMAGED"),
        (["RUN", "--text", "TEXT", "--tokenizer", "LARGE"], "more than model.vocab_size"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, message, capsys, tmp_path):
    folder, _, export = run
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "TEXT").write_text("the model")
    names = {"RUN": folder, "EXPORT": export} | {
        name: tmp_path / name for name in ("EMPTY", "TEXT", "DAMAGED", "LARGE")
    }
    if "DAMAGED" in arguments:
        damage(folder, tmp_path / "DAMAGED")
    if "LARGE" in arguments:
        enlarge(export, tmp_path / "LARGE")
    paths = [str(names.get(text.partition("@")[0], text)) + "".join(text.partition("@")[1:]) for text in arguments]
    assert main(paths) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("Error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_each_evaluation_has_a_file_that_others_do_not_overwrite(run, tmp_path, monkeypatch):
    folder, _, export = run
    scored = []

    def score(options, subject, tasks, texts, heldout):
        scored.append((options.dtype, options.tokenizer))
        return {"model": subject.source, "step": subject.step, "texts": {}}

    monkeypatch.setattr("zaya_jax.evaluate.evaluate_command._score", score)
    (tmp_path / "a.txt").write_text("the model")
    text = ["--text", str(tmp_path / "a.txt")]
    variants = [text, [*text, "--dtype", "bfloat16"], [*text, "--tokenizer", str(export)]]
    for arguments in (*variants, text):
        assert main([str(folder), *arguments]) == 0
    assert scored == [(None, None), ("bfloat16", None), (None, str(export)), (None, None)]
    files = list((folder / "evaluations").glob("text-*-12.json"))
    assert len(files) == len(variants)
    for _ in range(2):
        assert main([str(folder), *text, "--follow"]) == 0
    (path,) = (folder / "evaluations").glob("text-*.jsonl")
    rows = read_rows(path)
    assert [(row["name"], row["step"]) for row in rows] == [(path.stem, 10), (path.stem, 12)]
    assert f"{path.stem}-12.json" in {file.name for file in files}


def test_a_run_is_followed_by_one_process(run, capsys, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    assert main([str(run[0]), "--follow"]) == 2
    assert capsys.readouterr().err == (
        "Error: --follow runs in one process, but this job has 2. Start one process, or remove --follow.\n"
    )


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "x.json"), 2, "Error: x.json: Permission denied."),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "Stopped: .* Free some space"),
        (TimeoutError("Process 1 did not answer."), 1, "Stopped: Process 1 did not answer."),
    ],
)
def test_an_error_of_the_system_is_one_sentence(run, error, status, message, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr("zaya_jax.evaluate.evaluate_command._score", fail)
    assert main([str(run[0])]) == status
    assert re.match(message, capsys.readouterr().err)


def damage(run: Path, target: Path) -> None:
    """Copy a run, and change bytes everywhere in the largest file of its newest checkpoint."""
    shutil.copytree(run, target)
    largest = max((target / "checkpoints" / "12").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for place in range(50, len(content), 97):
        content[place] ^= 1
    largest.write_bytes(content)


def enlarge(export: Path, target: Path) -> None:
    """Copy a tokenizer with one token more than the model has."""
    target.mkdir()
    tree = json.loads((export / "tokenizer.json").read_text())
    tree["model"]["vocab"]["zzzz"] = 300
    (target / "tokenizer.json").write_text(json.dumps(tree))


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_tasks_without_lm_eval_name_the_command_that_installs_it(run, capsys):
    assert main([str(run[0]), "--tasks", "hellaswag"]) == 2
    assert "pip install 'zaya-jax[evaluation]'" in capsys.readouterr().err
