"""What XLA chose is read back by a run that resumes on the same kind of device, and by no other."""

import jax
import jaxlib.version
import pytest

from zaya_jax.errors import Superseded
from zaya_jax.train import autotuning
from zaya_jax.train.autotuning import FILE, Autotuning

CHOICES = "version: 3\nresults { hlo: 'a' }\n"
ORIGIN = f"# jaxlib {jaxlib.version.__version__}, {jax.devices()[0].device_kind}\n"


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that chooses: XLA's for CPUs takes the options, but reads and writes nothing."""
    state = {"chosen": CHOICES, "read": []}

    def compile_nothing(_, option, path):
        if option.startswith("xla_gpu_load"):
            state["read"].append(path.read_text())
        elif state["chosen"]:
            path.write_text(state["chosen"])

    monkeypatch.setattr(Autotuning, "_compile", compile_nothing)
    return state


def make(folder, messages=None, *, is_kept=True, writes=True, check=lambda: None):
    return Autotuning(folder, is_kept, writes, check, (messages if messages is not None else []).append)


def test_a_resumed_run_reads_what_was_chosen(compiler, tmp_path):
    make(tmp_path).write()
    assert (tmp_path / FILE).read_text() == ORIGIN + CHOICES
    resumed = make(tmp_path, writes=False)
    assert compiler["read"] == [ORIGIN + CHOICES]
    compiler["chosen"] = CHOICES + "results { hlo: 'b' }\n"
    resumed.write()
    assert (tmp_path / FILE).read_text() == ORIGIN + CHOICES, "this process does not write"
    resumed = make(tmp_path)
    resumed.write()
    assert (tmp_path / FILE).read_text() == ORIGIN + compiler["chosen"]


def test_choices_are_never_lost_to_a_process_that_compiled_less(compiler, tmp_path):
    make(tmp_path).write()
    for compiler["chosen"] in ("version: 3\n", ""):
        make(tmp_path).write()
        assert (tmp_path / FILE).read_text() == ORIGIN + CHOICES


@pytest.mark.parametrize("first", ["# jaxlib 0.0.1, NVIDIA H200\n", "\x1b[31m", "\udc80"])
def test_choices_of_another_device_or_version_are_left_and_said(compiler, tmp_path, first):
    (tmp_path / FILE).write_text(first + CHOICES, errors="surrogateescape")
    messages = []
    make(tmp_path, messages)
    assert compiler["read"] == []
    assert "results may differ in their last bits" in messages[0]


def test_nothing_is_read_or_written_where_nothing_is_chosen(compiler, tmp_path):
    make(tmp_path).write()
    make(tmp_path, is_kept=False)
    assert compiler["read"] == []
    compiler["chosen"] += "more"
    make(tmp_path, is_kept=False).write()
    assert (tmp_path / FILE).read_text() == ORIGIN + CHOICES


def test_a_superseded_process_writes_no_choices(compiler, tmp_path):
    def check():
        raise Superseded("Other processes have resumed this run.")

    with pytest.raises(Superseded):
        make(tmp_path, check=check).write()
    assert not (tmp_path / FILE).exists()


def test_xla_takes_the_options_and_an_option_that_it_does_not_have_is_said(tmp_path, monkeypatch):
    messages = []
    kept = make(tmp_path, messages)
    kept.write()
    assert messages == []
    assert list(tmp_path.iterdir()) == [], "the compiler for CPUs chooses nothing"
    monkeypatch.setattr(autotuning, "_WRITE", "xla_gpu_no_such_option")
    kept.write()
    assert "are not kept with the run" in messages[0]


def test_a_folder_that_cannot_be_written_is_said(compiler, tmp_path):
    messages = []
    kept = make(tmp_path / FILE, messages)
    (tmp_path / FILE).write_text("a file, not a folder")
    kept.write()
    assert "cannot be written" in messages[0]
