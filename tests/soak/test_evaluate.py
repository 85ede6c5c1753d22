"""Evaluation in processes of its own: next to a training that runs, and shared by two."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train_helpers import ROOT, run_tree, write_run
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import read_rows

pytestmark = pytest.mark.soak


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def said(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def test_a_training_that_runs_is_followed_to_its_end(tmp_path):
    config, run = write_run(tmp_path), Path(run_tree(tmp_path)["run_dir"])
    run.mkdir()
    follower = start("zaya_jax.evaluate", "--follow", str(run))
    overrides = ["checkpoint.keep=3", "evaluation.every=5", "phases.0.tokens=7680"]
    trainer = start("zaya_jax.main", "--config", str(config), *overrides)
    said(trainer)
    printed = said(follower)
    rows = read_rows(run / "evaluations" / "heldout.jsonl")
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert steps[-1] == 60
    recorded = {row["step"]: row["heldout_loss"] for row in read_rows(run / METRICS) if "heldout_loss" in row}
    for row in rows:
        assert row["heldout"]["corpus"]["nats_per_token"] == pytest.approx(recorded[row["step"]], rel=1e-6)
    assert f"the scores of {len(rows)} checkpoint" in printed
    said(start("zaya_jax.evaluate", "--follow", str(run)))
    assert read_rows(run / "evaluations" / "heldout.jsonl") == rows


def test_two_processes_score_what_one_does(tmp_path):
    config, run = write_run(tmp_path), run_tree(tmp_path)["run_dir"]
    said(start("zaya_jax.main", "--config", str(config)))
    files = [str(path) for path in sorted((tmp_path / "corpus").glob("*.txt"))]
    for what in ([], ["--text", *files]):
        records = []
        for count in (1, 2):
            output, job = tmp_path / f"{count}.json", ["--coordinator", f"127.0.0.1:{free_port()}", "--processes"]
            places = [[]] if count == 1 else [[*job, "2", "--process", str(index)] for index in range(count)]
            shared = [run, *what, "--output", str(output)]
            processes = [start("zaya_jax.evaluate", *shared, *place) for place in places]
            texts = [said(process) for process in processes]
            assert [f"Wrote {output}" in text for text in texts] == [True, False][:count]
            record = json.loads(output.read_text())
            records.append(record.get("heldout") or record["texts"])
        for name, scores in records[0].items():
            assert records[1][name] == pytest.approx(scores, rel=1e-6)
