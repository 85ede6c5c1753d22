import contextlib
import errno
import json
import math
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zaya_jax.errors import InputError
from zaya_jax.run import metrics as module
from zaya_jax.run.metrics import DiskGuard, JsonlFile, LineFile, read_rows


def row(step):
    return {"step": step, "loss": 1 / step, "load_entropy": [0.5, step / 7]}


def opened(path, step, report=print):
    """A file in which every step has a row, closed at the end of a `with` block."""
    return contextlib.closing(JsonlFile(path, step, 0, DiskGuard(report), complete=True))


def run(path, start, end):
    """A process that resumes from `start` and ends, for whatever reason, after `end`."""
    with opened(path, start) as file:
        for step in range(start + 1, end + 1):
            file.append(row(step))


def test_a_row_outlives_its_process_from_when_it_is_logged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with opened(path, 0) as file:
        file.append(row(1))
        assert read_rows(path) == [row(1)]
        file.sync()


@st.composite
def lives(draw):
    """Of each process: the checkpoint it starts from (at most what was logged), where it ends, bytes torn off."""
    processes, logged = [], 0
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, logged))
        end = start + draw(st.integers(0, 6))
        processes.append((start, end, draw(st.integers(0, 60))))
        logged = end
    return processes


@given(lives())
def test_each_step_has_one_row_whatever_was_torn_off_after_the_checkpoint(killed):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        for start, end, torn in killed:
            run(path, start, end)
            content = path.read_bytes()
            # Rows up to the next start were synced with its checkpoint; anything behind them can be torn.
            lines = content.splitlines(keepends=True)
            after = killed[killed.index((start, end, torn)) + 1][0] if (start, end, torn) != killed[-1] else end
            safe = sum(map(len, lines[:after]))
            path.write_bytes(content[: max(safe, len(content) - torn)])
        assert [logged_row["step"] for logged_row in read_rows(path)] == list(range(1, killed[-1][1] + 1))
        assert path.read_bytes() == b"".join((json.dumps(row(s)) + "\n").encode() for s in range(1, killed[-1][1] + 1))


DEEP, NO_STEP = b"[" * 10**5 + b"\n", b'{"step": null}\n'


@given(cut=st.integers(0, 400), rest=st.sampled_from([b"", b"\n", b"\0\0\0\0", b'{"st', DEEP, NO_STEP]))
@example(cut=0, rest=DEEP)
@example(cut=0, rest=NO_STEP)
def test_whole_rows_are_read_before_any_damage(cut, rest):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        run(path, 0, 6)
        content = path.read_bytes()[:cut]
        path.write_bytes(content + rest)
        steps = [logged_row["step"] for logged_row in read_rows(path)]
        complete = content.count(b"\n")
        assert steps[:complete] == list(range(1, complete + 1))
        assert None not in steps
        assert len(steps) <= complete + 1  # the last may lack no more than its newline


def test_numbers_survive_to_the_last_bit_and_those_that_are_none_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with opened(path, 0) as file:
        file.append({"step": 1, "loss": 0.1 + 0.2, "load_entropy": [1e-45, -0.0]})
        file.append({"step": 2, "loss": math.nan, "load_entropy": [math.inf, 1.0]})
    run(path, 2, 2)
    first, second = read_rows(path)
    assert first == {"step": 1, "loss": 0.1 + 0.2, "load_entropy": [1e-45, -0.0]}
    assert math.copysign(1, first["load_entropy"][1]) == -1
    assert second == {"step": 2, "loss": None, "load_entropy": [None, 1.0]}


class Disk:
    """A disk whose next calls take so many bytes, or are refused (None); a sync that is loses what was written."""

    def __init__(self, calls):
        self.calls, self.synced = list(calls), 0

    def take(self, size):
        room = self.calls.pop(0) if self.calls else size
        if room is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return min(room, size)

    def pwrite(self, file, data, offset):
        return os.pwrite(file, data[: self.take(len(data))], offset)

    def fsync(self, file):
        try:
            self.take(0)
        except OSError:
            os.ftruncate(file, self.synced)
            raise
        self.synced = os.fstat(file).st_size

    def __getattr__(self, name):
        return getattr(os, name)


@given(calls=st.lists(st.sampled_from([None, None, 1, 30, 1000]), max_size=30), syncs=st.sets(st.integers(1, 6)))
def test_a_row_that_cannot_be_written_is_written_later(calls, syncs):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path, messages, disk = Path(folder) / "metrics.jsonl", [], Disk(calls)
        patch.setattr(module, "os", disk)
        content = b""
        with opened(path, 0, messages.append) as file:
            for step in range(1, 7):
                file.append(row(step))
                content += (json.dumps(row(step)) + "\n").encode()
                assert content.startswith(path.read_bytes())
                if step in syncs:
                    problem = file.sync()
                    assert problem or path.read_bytes() == content
                    assert not problem or "metrics.jsonl cannot be written: No space left on device." in problem
            disk.calls = []
        assert path.read_bytes() == content
        assert len(messages) == 2 * sum("Training continues" in sentence for sentence in messages)  # each failure ends
        assert all("no row is missing" in sentence for sentence in messages[1::2])


def test_rows_that_a_run_drops_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run(path, 0, 5)
    for start, dropped in ((5, 0), (3, 2), (0, 3)):
        with opened(path, start) as file:
            assert file.dropped == dropped


@pytest.mark.parametrize(("lines", "missing"), [([], 1), ([1, 2], 3), ([2, 3], 1), ([1, 3], 2), ([1, 1, 2, 3], 2)])
def test_a_row_missing_before_the_checkpoint_is_told_and_nothing_is_dropped(tmp_path, lines, missing):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row(step)) + "\n" for step in lines))
    before = path.read_bytes()
    with pytest.raises(InputError, match=rf"{path}.*step {missing} is missing or damaged"):
        opened(path, 3)
    assert path.read_bytes() == before


def test_a_file_that_is_closed_again_keeps_what_another_process_has_appended(tmp_path):
    path = tmp_path / "lines"
    file = LineFile(path, 0, DiskGuard(print))
    file.append_line(b"own\n")
    file.close()
    with path.open("ab") as other:
        other.write(b"another's\n")
    file.close()
    assert path.read_bytes() == b"own\nanother's\n"
