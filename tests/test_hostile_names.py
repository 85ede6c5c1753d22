"""Every command that takes a path works with any file name, and writes only to the paths in its arguments."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.hostile_names import HOSTILE_NAMES
from tests.path_commands import FORMS, Commands, end, train_and_resume, use_data, use_weights, write_inputs
from tests.train_helpers import compute_little

NAMES = st.lists(HOSTILE_NAMES, min_size=30, max_size=30)  # as many as kinds of paths
EVERYTHING = ["?#%41 |\\é\udcff\n\x1b[31m<b>&[b]"]


def try_all(names, form, *parts):
    with tempfile.TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        compute_little(patch)
        commands = Commands(Path(base).resolve(), names, form)
        keys = write_inputs(commands)
        for part in parts:
            part(commands, keys)
        commands.check_folders()


@given(NAMES, st.sampled_from(list(FORMS)))
@example(EVERYTHING, "whole")
@example(["é" * 127], "slash")
@settings(max_examples=1)
def test_a_run_is_trained_resumed_verified_exported_and_reported_under_any_name(names, form):
    try_all(names, form, train_and_resume)


@pytest.mark.soak
@given(NAMES, st.sampled_from(list(FORMS)))
@example(EVERYTHING, "relative")
@example(["é" * 127], "whole")
@example(["hf:a@train"], "slash")
@example(["-~'\"$`,=: #"], "up")
def test_every_command_takes_any_names(names, form):
    try_all(names, form, train_and_resume, use_weights, use_data, end)
