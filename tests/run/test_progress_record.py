"""A reader of the progress record sees what was written, or nothing: never a mixture, and never garbage."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train_helpers import ROOT
from zaya_jax.errors import Reason
from zaya_jax.run.progress_record import (
    NAME,
    SIZE,
    VARIABLE,
    Phase,
    ProgressRecord,
    read_progress,
    record_from_environment,
)


@pytest.fixture
def memory():
    file = os.memfd_create(NAME)
    os.truncate(file, SIZE)
    yield file
    os.close(file)


def open_record(file: int) -> ProgressRecord:
    return record_from_environment({VARIABLE: f"/proc/{os.getpid()}/fd/{file}"})


def test_a_process_that_waited_for_its_place_has_written_as_often_as_one_that_did_not(memory):
    """The supervisor takes the process with fewer writes for the one that hangs."""
    writes = []
    for waits in (False, True):
        record = open_record(memory)
        if waits:
            record.restart()
        record.enter(Phase.JOIN)
        writes.append(read_progress(memory).writes)
    assert writes[0] == writes[1]


def test_an_empty_record_is_no_progress(memory):
    assert read_progress(memory) is None


def test_a_reader_sees_what_was_written(memory):
    record = open_record(memory)
    record.enter(Phase.COMPILE)
    record.start_training(40, Path("run"))
    with record.within(Phase.EVALUATE):
        assert read_progress(memory).phase is Phase.EVALUATE
    record.complete_step(41, 2.5, 0.125)
    progress = read_progress(memory)
    assert progress[1:7] == (os.getpid(), Phase.COMPILE, 41, 40, 2.5, 0.125)
    assert progress.exit_record is None
    assert progress.longest[Phase.EVALUATE] == progress.seconds[Phase.EVALUATE] > 0


def test_times_add_up_to_the_life_of_the_record(memory, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    record = open_record(memory)
    for phase in (Phase.DATA, Phase.DISPATCH, Phase.DATA, Phase.DEVICE_WAIT):
        record.enter(phase)
    assert {phase: read_progress(memory).seconds[phase] for phase in Phase if read_progress(memory).seconds[phase]} == {
        Phase.START: 10, Phase.DATA: 20, Phase.DISPATCH: 10,
    }  # fmt: skip
    assert read_progress(memory).longest[Phase.DATA] == 10


@given(st.text(st.characters()), st.integers(-(2**31), 2**31 - 1), st.booleans(), st.sampled_from(Reason))
def test_the_first_exit_record_is_kept(sentence, status, is_origin, reason):
    file = os.memfd_create(NAME)
    os.truncate(file, SIZE)
    record = open_record(file)
    record.end(status, sentence, is_origin=is_origin, reason=reason)
    record.end(7, "second", is_origin=True)
    record.enter(Phase.DATA)
    progress = read_progress(file)
    os.close(file)
    assert progress.phase is Phase.END
    written = sentence.encode(errors="backslashreplace")[:1024]  # a path in it need not be UTF-8
    assert progress.exit_record[:3] == (status, written.decode(errors="replace"), is_origin)
    assert progress.exit_record.reason is reason


def test_what_the_process_before_left_can_be_read(memory, monkeypatch):
    assert read_progress(memory, before=True) is None
    first = open_record(memory)
    assert read_progress(memory, before=True) is None
    first.start_training(0, Path("run"))
    first.complete_step(1, 2.5, 0.125)
    first.end(0, "Done.", is_origin=True)
    left = read_progress(memory)
    monkeypatch.setattr(os, "getpid", lambda: 1)  # another process
    for _ in range(2):  # which opens it early, and again once all is imported
        second = ProgressRecord(Path(f"/proc/self/fd/{memory}"))
    second.end(2, "The command line is invalid.", is_origin=True)
    assert read_progress(memory, before=True) == left
    assert read_progress(memory).exit_record.status == 2


@given(st.binary(max_size=SIZE + 8))
def test_garbage_is_no_progress(content):
    file = os.memfd_create(NAME)
    os.write(file, content)
    assert read_progress(file) is None
    os.close(file)


@given(st.integers(16, 16 + 48 + 3), st.integers(1, 255))
def test_a_torn_head_is_no_progress(offset, difference):
    file = os.memfd_create(NAME)
    os.truncate(file, SIZE)
    record = open_record(file)
    record.complete_step(3, 1.0, 1.0)
    byte = os.pread(file, 1, offset)[0]
    os.pwrite(file, bytes([byte ^ difference]), offset)
    assert read_progress(file) is None
    record.complete_step(4, math.nan, math.inf)
    assert read_progress(file).step == 4
    os.close(file)


@pytest.mark.parametrize("path", ["", "/proc/1/fd/999999", "/dev/null", "."])
def test_without_a_supervisor_a_record_is_memory_that_nobody_reads(path):
    record_from_environment({VARIABLE: path}).enter(Phase.JOIN)


def test_a_reader_never_sees_a_mixture_of_two_writes(memory):
    writer = (
        "from zaya_jax.run.progress_record import *\n"
        "record = record_from_environment()\n"
        "print(flush=True)\n"
        "for step in range(10**9): record.complete_step(step, step, step)"
    )
    environment = {**os.environ, VARIABLE: f"/proc/{os.getpid()}/fd/{memory}"}
    process = subprocess.Popen([sys.executable, "-c", writer], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    process.stdout.readline()
    read, deadline = {}, time.monotonic() + 20
    while len(read) < 100 and time.monotonic() < deadline:
        if (progress := read_progress(memory)) is not None:
            read[progress.step] = progress
    process.kill()
    process.communicate()
    assert len(read) == 100
    assert all(progress.loss == progress.grad_norm == step for step, progress in read.items() if step)
