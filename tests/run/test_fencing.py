import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.test_store import ABOUT, check, make_state, newest, open_store, save_all
from zaya_jax.checkpoint import store
from zaya_jax.run.checkpoints import quarantine, saved_steps
from zaya_jax.run.fencing import FencingToken, read_token, take_token

TOKENS = st.dictionaries(st.integers(1, 50), st.integers(1, 9), max_size=4)


def test_a_folder_without_one_has_none_and_the_file_keeps_its_keys(tmp_path):
    assert read_token(tmp_path) is None
    assert take_token(tmp_path, {}) == FencingToken(1, {}) == read_token(tmp_path)
    take_token(tmp_path, {100: 1})
    tree = json.loads((tmp_path / "GENERATION").read_text())
    assert (tree["generation"], tree["accepted"]) == (2, {"100": 1})


@given(TOKENS, st.lists(TOKENS, max_size=3))
def test_each_generation_is_newer_than_all_before(tmp_path_factory, first, later):
    folder = tmp_path_factory.mktemp("token")
    seen = set(first.values())
    for accepted in [first, *later]:
        token = take_token(folder, accepted)
        assert token == read_token(folder)
        assert token.number > max(seen, default=0)
        seen |= {token.number, *accepted.values()}
        for step, generation in accepted.items():
            assert token.accepts(step, generation)
            assert token.accepts(step + 100, token.number)
            assert not token.accepts(step + 100, generation)
            assert not token.accepts(step, generation + 100)


@settings(max_examples=30)
@given(st.data())
def test_whatever_is_damaged_of_it_makes_no_other_one(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("token")
    take_token(folder, {})
    token = take_token(folder, {100: 1, 200: 1})
    path = folder / "GENERATION"
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert read_token(folder) in (None, token)
    taken = take_token(folder, {100: 1})
    assert taken.number > token.number  # though the file said nothing of it any more


@pytest.mark.parametrize("harm", [lambda path: path.symlink_to(path), Path.mkdir, lambda path: path.write_text("{}"),
                                  lambda path: path.write_bytes(b"\xff")])  # fmt: skip
def test_a_file_that_is_there_and_cannot_be_read_is_named_once(tmp_path, capsys, harm):
    harm(tmp_path / "GENERATION")
    assert read_token(tmp_path) is None
    said = capsys.readouterr().err
    assert said.startswith(f"Warning: {tmp_path / 'GENERATION'} ")
    assert said.count("\n") == 1
    assert read_token(tmp_path) is None
    assert capsys.readouterr().err == ""


def test_a_run_goes_on_where_its_file_is_damaged_or_gone(tmp_path):
    save_all(tmp_path, [1])
    for step, text in ((2, '{"generation": 7, "accepted": {}}'), (3, "")):
        (tmp_path / "GENERATION").write_text(text)
        save_all(tmp_path, [step], keep=5)
    (tmp_path / "GENERATION").unlink()
    save_all(tmp_path, [4], keep=5)
    assert saved_steps(tmp_path) == [1, 2, 3, 4]
    check(tmp_path, 4)


def stale_pair(folder, said):
    """A store that was given up for dead after checkpoint 1, and one that has gone on and saved 2 since."""
    stale, newer = open_store(folder, said, keep=1), open_store(folder, keep=5)
    stale.save(1, make_state(1), ABOUT)
    assert stale.wait()
    newer.save(2, make_state(2), ABOUT)
    assert newer.wait()
    return stale, newer


def test_who_was_given_up_for_dead_removes_nothing(tmp_path):
    said = []
    stale, newer = stale_pair(tmp_path, said)
    work = tmp_path / "3.g2.orbax-checkpoint-tmp"  # as of a save of the newer one that is under way
    work.mkdir()
    with stale, newer:
        stale.save(3, make_state(3), ABOUT)
        assert not stale.wait()
        assert work.exists()
        assert saved_steps(tmp_path) == [1, 2]
        work.rmdir()
        newer.save(3, make_state(3), ABOUT)
    assert saved_steps(tmp_path) == [1, 2, 3]
    assert "its fencing token is now 2, this process has 1" in said[0]


def test_who_is_given_up_while_it_saves_does_not_finish(tmp_path, monkeypatch):
    said, digests = [], store.digests
    with open_store(tmp_path, said) as stale:
        stale.save(1, make_state(1), ABOUT)
        assert stale.wait()
        with monkeypatch.context() as patch:
            patch.setattr(store, "digests", lambda parts: open_store(tmp_path).take_over() or digests(parts))
            stale.save(2, make_state(2), ABOUT)
            assert not stale.wait()
    assert "its fencing token is now 2, this process has 1" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "GENERATION"]


def test_on_a_full_disk_it_removes_nothing_of_others_either(tmp_path, monkeypatch):
    stale, newer = stale_pair(tmp_path, [])
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    (tmp_path / "3.g2").mkdir()
    with stale, newer:
        stale.save(3, make_state(3), ABOUT)
        assert not stale.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3.g2", "GENERATION"]


def test_what_it_saves_in_the_last_moment_does_not_count(tmp_path, monkeypatch):
    said = []
    stale, newer = stale_pair(tmp_path, said)
    with stale, monkeypatch.context() as patch:
        patch.setattr(store, "why_superseded", lambda *_: "")  # it looked a moment before the newer one began
        stale.save(3, make_state(9), ABOUT)
        assert stale.wait()
    assert (tmp_path / "3").exists()
    with newer:
        newer.save(3, make_state(3), ABOUT)  # nor does it take the place of the newer one's
    assert len(list(tmp_path.glob("3.stale-*"))) == 1
    check(tmp_path, 3)
    quarantine(tmp_path, 3, "corrupt")
    next(tmp_path.glob("3.stale-*")).rename(tmp_path / "3")
    assert newest(tmp_path, said)[0] == 2
    assert "was saved by superseded processes" in said[-1]
