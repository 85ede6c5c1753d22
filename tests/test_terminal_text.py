"""No text of a file steers the terminal that shows it: escapes in every string of a run reach no stream."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.devices_helpers import ROOT
from tests.streams_helpers import Call, run, run_forked
from tests.train_helpers import compute_little, small_run
from zaya_jax.errors import visible
from zaya_jax.train.fit import run_training

PLANTED = "\x1b]0;title\x07\x1b[2J\x1b[31m\r\n\x9b1m\u202e\u2066\u2028\x7f[red]<b>"
STEERS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and one under a supervisor."""
    folder = tmp_path_factory.mktemp("terminal")
    with pytest.MonkeyPatch.context() as patch:
        compute_little(patch)
        run_training(small_run(folder, "sample.tokens=0"))
    done = run(Call("zaya_jax.aegis", ["run", "--run-dir", str(folder / "run"), "--", "sh", "-c", "exit 2"]))
    assert "Traceback" not in done.err
    return folder


def plant(value):
    """Return a tree with what steers a terminal at the end of each string."""
    if isinstance(value, dict):
        return {key: plant(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plant(each) for each in value]
    return value + PLANTED if isinstance(value, str) else value


def plant_in_file(path):
    text = path.read_text()
    if path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(plant(yaml.safe_load(text)), allow_unicode=True))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(plant(json.loads(line))) + "\n" for line in text.splitlines()))
    else:
        path.write_text(json.dumps(plant(json.loads(text))))


def calls(folder):
    run_dir, config = str(folder / "run"), str(folder / "run.yaml")
    newest = max((folder / "run" / "checkpoints").iterdir(), key=lambda path: path.name)
    lines = [("checkpoint", "ls", run_dir), ("checkpoint", "inspect", run_dir), ("checkpoint", "verify", run_dir),
             ("checkpoint", "diff", run_dir, str(newest)), ("checkpoint", "verify", run_dir, "--all"),
             ("aegis", "status", run_dir), ("aegis", "report", run_dir), ("data", "describe", config),
             ("report", run_dir, "--output", str(folder / "report.html")),
             ("main", "--config", f"{run_dir}/config.yaml", "--print-config"),
             ("evaluate", run_dir, "--output", str(folder / "scores.json"))]  # fmt: skip
    return [Call(f"zaya_jax.{module}", arguments) for module, *arguments in lines]


def files(folder):
    return sorted(path for kind in ("json", "jsonl", "yaml") for path in folder.rglob(f"*.{kind}")
                  if "aegis" in path.parts or "cache" not in path.parts)  # fmt: skip


def check(outcomes):
    for call, outcome in outcomes:
        result = STEERS.search(outcome.out + outcome.err)
        assert not result, (call, outcome.out + outcome.err)
        assert "Traceback" not in outcome.err, (call, outcome.err)


def test_a_run_whose_files_all_steer_terminals_is_shown_without_a_control(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "all", symlinks=True)
    planted = [path for path in files(tmp_path / "all" / "run") if path.name not in {"config.yaml", "_METADATA"}]
    assert len(planted) > 4
    for path in planted:
        plant_in_file(path)
    called = calls(tmp_path / "all")
    outcomes = list(zip(called, run_forked(called), strict=True))
    check(outcomes)
    assert any(r"\x1b]0;title\x07" in outcome.out + outcome.err for _, outcome in outcomes)


@pytest.mark.soak
def test_each_file_of_a_run_that_steers_terminals_is_shown_without_a_control(folder, tmp_path):
    paths = [path.relative_to(folder) for path in files(folder)]
    called = []
    for number, path in enumerate(paths):
        shutil.copytree(folder, tmp_path / str(number), symlinks=True)
        plant_in_file(tmp_path / str(number) / path)
        called += calls(tmp_path / str(number))
    check(zip(called, run_forked(called), strict=True))


def test_on_a_terminal_only_our_own_colours_steer_it(tmp_path):
    name = tmp_path / f"a{PLANTED[:4]}\x1b[2Jb.txt"
    name.write_text("text")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "zaya_jax.data", "prepare", "--input", str(name), "--tokenizer", str(name),
               "--output", str(tmp_path / "out")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdout=theirs, stderr=theirs, check=False)
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert done.returncode == 2
    assert "\x1b" not in shown
    assert r"\x1b[2Jb.txt" in shown


@given(st.text())
def test_what_is_visible_steers_nothing_and_keeps_all_else(text):
    shown = visible(text)
    assert not STEERS.search(shown.replace("\t", ""))
    assert visible(shown) == shown
    assert shown == text or STEERS.search(text)


def test_generated_text_reaches_a_file_as_it_is_and_a_terminal_escaped():
    code = ("import sys; from zaya_jax.run.command_output import Unescaped, prepare_streams; prepare_streams(); "
            r"print('a\x1b[31m\u202e\r'); print('b\x1b\r', file=Unescaped(sys.stdout), flush=True)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.decode() == "a\\x1b[31m\\u202e\\r\nb\x1b\r\n"
