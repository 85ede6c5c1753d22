"""Saving and training on a disk that fills, is freed, and cannot be written for a while: file systems in memory."""

import json
import re
import shutil
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.test_restore import data_file, flip
from tests.checkpoint.test_store import ABOUT, open_store
from tests.checkpoint.test_store import restored as newest_of
from tests.train.disk_helpers import full_for_a_while, full_while_training
from tests.train_helpers import ROOT
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.errors import InputError

SIZE = 4 * 2**20


def make_large(step):
    return {"x": jnp.arange(SIZE // 4, dtype=jnp.float32) + step, "step": jnp.int32(step)}


def restored(folder):
    """The step of the newest checkpoint, whose values are bitwise those that were saved."""
    step, state = newest_of(open_store(folder, []), make_large(0))
    assert all(np.array_equal(state[name], array) for name, array in make_large(step).items())
    return step


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(path, leave):
    """A file that leaves so many bytes of its file system free."""
    with path.open("wb") as file:
        while (free := shutil.disk_usage(path.parent).free) > leave:
            file.write(bytes(min(free - leave, 2**22)))
            file.flush()


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def saved_when_due(store, step):
    """Save as the training loop does: a save that failed is tried again once it is due."""
    while not store.due():
        step += 1
    store.save(step, make_large(step), ABOUT)
    return step if store.wait() else None


def disturbed(root):
    """Run with a small file system mounted at `root`, in one process because importing jax takes seconds.

    Gives what was said of saves while a smaller one was full, and while it was read-only; and what became of trainings.
    """
    small = root / "small"
    small.mkdir()
    mount(small, 40)
    return full_and_freed(small), read_only_for_a_while(small), full_while_training(root), full_for_a_while(root)


def mount(folder, megabytes):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)], check=True)


def full_and_freed(root):
    folder, ballast, messages = root / "full", root / "ballast", []
    with open_store(folder, messages, keep=1) as store:
        store.save(1, make_large(1), ABOUT)
        assert store.wait()
        fill(ballast, SIZE // 2)  # what is known before anything is written
        free = shutil.disk_usage(root).free
        store.save(2, make_large(2), ABOUT)
        assert not store.wait()
        assert names(folder) == ["1", "GENERATION"]
        assert restored(folder) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointStore, "_check_free_space", lambda *_: "")  # what fills while it is written
            assert saved_when_due(store, 10) is None
        assert names(folder) == ["1", "GENERATION"]
        assert restored(folder) == 1
        deadline = time.monotonic() + 60
        while shutil.disk_usage(root).free < free and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread of the failed save may still hold what was removed
        fill(ballast, 0)
        open_store(folder, told := []).take_over(1)
        assert "cannot be written: No space left on device. Training continues" in told[0]
        assert names(folder) == ["1", "GENERATION"]
        ballast.unlink()
        freed = saved_when_due(store, 20)
        assert freed is not None
        assert names(folder) == [str(freed), "GENERATION"]
    assert restored(folder) == freed
    return messages


def read_only_for_a_while(root):
    folder, messages = root / "read_only", []
    with open_store(folder, messages, keep=2) as store:
        for step in (1, 2):
            store.save(step, make_large(step), ABOUT)
        assert store.wait()
        remount(root, "ro")
        store.save(3, make_large(3), ABOUT)
        assert not store.wait()
        assert restored(folder) == 2
        remount(root, "rw")
        again = saved_when_due(store, 10)
    assert names(folder) == sorted(["2", str(again), "GENERATION"])
    flip(data_file(folder / str(again)), 100_000)
    remount(root, "ro")
    with pytest.raises(InputError, match=r"is damaged, but cannot be quarantined .*: Read-only file system"):
        restored(folder)
    remount(root, "rw")
    assert restored(folder) == 2
    return messages


def in_own_file_system(folder):
    """Call `disturbed` with a small file system mounted at `folder`; return its result."""
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(folder)], check=False,
                      capture_output=True).returncode:  # fmt: skip
        pytest.skip("This system lets a user mount no file system of their own (unshare -rm).")
    code = (f"import json; from pathlib import Path; from {__name__} import disturbed\n"
            f"from zaya_jax.checkpoint import store\nstore._RETRY = 0.2  # seconds, for 10\n"
            f"print(json.dumps(disturbed(Path({str(folder)!r}))))")  # fmt: skip
    command = 'mount -t tmpfs -o size=300m none "$1" && exec "$2" -c "$3"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "sh", str(folder), sys.executable, code],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What `disturbed` gives, and where."""
    folder = tmp_path_factory.mktemp("disk")
    return folder, *in_own_file_system(folder)


def test_a_disk_that_is_full_costs_no_checkpoint_and_saving_recovers_when_it_is_freed(done):
    _, messages, *_ = done
    assert "bytes free, but" in messages[0]
    assert "could not be saved" in messages[1]
    assert messages[-1].endswith("is saved.")


def test_a_folder_that_is_read_only_for_a_while_is_written_again(done):
    _, _, messages, *_ = done
    assert "Read-only file system. Training continues; the newest checkpoint is that of step 2" in messages[0]
    assert messages[-1].endswith("is saved.")


def test_a_full_disk_is_one_warning_of_a_training_and_everything_is_written_when_there_is_room(done):
    folder, _, _, runs, _ = done
    undisturbed = runs["whole"][1]
    assert len(undisturbed["metrics"].splitlines()) == 12
    for name in ("freed", "again"):
        assert runs[name][1] == undisturbed, name

    messages = runs["freed"][0]
    warnings = [line for line in messages if line.endswith("until the disk accepts them.")]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{folder}/freed/metrics.jsonl cannot be written: No space left on device. ")
    assert f"{folder}/freed can be written again; no row is missing." in messages
    # A checkpoint is due after each step; tries are as far apart as is said.
    failed = [line for line in messages if "could not be saved" in line]
    assert 1 <= len(failed) <= 3
    assert re.search(r"No space left on device\. Training continues; .*\. Retrying in about 0 s\.$", failed[0])
    assert re.fullmatch(r"The checkpoint of step (9|1[0-2]) is saved\.", messages[-1])  # at the first try with room

    for name in ("stopped", "full"):
        stopped = "more than checkpoint.max_unsaved_seconds (0.3 s); the newest checkpoint is that of step 2"
        assert stopped in runs[name][0][-1]
    assert "Resuming after step 2 of 12." in runs["again"][0]


def test_a_full_disk_costs_tensorboard_no_row(done):
    *_, mirrored = done
    assert "No space left on device. Training continues" in mirrored["said"][0]
    assert mirrored["said"][1:] == ["train.sinks: tensorboard works again and has all rows."]
    assert mirrored["steps"] == list(range(41, 121)), "all since the last checkpoint before"
    assert mirrored["files"] == 2, "attempts leave no empty files"
