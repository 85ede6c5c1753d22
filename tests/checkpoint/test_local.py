import contextlib
import itertools
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_restore import data_file, flip
from tests.checkpoint.test_store import ABOUT, abstract_state, check, make_state, newest, open_store
from tests.checkpoint.test_store import restored as newest_of
from tests.train_helpers import differing
from zaya_jax.checkpoint import arrays, digest, restore
from zaya_jax.checkpoint.digest import array_digest
from zaya_jax.checkpoint.local import _section
from zaya_jax.run.checkpoints import saved_steps, usable_checkpoints
from zaya_jax.run.digests import read_slice
from zaya_jax.run.local_copies import part_file

WIDTH = 300


@pytest.fixture
def used(monkeypatch):
    """The arrays that were read from each checkpoint, not from a copy."""
    loads, load = [], restore._load
    monkeypatch.setattr(restore, "_load", lambda reader, leaves: loads.append(list(leaves)) or load(reader, leaves))
    return loads


def save(folder, steps=(1, 2), run="run", node="node", **config):
    with open_store(folder / run, local_dir=str(folder / node), **config) as store:
        for step in steps:
            store.save(step, make_state(step, WIDTH), ABOUT)


def restored(folder, run="run", node="node"):
    step, state = newest(folder / run, None, WIDTH, local_dir=str(folder / node))
    assert not differing(state, make_state(step, WIDTH))
    return step


def copy_of(folder, step):
    (copied,) = (folder / "node").glob(f"*/{step}")
    return copied


def test_the_copy_on_the_node_is_read_first_and_is_the_newest_alone(tmp_path, used):
    save(tmp_path)
    assert [path.name for path in copy_of(tmp_path, 2).parent.iterdir()] == ["2"]
    assert restored(tmp_path) == 2
    assert used == []


def largest(copy):
    return max(copy.iterdir(), key=lambda path: path.stat().st_size)


def lengthen(path):
    with path.open("r+b") as file:
        file.truncate(2**40)  # sparse; more than there is memory


def exchange(copy):
    """Swap the contents of two files of one size."""
    sizes = {}
    for path in copy.iterdir():
        other = sizes.setdefault(path.stat().st_size, path)
        if path.read_bytes() != other.read_bytes():
            content = other.read_bytes(), path.read_bytes()
            path.write_bytes(content[0])
            other.write_bytes(content[1])
            return
    raise AssertionError("no two files have the same size")


DAMAGES = {
    "lost": shutil.rmtree,
    "part lost": lambda copy: largest(copy).unlink(),
    "part cut": lambda copy: largest(copy).write_bytes(largest(copy).read_bytes()[:-4]),
    "part flipped": lambda copy: flip(largest(copy), 17),
    "part longer": lambda copy: lengthen(largest(copy)),
    "parts swapped": exchange,
    "a folder for a part": lambda copy: (largest(copy).unlink(), (copy / "x").mkdir()),
    "of another step": lambda copy: shutil.copytree(copy.parents[2] / "older", copy, dirs_exist_ok=True),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_are_damaged_or_gone_are_read_from_the_checkpoint(tmp_path, used, capsys, damage):
    save(tmp_path, [1])
    shutil.copytree(copy_of(tmp_path, 1), tmp_path / "older")
    save(tmp_path, [2])
    DAMAGES[damage](copy_of(tmp_path, 2))
    assert restored(tmp_path) == 2
    assert len(used) == 1
    assert ("does not match the checksum" in capsys.readouterr().out) is (
        "lost" not in damage and "folder" not in damage
    )
    assert saved_steps(tmp_path / "run") == [1, 2]


def test_only_the_arrays_without_a_copy_are_read_from_the_checkpoint(tmp_path, used):
    save(tmp_path, [1])
    largest(copy_of(tmp_path, 1)).unlink()
    messages = []
    newest(tmp_path / "run", messages, WIDTH, local_dir=str(tmp_path / "node"))
    assert [len(names) for names in used] == [1]
    size = 2 * WIDTH * 4
    assert f"bytes from copies on the nodes, {size:,} from {tmp_path / 'run' / '1'}." in messages[-1]


def test_arrays_that_are_digested_in_pieces_are_copied_in_pieces(tmp_path, used, monkeypatch):
    monkeypatch.setattr(digest, "PIECE", 100)
    monkeypatch.setattr(arrays, "_SMALL", 0)
    save(tmp_path, [1])
    assert restored(tmp_path) == 1
    assert used == []


def cuts(length):
    return st.lists(st.integers(1, length), max_size=3, unique=True).map(lambda at: sorted({0, *at, length}))


@given(st.data())
def test_a_section_is_put_together_from_parts_of_any_layout(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3))
    array = np.random.default_rng(0).integers(0, 100, shape).astype(np.int16)
    grid = [list(itertools.pairwise(data.draw(cuts(length)))) for length in shape]
    folder, spans = tmp_path_factory.mktemp("parts"), {}
    for bounds in itertools.product(*grid):
        part = array[tuple(slice(*bound) for bound in bounds)]
        spans[span := ",".join(f"{start}:{stop}" for start, stop in bounds)] = array_digest(part)
        np.ascontiguousarray(part).tofile(folder / part_file("x", span))
    wanted = [
        sorted(data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True))) for length in shape
    ]
    index = tuple(slice(*bound) for bound in wanted)
    text = ",".join(f"{start}:{stop}" for start, stop in wanted)
    np.testing.assert_array_equal(_section(folder, "x", text, array.dtype, spans), array[index])
    hit = data.draw(st.sampled_from(sorted(spans)))
    flip(folder / part_file("x", hit), 0)
    ends = zip(wanted, read_slice(hit), strict=True)
    if all(max(start, axis.start) < min(stop, axis.stop) for (start, stop), axis in ends):
        with pytest.raises(ValueError, match="does not match"):
            _section(folder, "x", text, array.dtype, spans)
    del spans[hit]  # and without it nothing is made up
    with contextlib.suppress(OSError):
        np.testing.assert_array_equal(_section(folder, "x", text, array.dtype, spans), array[index])


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_flip_anywhere_in_a_copy_changes_nothing(tmp_path_factory, at, bit):
    folder = tmp_path_factory.mktemp("local")
    save(folder, [1])
    files = sorted(path for path in copy_of(folder, 1).iterdir() if path.stat().st_size)
    path = files[at % len(files)]
    flip(path, at % path.stat().st_size, bit)
    assert restored(folder) == 1


