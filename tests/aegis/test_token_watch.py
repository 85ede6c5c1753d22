"""The watch distinguishes another job's fencing token from those of this job."""

from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.token_watch import TokenWatch
from zaya_jax.run import fencing


def take(folder, host, monkeypatch):
    monkeypatch.setitem(fencing._TAKER, "host", host)
    fencing.Fence(folder).take({})


def test_a_token_that_another_host_takes_after_this_jobs_attempt_had_supersedes_it(tmp_path, monkeypatch):
    watch = TokenWatch(tmp_path)
    watch.start_attempt()
    watch.look()  # no token yet
    for _ in range(2):  # a script may train twice
        take(tmp_path, "own", monkeypatch)
        watch.look()
        assert not watch.is_superseded
    take(tmp_path, "other", monkeypatch)
    watch.look()
    assert watch.is_superseded


def test_what_was_taken_before_an_attempt_or_by_its_own_restart_supersedes_nothing(tmp_path, monkeypatch):
    watch = TokenWatch(tmp_path)
    for host in ("first", "second"):  # node 0 is another one when the job was requeued
        take(tmp_path, "earlier", monkeypatch)
        watch.start_attempt()
        watch.look()
        take(tmp_path, host, monkeypatch)
        watch.look()
        watch.look()
        assert not watch.is_superseded


@given(st.binary(max_size=200))
def test_a_damaged_token_supersedes_nothing(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("checkpoints")
    watch = TokenWatch(folder)
    (folder / fencing.FENCE).write_bytes(content)
    watch.start_attempt()
    watch.look()
    assert not watch.is_superseded
