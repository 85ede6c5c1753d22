"""An I/O error is reported as such: the checkpoint is not called damaged, quarantined, replaced or skipped."""

import contextlib
import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.checkpoint.saved_helpers import save_run
from tests.checkpoint.test_store import ABOUT, make_state, newest, open_store, restored, save_all
from zaya_jax.checkpoint import reader
from zaya_jax.checkpoint.__main__ import main
from zaya_jax.errors import ExitCode, InputError, Reason, exit_message, exit_reason
from zaya_jax.run.checkpoints import checkpoint_folder, has_checkpoint, list_checkpoints, named_steps, saved_steps
from zaya_jax.run.manifest import Damaged, Unreadable


def manifest_file(folder):
    return next(folder.glob("manifest-*"))


PLACES = {
    "manifest": manifest_file,
    "digests": lambda folder: folder / "digests" / "process_0.json",
    "index": lambda folder: folder / "state" / "manifest.ocdbt",
    "checkpoint": lambda folder: folder,
}


@contextlib.contextmanager
def looped(path):
    """A path that leads to itself (`ELOOP`) in place of a file or folder, which comes back at the end."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(path)
    yield
    path.unlink()
    aside.rename(path)


@contextlib.contextmanager
def without_descriptors():
    """No file can be opened (`EMFILE`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def as_stranger(folder):
    """Another user than the owner of `folder`, which only its owner may enter (`EACCES`)."""
    user = os.geteuid()
    folder.chmod(0o700 if user == 0 else 0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(reader, "_PAUSES", (0.0, 0.0))


@pytest.mark.parametrize("place", PLACES)
def test_restoring_what_cannot_be_read_fails_with_the_reason_and_changes_nothing(tmp_path, place):
    save_all(tmp_path, [1, 2])
    messages = []
    with looped(PLACES[place](tmp_path / "2")):
        before = sorted(os.listdir(tmp_path))
        with pytest.raises((InputError, OSError), match="symbolic links"):
            newest(tmp_path, messages)
        assert sorted(os.listdir(tmp_path)) == before
        with open_store(tmp_path, messages) as store:  # nor is its step saved over it
            store.take_over(2)
            store.save(2, make_state(2), ABOUT)
        assert sorted(os.listdir(tmp_path)) == before
    assert not any("quarantined" in sentence for sentence in messages)
    assert newest(tmp_path)[0] == 2


def test_a_process_without_descriptors_quarantines_nothing(tmp_path, no_pauses):
    save_all(tmp_path, [1, 2])
    with without_descriptors(), pytest.raises((InputError, OSError), match="open files"):
        newest(tmp_path)
    assert newest(tmp_path)[0] == 2


def test_a_folder_that_may_not_be_listed_is_not_taken_for_an_empty_one():
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)  # noqa: S103 (which the stranger passes)
        folder = Path(base) / "checkpoints"
        save_all(folder, [1])
        for look in (named_steps, has_checkpoint, saved_steps):
            with as_stranger(folder), pytest.raises(PermissionError):
                look(folder)
        folder.chmod(0o755)
        with as_stranger(folder / "1"):  # its name tells that it is finished
            assert saved_steps(folder) == [1]


def test_an_older_checkpoint_that_cannot_be_read_for_a_while_stays_current(tmp_path):
    save_all(tmp_path, [1, 2], keep=5)
    with looped(manifest_file(tmp_path / "1")), open_store(tmp_path, keep=5) as store:
        assert restored(store, make_state())[0] == 2
        store.take_over(2)
        store.save(3, make_state(3), ABOUT)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path) if checkpoint.is_usable] == [1, 2, 3]


def test_an_error_that_passes_is_waited_for(tmp_path, monkeypatch):
    save_all(tmp_path, [1])
    file = manifest_file(tmp_path / "1")
    content = file.read_bytes()
    file.unlink()
    file.symlink_to("/proc/self/mem")  # whose first bytes the system refuses to read (`EIO`)

    def wait(seconds):
        file.unlink()
        file.write_bytes(content)

    monkeypatch.setattr(reader.time, "sleep", wait)
    assert newest(tmp_path)[0] == 1


