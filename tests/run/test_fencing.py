import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.test_store import ABOUT, check, make_state, newest, open_store, save_all
from tests.train_helpers import ROOT
from tests.users_helpers import PLANTED
from zaya_jax.checkpoint import orbax_save, store
from zaya_jax.errors import ExitCode, Superseded
from zaya_jax.run import fencing
from zaya_jax.run.checkpoints import quarantine, saved_steps
from zaya_jax.run.digests import digest
from zaya_jax.run.fencing import FENCE, Fence, read_token

SUPERSEDED = "its fencing token is now 2, this process has 1"
TOKENS = st.dictionaries(st.integers(1, 50), st.integers(1, 9), max_size=4)


def write_token(path, number):
    """Write a file as an earlier version did."""
    tree = {"generation": number, "accepted": {"100": 1}}
    path.write_text(json.dumps({**tree, "digest": digest(json.dumps(tree).encode())}))


def test_a_folder_without_one_has_none_and_the_file_keeps_its_keys(tmp_path):
    assert read_token(tmp_path) is None
    token = Fence(tmp_path).take({})
    assert token == read_token(tmp_path)
    assert (*token[:2], token.taker["pid"]) == (1, {}, os.getpid())
    Fence(tmp_path).take({100: 1})
    tree = json.loads((tmp_path / "GENERATION").read_text())
    assert (tree["generation"], tree["accepted"]) == (2, {"100": 1})


@given(TOKENS, st.lists(TOKENS, max_size=3))
def test_each_generation_is_newer_than_all_before(tmp_path_factory, first, later):
    folder = tmp_path_factory.mktemp("token")
    seen = set(first.values())
    for accepted in [first, *later]:
        token = Fence(folder).take(accepted)
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
    Fence(folder).take({})
    token = Fence(folder).take({100: 1, 200: 1})
    path = folder / "GENERATION"
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert read_token(folder) in (None, token)
    taken = Fence(folder).take({100: 1})
    assert taken.number > token.number  # though the file said nothing of it any more


@pytest.mark.parametrize("harm", [lambda path: path.symlink_to(path), Path.mkdir, lambda path: path.write_text("{}"),
                                  lambda path: path.write_bytes(b"\xff"),
                                  lambda path: write_token(path, "1")])  # fmt: skip
def test_a_file_that_is_there_and_cannot_be_read_is_named_once(tmp_path, capsys, harm):
    harm(tmp_path / "GENERATION")
    assert read_token(tmp_path) is None
    output = capsys.readouterr().err
    assert output.startswith(f"Warning: {tmp_path / 'GENERATION'} ")
    assert output.count("\n") == 1
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


def stale_pair(folder, messages):
    """A store that was given up for dead after checkpoint 1, and one that has gone on and saved 2 since."""
    stale, newer = open_store(folder, messages, keep=1), open_store(folder, keep=5)
    stale.save(1, make_state(1), ABOUT)
    assert stale.wait()
    newer.save(2, make_state(2), ABOUT)
    assert newer.wait()
    return stale, newer


def test_who_was_given_up_for_dead_removes_nothing(tmp_path):
    messages = []
    stale, newer = stale_pair(tmp_path, messages)
    work = tmp_path / "3.g2.orbax-checkpoint-tmp"  # as of a save of the newer one that is under way
    work.mkdir()
    with stale, newer:
        with pytest.raises(Superseded, match=SUPERSEDED):
            stale.save(3, make_state(3), ABOUT)
        assert work.exists()
        assert saved_steps(tmp_path) == [1, 2]
        work.rmdir()
        newer.save(3, make_state(3), ABOUT)
    assert saved_steps(tmp_path) == [1, 2, 3]
    assert messages == []


def test_who_is_given_up_while_it_saves_does_not_finish(tmp_path, monkeypatch):
    messages, digests = [], orbax_save.digests
    with open_store(tmp_path, messages) as stale:
        stale.save(1, make_state(1), ABOUT)
        assert stale.wait()
        with monkeypatch.context() as patch:
            patch.setattr(orbax_save, "digests", lambda parts: open_store(tmp_path).take_over() or digests(parts))
            stale.save(2, make_state(2), ABOUT)
            with pytest.raises(Superseded, match=SUPERSEDED):
                stale.wait()
    assert messages == []
    assert saved_steps(tmp_path) == [1]


