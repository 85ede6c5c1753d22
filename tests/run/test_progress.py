import contextlib
import os
import pty
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from zaya_jax.run import progress
from zaya_jax.run.progress import WorkProgress, show_status, track

DONE = re.compile(r"data: preparing: done, ([\d,]+\.\d) MB in (\d+\.\d) s \(([\d,]+\.\d) MB/s\)\n")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that tests count."""
    now = [10.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_work_that_is_done_says_how_many_bytes_in_which_time(capsys, clock):
    with WorkProgress("preparing", 2_500_000, log="data") as work:
        work.add(1_000_000)
        clock[0] += 0.2
        work.add(1_500_000)
    assert capsys.readouterr() == ("", "data: preparing: done, 2.5 MB in 0.2 s (12.5 MB/s)\n")


def test_work_that_fails_does_not_say_that_it_is_done(capsys):
    def fail(work):
        work.add(500)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), WorkProgress("preparing", 1000, log="data") as work:
        fail(work)
    assert capsys.readouterr() == ("", "")


def test_long_work_says_now_and_then_how_far_it_is_and_the_time_left_at_the_rate_so_far(capsys, clock):
    with WorkProgress("preparing", 4_000_000, log="data") as work:
        for seconds in (29, 1, 30, 29):
            clock[0] += seconds
            work.add(1_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "data: preparing: 50 %, 30 s left, 2.0 MB in 30.0 s (0.1 MB/s)",
        "data: preparing: 75 %, 20 s left, 3.0 MB in 60.0 s (0.1 MB/s)",
        "data: preparing: done, 4.0 MB in 89.0 s (0.0 MB/s)",
    ]


def test_what_other_processes_count_is_followed_to_the_end(capsys):
    counted = 0
    start = threading.active_count()
    with WorkProgress("preparing", 3_000_000, log="data") as work, work.follow(lambda: counted):
        assert threading.active_count() > start
        counted = 3_000_000
    assert float(DONE.fullmatch(capsys.readouterr().err)[1]) == 3.0
    assert threading.active_count() == start


@contextlib.contextmanager
def terminal(monkeypatch):
    """Make stderr a terminal; yields a function that reads what it shows up to a text."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    here, there = pty.openpty()

    def read_until(end):
        shown_text, until = "", time.monotonic() + 60
        while end not in shown_text and time.monotonic() < until:
            shown_text += os.read(here, 1 << 16).decode(errors="replace")
        return shown_text

    with os.fdopen(there, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        yield read_until
        monkeypatch.undo()
    os.close(here)


def test_a_terminal_shows_a_bar_that_goes_away_and_the_line_stays(monkeypatch):
    with terminal(monkeypatch) as read_until:
        with WorkProgress("preparing", 2_000_000, log="data") as work:
            work.add(1_000_000)
            shown = read_until("1.0/2.0 MB")  # it is drawn several times a second
            work.add(1_000_000)
        last = read_until("MB/s)\r\n")
    assert "preparing" in shown
    assert "\x1b[1A\x1b[2Kdata: preparing: done" in last  # in place of the bar
    assert DONE.search(last.replace("\r\n", "\n"))[1] == "2.0"
    assert "s left" not in shown + last  # no lines beside a bar


def test_a_terminal_shows_which_item_is_being_done_of_how_many(monkeypatch, capsys):
    assert list(track("compiling", range(3), str)) == [0, 1, 2]
    assert capsys.readouterr() == ("", "compiling 0\ncompiling 1\ncompiling 2\n")  # not a terminal
    with terminal(monkeypatch) as read_until:
        items = track("compiling", ["main", "decay"], "phase {}".format)
        assert next(items) == "main"
        assert "compiling phase main" in read_until("compiling phase main")
        assert next(items) == "decay"
        assert "compiling phase decay" in read_until("compiling phase decay")
        assert list(items) == []


def test_a_terminal_shows_a_status_that_goes_away(monkeypatch, capsys):
    with show_status("reading runs/[/x]"):
        pass
    assert capsys.readouterr() == ("", "")  # not a terminal
    with terminal(monkeypatch) as read_until:
        with show_status("reading runs/[/x]"):
            assert "reading runs/[/x]" in read_until("reading runs/[/x]")
        print("done", file=sys.stderr, flush=True)
        assert "\x1b[1A\x1b[2Kdone" in read_until("done")  # in place of the status
