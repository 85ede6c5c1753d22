import json
import shutil

import pytest

from tests.checkpoint.test_store import save_all
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import (
    checkpoint_folder,
    clean,
    has_checkpoint,
    named_steps,
    quarantine,
    remove,
    saved_steps,
    unfinished_name,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints 1 and 2, the first of them the last of phase 'one'; read only."""
    folder = tmp_path_factory.mktemp("folder") / "run"
    save_all(folder / "checkpoints", [1, 2])
    (folder / "phases.json").write_text(json.dumps({"one": 1}))
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run") / "checkpoints"


def test_what_unfinished_saves_left_is_removed_and_nothing_else(copy):
    left = [unfinished_name(3, 1), "3.g1.orbax-checkpoint-tmp", "3.g12.orbax-checkpoint-tmp-77", "1.deleted"]
    kept = ["4.corrupt-20260101T000000", "4.stale-20260101T000000", "notes", "5x.g1", "g1"]
    for name in left + kept:
        (copy / name / "state").mkdir(parents=True)
    (copy / "GENERATION.node.1.2.partial").touch()
    clean(copy)
    assert sorted(path.name for path in copy.iterdir()) == sorted([*kept, "1", "2", "GENERATION"])


def test_steps_are_of_finished_checkpoints_in_order(copy):
    (copy / "10").mkdir()
    (copy / unfinished_name(20, 1)).mkdir()
    assert saved_steps(copy) == [1, 2]
    assert named_steps(copy) == [1, 2, 10]
    assert saved_steps(copy / "nowhere") == named_steps(copy / "nowhere") == []


def test_removing_is_done_at_once_and_again_where_it_was_cut_short(copy):
    (copy / "1.deleted" / "state").mkdir(parents=True)  # left where a removal of the same step was killed
    remove(copy, 1)
    assert sorted(path.name for path in copy.iterdir()) == ["2", "GENERATION"]


def test_what_is_set_aside_keeps_its_content_and_never_a_name_twice(copy):
    content = sorted(path.name for path in (copy / "1").iterdir())
    names = set()
    for _ in range(3):
        quarantined = quarantine(copy, 1, "corrupt")
        assert sorted(path.name for path in quarantined.iterdir()) == content
        names.add(quarantined.name)
        shutil.copytree(quarantined, copy / "1")
    assert len(names) == 3
    assert all(name.startswith("1.corrupt-") for name in names)
    shutil.rmtree(copy / "1")
    shutil.rmtree(copy / "2")
    assert has_checkpoint(copy)  # what once was one is no empty folder


def test_a_folder_of_which_nothing_was_ever_saved_has_none(tmp_path):
    (tmp_path / unfinished_name(1, 1)).mkdir()
    assert not has_checkpoint(tmp_path)


def test_a_checkpoint_is_named_by_its_run_by_itself_or_by_its_phase(run):
    checkpoints = run / "checkpoints"
    assert checkpoint_folder(str(run)) == checkpoints / "2"
    assert checkpoint_folder(str(checkpoints / "1")) == checkpoints / "1"
    assert checkpoint_folder(f"{run}@one") == checkpoints / "1"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{run}@two", "but the phases of .* that are done are: one"),
        ("{run}/nowhere", "must be the folder of a run that has a checkpoint"),
        ("{run}/nowhere@one", "that are done are: none"),
        ("{run}/checkpoints", "must be the folder of a run"),
        ("{run}/checkpoints/7", "must be the folder of a run"),
    ],
)
def test_what_names_none_is_refused(run, path, said):
    with pytest.raises(InputError, match=said):
        checkpoint_folder(path.format(run=run))