def test_on_a_full_disk_it_removes_nothing_of_others_either(tmp_path, monkeypatch):
    stale, newer = stale_pair(tmp_path, [])
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    (tmp_path / "3.g2").mkdir()
    with stale, newer, pytest.raises(Superseded, match=SUPERSEDED):
        stale.save(3, make_state(3), ABOUT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3.g2", "GENERATION"]


def test_what_it_saves_in_the_last_moment_does_not_count(tmp_path, monkeypatch):
    messages = []
    stale, newer = stale_pair(tmp_path, messages)
    with stale, monkeypatch.context() as patch:
        patch.setattr(Fence, "check", lambda _: "")  # it looked a moment before the newer one began
        stale.save(3, make_state(9), ABOUT)
        assert stale.wait()
    assert (tmp_path / "3").exists()
    with newer:
        newer.save(3, make_state(3), ABOUT)  # nor does it take the place of the newer one's
    assert len(list(tmp_path.glob("3.stale-*"))) == 1
    check(tmp_path, 3)
    quarantine(tmp_path, 3, "corrupt")
    next(tmp_path.glob("3.stale-*")).rename(tmp_path / "3")
    assert newest(tmp_path, messages)[0] == 2
    assert "was saved by superseded processes" in messages[-1]


def test_a_token_of_an_earlier_version_says_nothing_of_who_took_it(tmp_path):
    held = Fence(tmp_path)
    held.take({})
    write_token(tmp_path / FENCE, 2)
    assert read_token(tmp_path) == (2, {100: 1}, {})
    with pytest.raises(Superseded, match=r"this process has 1\. This process writes nothing more\.$"):
        held.check()


def test_a_superseded_process_says_who_replaced_it(tmp_path, monkeypatch):
    """Also if both took the same token, as where neither saw the other's."""
    held = Fence(tmp_path)
    held.take({})
    (tmp_path / FENCE).unlink()
    monkeypatch.setattr(fencing, "_TAKER", {"host": "n03", "pid": 17, "started": "2026-01-02T03:04:05Z"})
    Fence(tmp_path).take({})
    message = "token is now 1, this process has 1. Process 17 on n03, started at 2026-01-02T03:04:05Z, took it."
    with pytest.raises(Superseded, match=re.escape(message)):
        held.check()
    with pytest.raises(Superseded, match=re.escape(message)):
        held.take({})


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_text("{}"), lambda path: path.write_bytes(b""),
                                  lambda path: (path.unlink(), path.mkdir())])  # fmt: skip
def test_a_token_that_is_gone_or_unreadable_supersedes_nobody(tmp_path, harm):
    held = Fence(tmp_path)
    assert held.check() == ""  # without a token, too
    held.take({})
    assert held.check() == ""
    harm(tmp_path / FENCE)
    assert held.check() == f"The fencing token of {tmp_path} cannot be read; restart the run."


def test_a_process_that_computes_for_hours_ends_at_once_and_with_its_own_status(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from zaya_jax.job.process import TrainingProcess\n"
        "from zaya_jax.run import fencing\n"
        "fencing._EVERY = 0.01; fence = fencing.Fence(Path(sys.argv[1]), TrainingProcess().leave)\n"
        "fence.take({}); fence.watch(); print(flush=True)\n"
        "try: time.sleep(3600)\n"
        "finally: Path(sys.argv[1], 'written').touch()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, cwd=ROOT) as process:  # fmt: skip
        process.stdout.readline()
        Fence(tmp_path).take({})
        output = process.communicate(timeout=60)[1]
    assert process.returncode == ExitCode.SUPERSEDED
    assert output.startswith(f"Stopped: Other processes have resumed this run: {SUPERSEDED}. Process {os.getpid()} on ")
    assert output.count("\n") == 1
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself"])
def test_a_check_waits_for_nothing_that_lies_in_the_place_of_the_file(tmp_path, kind):
    fence, path = Fence(tmp_path), tmp_path / FENCE
    fence.take({})
    path.unlink()
    PLANTED[kind](path, tmp_path)
    checking = threading.Thread(target=fence.check, daemon=True)
    checking.start()
    checking.join(20)
    assert not checking.is_alive()
    assert "cannot be read; restart the run" in fence.check()


def test_the_newest_token_names_the_job_that_took_it_whatever_its_host(tmp_path, monkeypatch):
    assert fencing.newest_job(tmp_path) is None
    for job in ("first", "second", "second", ""):  # a script may train twice; a command without a supervisor
        monkeypatch.setitem(fencing._TAKER, "job", job)
        Fence(tmp_path).take({})
        assert fencing.newest_job(tmp_path) == job
    (tmp_path / fencing.FENCE).write_bytes(b"{")
    assert fencing.newest_job(tmp_path) is None
