import contextlib
import os
import pty
import re
import sys
import threading
import time

import pytest

from zaya_jax.run import progress
from zaya_jax.run.progress import WorkProgress, show_status, track

DONE = re.compile(r"data: preparing: done, ([\d,]+\.\d) MB in (\d+\.\d) s \(([\d,]+\.\d) MB/s\)\n")


def test_work_that_is_done_says_how_many_bytes_in_which_time(capsys):
    with WorkProgress("preparing", 2_500_000, log="data") as work:
        work.add(1_000_000)
        time.sleep(0.1)
        work.add(1_500_000)
    out, err = capsys.readouterr()
    assert out == ""
    size, seconds, rate = (float(number) for number in DONE.fullmatch(err).groups())
    assert size == 2.5
    assert seconds >= 0.1
    assert 0 < rate <= 2.5 / 0.1


def test_work_that_fails_does_not_say_that_it_is_done(capsys):
    def fail(work):
        work.add(500)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), WorkProgress("preparing", 1000, log="data") as work:
        fail(work)
    assert capsys.readouterr() == ("", "")


def test_long_work_says_now_and_then_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.05)
    with WorkProgress("preparing", 4_000_000, log="data") as work:
        for _ in range(4):
            time.sleep(0.06)
            work.add(1_000_000)
        work.add(0)  # too soon for a line
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    for count, line in enumerate(lines[:4], 1):
        assert re.match(rf"data: preparing: {25 * count} %, \d+ s left, {count}\.0 MB in ", line)


def test_the_time_left_is_that_of_the_rate_so_far(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.5)
    with WorkProgress("preparing", 1000, log="data") as work:
        time.sleep(0.6)
        work.add(10)
    left = int(re.search(r"1 %, (\d+) s left", capsys.readouterr().err)[1])
    assert 58 <= left < 600  # at least 0.6 s for each of 99 such parts


def test_what_other_processes_count_is_followed_to_the_end(capsys):
    counted = 0
    begun = threading.active_count()
    with WorkProgress("preparing", 3_000_000, log="data") as work, work.follow(lambda: counted):
        assert threading.active_count() > begun
        counted = 3_000_000
    assert float(DONE.fullmatch(capsys.readouterr().err)[1]) == 3.0
    assert threading.active_count() == begun


@contextlib.contextmanager
def terminal(monkeypatch):
    """Make stderr a terminal; yields a function that reads what it shows up to a text."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    here, there = pty.openpty()

    def read_until(end):
        shown_text, until = "", time.monotonic() + 10
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
