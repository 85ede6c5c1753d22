import random
import shutil
import time
from pathlib import Path

import jax
import pytest

from tests.checkpoint.damage_helpers import KINDS, WHERE, count
from tests.checkpoint.saved_helpers import write_soak
from tests.checkpoint.test_store import ABOUT, abstract, check, make_state, newest, open_store, restored, save_all
from tests.train_helpers import differing
from zaya_jax.checkpoint.restore import read_checkpoint, restore_newest
from zaya_jax.errors import InputError, Reason, RunStopped
from zaya_jax.run.checkpoints import saved_steps


def flip(path, at=0, bit=3):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def data_file(checkpoint):
    """The file in which most of a checkpoint's values lie."""
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def all_counts(counts, ending):
    return sum(endings[ending] for endings in counts.values())


def test_damage_is_never_loaded(tmp_path, capfd):
    counts = count(tmp_path, 40, seed=3, all_files=False)
    assert set(counts) == {f"{kind}, {place}" for kind in KINDS for place in WHERE}
    assert all_counts(counts, "silent") == 0
    assert all_counts(counts, "found") >= 30  # `count` lets only damage of GENERATION be harmless
    assert all("GENERATION" in line for line in capfd.readouterr().err.splitlines())


@pytest.mark.soak
def test_a_thousand_damages_and_none_is_loaded(tmp_path, capfd):
    start = time.monotonic()
    counts = count(tmp_path, 1000, seed=random.SystemRandom().randrange(2**32), all_files=True)
    assert all_counts(counts, "silent") == 0
    assert all("GENERATION" in line for line in capfd.readouterr().err.splitlines())
    what = ("two checkpoints of a run, the newest damaged at random; then the run is restored. 'found': reported, "
            "quarantined, and the older one restored bitwise; 'harmless': the values are those saved; 'silent': "
            "anything else that restored")  # fmt: skip
    endings = {ending: all_counts(counts, ending) for ending in ("silent", "found", "harmless")}
    places = {name: dict(endings_of_place) for name, endings_of_place in sorted(counts.items())}
    write_soak("damage", what, start, {**endings, "by kind and place": places, "stderr": "warnings of GENERATION"})


def test_each_checkpoint_that_differs_is_set_aside_until_none_is_left(tmp_path):
    save_all(tmp_path, [1, 2, 3], keep=3)
    for step in (2, 3):
        flip(data_file(tmp_path / str(step)))
    messages = []
    assert newest(tmp_path, messages)[0] == 1
    assert [sentence.rpartition("It was quarantined as ")[2][:9] for sentence in messages] == ["3.corrupt", "2.corrupt"]
    assert saved_steps(tmp_path) == [1]
    flip(data_file(tmp_path / "1"))
    with pytest.raises(RunStopped, match=r"Every checkpoint in .* is damaged") as end:
        newest(tmp_path)
    assert end.value.reason is Reason.NO_CHECKPOINT
    with pytest.raises(RunStopped, match="Every checkpoint"):  # nor is the run begun anew by the next call
        newest(tmp_path)
    assert sorted(path.name[:9] for path in tmp_path.iterdir()) == ["1.corrupt", "2.corrupt", "3.corrupt", "GENERATIO"]


def test_one_that_cannot_be_read_is_not_quarantined(tmp_path):
    save_all(tmp_path, [1, 2])
    (file,) = (tmp_path / "2" / "digests").iterdir()

    def prepare(manifest):
        file.unlink()
        file.symlink_to("/proc/self/mem")  # whose first bytes the system refuses to read
        return abstract(make_state())

    with open_store(tmp_path) as store, pytest.raises(InputError, match=rf"{file} cannot be read"):
        restore_newest(store, prepare, print)
    assert saved_steps(tmp_path) == [1, 2]


def test_one_without_its_manifest_is_told_and_its_step_is_saved_again(tmp_path):
    save_all(tmp_path, [1, 2])
    next((tmp_path / "2").glob("manifest-*")).unlink()
    messages = []
    with open_store(tmp_path, messages) as store:
        assert restored(store, make_state(), messages)[0] == 1
        store.take_over(1)
        store.save(2, make_state(2), ABOUT)
    assert "contains 0 manifests, but must contain one. It was quarantined as 2.corrupt-" in messages[0]
    check(tmp_path, 2)


def test_a_folder_that_is_no_checkpoint_does_not_keep_its_step_from_being_saved(tmp_path):
    (tmp_path / "2" / "state").mkdir(parents=True)
    save_all(tmp_path, [1, 2])
    assert saved_steps(tmp_path) == [1, 2]
    assert len(list(tmp_path.glob("2.corrupt-*"))) == 1


def test_arrays_that_are_not_wanted_or_not_there_are_named(tmp_path):
    save_all(tmp_path, [1])
    state = make_state()

    def restore_as(**changes):
        with open_store(tmp_path) as store:
            restored(store, {**state, **changes})

    with pytest.raises(InputError, match=r"it has no array extra\."):
        restore_as(extra=state["step"])
    with pytest.raises(InputError, match=r"its step is int32 \[\], but must be float32 \[\]\."):
        restore_as(step=state["step"].astype("float32"))
    with pytest.raises(InputError, match=r"its params\.norm is bfloat16 \[3\], but must be bfloat16 \[4\]\."):
        restore_as(params={**state["params"], "norm": jax.numpy.ones(4, "bfloat16")})
    del state["step"]
    with pytest.raises(InputError, match=r"it has extra arrays: step\."):
        restore_as()
    assert saved_steps(tmp_path) == [1]  # nothing of which is damage


def test_a_checkpoint_of_another_run_is_left_as_it_is(tmp_path):
    save_all(tmp_path, [1, 2, 3], keep=3)
    restored = read_checkpoint(tmp_path / "3", lambda manifest: abstract(make_state()))
    assert not differing(restored.state, make_state(3))
    flip(data_file(tmp_path / "3"))
    (manifest,) = (tmp_path / "2").glob("manifest-*.json")
    manifest.unlink()
    manifest.mkdir()  # it cannot be read
    with pytest.raises(InputError, match=r"does not match its checksum\. Try an older one: .*/1\.$"):
        read_checkpoint(tmp_path / "3", lambda manifest: abstract(make_state()))
    assert saved_steps(tmp_path) == [1, 2, 3]
    first = Path(shutil.copytree(tmp_path / "3", tmp_path / "alone" / "3"))
    with pytest.raises(InputError, match=r"does not match its checksum\.$"):
        read_checkpoint(first, lambda manifest: abstract(make_state()))
    copied = Path(shutil.copytree(tmp_path / "1", tmp_path / "elsewhere" / "1"))  # without the folder's generations
    assert not differing(read_checkpoint(copied, lambda manifest: abstract(make_state())).state, make_state(1))
    copied.rename(copied.with_name("7"))
    with pytest.raises(InputError, match=r"7 contains the checkpoint of step 1, not of step 7\."):
        read_checkpoint(copied.with_name("7"), lambda manifest: abstract(make_state()))