def test_a_copy_says_nothing_of_the_checkpoint_that_it_is_of(tmp_path):
    """Reading it must not let retention take the checkpoint itself for whole: nodes are lost with their copies."""
    save(tmp_path, [1])
    with open_store(tmp_path / "run") as store:  # which reads it from the run's own folder
        newest_of(store, abstract_state(WIDTH))
        store.take_over(1)
    save(tmp_path, [2], keep=1)
    flip(data_file(tmp_path / "run" / "2"), 30)
    with open_store(tmp_path / "run", local_dir=str(tmp_path / "node"), keep=1) as store:
        assert newest_of(store, abstract_state(WIDTH))[0] == 2  # of the copy
        store.take_over(2)
        store.save(3, make_state(3, WIDTH), ABOUT)
    assert saved_steps(tmp_path / "run") == [1, 3]
    assert [checkpoint.is_verified for checkpoint in usable_checkpoints(tmp_path / "run")] == [True, False]


def test_names_that_are_no_copies_stay_in_the_folder_of_the_copies(tmp_path):
    save(tmp_path, [1])
    home = copy_of(tmp_path, 1).parent
    (home / "notes").mkdir()
    (home / "7.partial").mkdir()
    save(tmp_path, [2])
    assert sorted(path.name for path in home.iterdir()) == ["2", "notes"]


def test_runs_on_one_node_do_not_share_a_copy(tmp_path):
    for name in ("a", "b"):
        with open_store(tmp_path / name, local_dir=str(tmp_path / "node")) as store:
            store.save(1, make_state(1), ABOUT)
    assert len(list((tmp_path / "node").iterdir())) == 2


def test_a_copy_that_cannot_be_written_is_reported_once_and_not_used(tmp_path):
    (tmp_path / "node").write_text("in the way")
    messages = []
    with open_store(tmp_path / "run", messages, local_dir=str(tmp_path / "node")) as store:
        for step in (1, 2):
            store.save(step, make_state(step, WIDTH), ABOUT)
            assert store.wait()
        (tmp_path / "node").unlink()  # from then on it can, so that a next failure is news
        store.save(3, make_state(3, WIDTH), ABOUT)
        assert store.wait()
        assert copy_of(tmp_path, 3)
        shutil.rmtree(tmp_path / "node")
        (tmp_path / "node").write_text("in the way")
        store.save(4, make_state(4, WIDTH), ABOUT)
    assert [f"checkpoint of step {step} cannot be written to checkpoint.local_dir ({tmp_path / 'node'}" in text
            for step, text in zip((1, 4), messages, strict=True)] == [True, True]  # fmt: skip
    assert "Not a directory" in messages[0]
    assert restored(tmp_path) == 4


def test_what_is_staged_is_let_go_of(tmp_path):
    (tmp_path / "run").write_text("in the way")
    with open_store(tmp_path / "run", [], local_dir=str(tmp_path / "node")) as store:
        store.save(1, make_state(1), ABOUT)
        assert not store.wait()
        (tmp_path / "run").unlink()
        store.save(1, make_state(1), ABOUT)
        assert store.wait()
        assert store.local._staged == {}
    check(tmp_path / "run", 1)
