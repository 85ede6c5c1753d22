"""One name for all commands: each runs its module with the same arguments, in the same process."""

import importlib
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[1]


@given(st.sampled_from(list(COMMANDS)), st.lists(st.text(max_size=9), max_size=4))
def test_a_command_is_its_module_with_the_same_arguments(command, rest):
    called = []
    assert main([command, *rest], lambda *given_: called.append(given_)) == 0
    ((program, arguments, _),) = called
    # Whether the current folder counts depends on how the tests were started.
    assert (program, [arguments[0], *arguments[1 + (arguments[1] == "-P") :]]) == (
        sys.executable, [sys.executable, "-m", *COMMANDS[command][0], *rest])  # fmt: skip


def test_every_room_with_a_command_is_listed():
    rooms = {f"zaya_jax.{path.parent.name}" for path in ROOT.glob("zaya_jax/*/__main__.py")} | {"zaya_jax.main"}
    assert {module for (module, *_), _ in COMMANDS.values()} == rooms
    assert all(importlib.util.find_spec(room) for room in rooms)


@pytest.mark.parametrize("asked", [[], ["--help"], ["-h"]])
def test_the_help_names_every_command(asked, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zaya", *asked])
    assert main() == 0
    output = capsys.readouterr().out
    assert all(f"\n  {name}" in output and summary in output for name, (_, summary) in COMMANDS.items())


def test_an_unknown_command_is_told_with_the_nearest(capsys):
    assert main(["trian"]) == 2
    output = capsys.readouterr().err
    assert output.startswith("Error: zaya has no command 'trian'. Did you mean train? Its commands are train, data")
    assert main(["xyzzy"]) == 2
    assert "mean" not in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zaya_jax {version('zaya_jax')}\n"


@pytest.mark.parametrize(("arguments", "message"), [
    (["train", "seed=1"], "the configuration is missing; add its file, such as configs/tiny.yaml"),
    (["train", "a.yaml", "seed=1", "b.yml"], "2 configurations are named (a.yaml, b.yml); name one"),
    (["train", "--config", "a.yaml", "seed=1", "--config", "a.yaml"], "2 configurations are named (a.yaml, a.yaml)"),
    (["train", "--config", "configs/tiny.yaml", "--dyr-run"], "arguments: --dyr-run. Did you mean --dry-run?"),
    (["train", "--config", "configs/tiny.yaml", "--run_dir=a"], "An override has no dashes: run_dir=VALUE."),
    (["train", "--config", "configs/tiny.yaml", "--model.num_layers", "2"], "no dashes: model.num_layers=VALUE."),
    (["train", "--config", "configs/tiny.yaml", "--preset=cpu"], "no dashes: preset=VALUE."),
    (["data", "prepar"], "Did you mean prepare?"),
    (["generate", "runs/tiny", "--promt", "def "], "Did you mean --prompt?"),
    (["data", "prepare", "--input", "a", "--tokenizer", "b", "--output", "c", "--wrkers=1"], "Did you mean --workers?"),
])  # fmt: skip
def test_a_misspelled_command_line_is_told_with_what_was_meant(arguments, message, capsys):
    command, *rest = arguments
    module = importlib.import_module({"train": "zaya_jax.main"}.get(command, f"zaya_jax.{command}.__main__"))
    with pytest.raises(SystemExit, match="2"):
        module.main(rest)
    assert message in capsys.readouterr().err


def test_how_to_write_a_path_that_begins_with_a_dash_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-x").mkdir()
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("zaya_jax.report.__main__").main(["-x"])
    assert "A path that begins with - is written ./-x." in capsys.readouterr().err


def test_the_exit_status_and_the_message_are_those_of_the_command():
    done = subprocess.run([sys.executable, "-m", "zaya_jax", "train", "--config", "no_such.yaml"], cwd=ROOT, text=True,
                          capture_output=True, check=False, env=dict(os.environ))  # fmt: skip
    assert done.returncode == 2
    assert "no_such.yaml" in done.stderr
