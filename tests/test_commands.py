"""One name for all commands: each runs its module with the same arguments, in the same process."""

import importlib.util
import os
import subprocess
import sys
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
    assert called == [(sys.executable, [sys.executable, "-m", *COMMANDS[command][0], *rest])]


def test_every_room_with_a_command_is_listed():
    rooms = {f"zaya_jax.{path.parent.name}" for path in ROOT.glob("zaya_jax/*/__main__.py")} | {"zaya_jax.main"}
    assert {module for (module, *_), _ in COMMANDS.values()} == rooms
    assert all(importlib.util.find_spec(room) for room in rooms)


@pytest.mark.parametrize("asked", [[], ["--help"], ["-h"]])
def test_the_help_names_every_command(asked, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zaya", *asked])
    assert main() == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name}" in said and summary in said for name, (_, summary) in COMMANDS.items())


def test_an_unknown_command_is_told_with_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "no command 'trian'. Did you mean train? Its commands are train, data" in capsys.readouterr().err
    assert main(["xyzzy"]) == 2
    assert "mean" not in capsys.readouterr().err


def test_the_exit_status_and_the_message_are_those_of_the_command():
    done = subprocess.run([sys.executable, "-m", "zaya_jax", "train", "--config", "no_such.yaml"], cwd=ROOT, text=True,
                          capture_output=True, check=False, env=dict(os.environ))  # fmt: skip
    assert done.returncode == 2
    assert "no_such.yaml" in done.stderr