def test_commands_tell_unreadable_from_damaged(tmp_path, capsys, no_pauses):
    run = save_run(tmp_path / "run", [1, 2, 3])
    os.truncate(manifest_file(run / "checkpoints" / "1"), 9)
    with looped(manifest_file(run / "checkpoints" / "2")):
        assert main(["ls", str(run)]) == 0
        first, second, _ = capsys.readouterr().out.splitlines()[1:4]
        assert "  damaged: " in first
        assert "  unreadable: " in second
        assert main(["verify", str(run / "checkpoints" / "2")]) == 1
        assert "Too many levels of symbolic links. The checkpoint may be intact." in capsys.readouterr().out
        assert main(["verify", "--all", str(run)]) == 1
        verified = capsys.readouterr().out.splitlines()
        assert ["OK, " in line for line in verified] == [False, False, True]


def test_nothing_is_pruned_while_it_is_unknown_which_checkpoints_end_phases(tmp_path, capsys):
    run = save_run(tmp_path / "run", [1, 2, 3])
    (run / "phases.json").mkdir()
    assert main(["prune", str(run), "--keep", "1"]) == 2
    assert "phases.json" in capsys.readouterr().err
    assert saved_steps(run / "checkpoints") == [1, 2, 3]


def test_a_checkpoint_whose_folder_vanishes_is_not_called_damaged(tmp_path, no_pauses):
    save_all(tmp_path, [1])
    manifest = reader.read_manifest(tmp_path / "1")
    opened = reader.CheckpointReader(tmp_path / "1", manifest.leaves, manifest.files)
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(reader.Unreadable, match="may be intact"):
        opened.read("params.blocks.0.query")


def test_what_could_not_be_read_may_be_tried_again_by_a_supervisor():
    assert exit_message(Unreadable("It says no.")) == ("Stopped: It says no.", ExitCode.STOPPED)
    assert exit_message(Damaged("It is cut.")) == ("Error: It is cut.", ExitCode.BAD_INPUT)


def test_a_link_whose_target_is_gone_is_no_damage_and_no_new_run(tmp_path, capsys):
    run = save_run(tmp_path / "run", [1, 2])
    (run / "checkpoints" / "2").rename(tmp_path / "elsewhere")
    (run / "checkpoints" / "2").symlink_to(tmp_path / "unmounted")
    assert main(["ls", str(run)]) == 0
    assert "the target of this link is gone. The checkpoint may be intact." in capsys.readouterr().out
    (run / "checkpoints").rename(tmp_path / "all")
    (run / "checkpoints").symlink_to(tmp_path / "unmounted")
    with pytest.raises(OSError, match="the target of this link is gone"):
        has_checkpoint(run / "checkpoints")


def test_a_newest_checkpoint_that_is_not_used_is_said(tmp_path, capsys):
    run = save_run(tmp_path / "run", [1, 2])
    assert checkpoint_folder(str(run)).name == "2"
    assert capsys.readouterr().err == ""
    with looped(manifest_file(run / "checkpoints" / "2")):
        assert checkpoint_folder(str(run)).name == "1"
    output = capsys.readouterr().err
    assert output.startswith("Warning: the newest checkpoint is not used, unreadable: ")
    assert output.endswith("Step 1 is used.\n")


def test_resuming_from_what_cannot_be_read_may_be_tried_again(tmp_path, no_pauses):
    save_all(tmp_path / "checkpoints", [2])
    with looped(manifest_file(tmp_path / "checkpoints" / "2")), pytest.raises(Unreadable) as caught:
        restored(open_store(tmp_path / "checkpoints"), make_state())
    assert exit_reason(caught.value) is Reason.DISK  # which a supervisor lets repeat


def test_arrays_that_a_file_server_does_not_return_leave_the_reason_of_a_disk(tmp_path, monkeypatch, no_pauses):
    save_all(tmp_path / "checkpoints", [2])

    def read(self, name, index=()):  # as tensorstore raises it
        raise ValueError("Error reading local file [os_error_code='116']: OS error 116 Stale file handle")

    monkeypatch.setattr(reader.CheckpointReader, "_array", read)
    with pytest.raises(Unreadable) as caught:
        restored(open_store(tmp_path / "checkpoints"), make_state())
    assert exit_reason(caught.value) is Reason.DISK
