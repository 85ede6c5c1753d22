"""The log of events: what the schema knows, and what it survives. `check_events` compares those of runs with it."""

import contextlib
import json
import os
import resource
import threading
import time

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aegis.aegis_helpers import SCHEMA
from zaya_jax.aegis import events
from zaya_jax.aegis.events import EVENTS, EventLog, read_events
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.failure import FaultClass, Severity
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.state import VERDICT, write_verdict
from zaya_jax.run.progress_record import Phase


def test_the_schema_knows_every_class_and_phase():
    assert SCHEMA["properties"]["fault"]["enum"] == [str(fault) for fault in FaultClass]
    assert SCHEMA["properties"]["phase"]["enum"] == [phase.name.lower() for phase in Phase]


def test_a_log_is_continued_after_a_line_that_is_torn(tmp_path):
    log = EventLog(tmp_path, "node", FileWorker())
    log.attempt = 4
    log.write("start", "attempt")
    log.close()
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"v": 1, "id": 9, "atte')
    again = EventLog(tmp_path, "node", FileWorker())
    assert (again.attempt, again.write("start", "attempt")) == (4, 2)
    again.close()
    assert [event["id"] for event in read_events(tmp_path / EVENTS)] == [1, 2]


def test_a_log_that_another_process_may_write_is_left_alone_until_the_first_event(tmp_path):
    first = EventLog(tmp_path, "node", FileWorker())
    first.write("start", "attempt")
    assert first.close()
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"v": 1, "id": 2, ')  # it goes on
    before = (tmp_path / EVENTS).read_bytes()
    second = EventLog(tmp_path, "node", FileWorker(), gap=1000)
    assert (tmp_path / EVENTS).read_bytes() == before
    assert second.write("start", "attempt") == 1002
    assert second.close()
    assert [event["id"] for event in read_events(tmp_path / EVENTS)] == [1, 1002]


def test_of_a_log_without_end_the_last_events_count(tmp_path):
    path = tmp_path / EVENTS
    path.write_bytes(b"{}\n")
    os.truncate(path, 2**40)  # without blocks on the disk
    for written in (1, 2):
        log = EventLog(tmp_path, "node", FileWorker())
        assert log.write("start", "attempt") == written
        assert log.close()
        assert [event["id"] for event in read_events(path)] == [*range(1, written + 1)]
    assert path.stat().st_size > 2**40


@given(st.binary(max_size=300))
def test_any_file_is_read_without_harm(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("log") / EVENTS
    path.write_bytes(content)
    assert read_events(path) == []


@given(st.text(max_size=600), st.floats())
def test_any_text_and_number_makes_one_line(tmp_path_factory, text, number):
    folder = tmp_path_factory.mktemp("log")
    log = EventLog(folder, "node", FileWorker())
    log.write("detect", "code", severity=Severity.WARNING, text=text, seconds={"act": number})
    log.close()
    assert (folder / EVENTS).read_bytes().count(b"\n") == 1
    (event,) = read_events(folder / EVENTS)
    assert event["text"].isprintable()


@contextlib.contextmanager
def full(path, room):
    """Let files grow by no more than `room` bytes beyond the size of `path`, as on a disk that has no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 900), st.lists(st.sampled_from(list(Severity)), max_size=8)), max_size=4),
       st.booleans())  # fmt: skip
def test_a_full_disk_at_any_moment_loses_no_event(tmp_path_factory, times, is_quiet):
    folder = tmp_path_factory.mktemp("log")
    log = EventLog(folder, "node", files := FileWorker())
    written = 0
    for room, severities in times:
        with full(folder / EVENTS, room):
            for severity in severities:
                written = log.write("detect", "while-full", severity=severity, text="x" * 99)
            files.finish(60)
            for line in (folder / EVENTS).read_bytes().splitlines()[:-1]:
                json.loads(line)
        if is_quiet:  # no further event comes
            log.flush()
        else:
            written = log.write("detect", "after")
        files.finish(60)
        assert [event["id"] for event in read_events(folder / EVENTS)] == list(range(1, written + 1))
    assert log.close()


def test_events_that_memory_should_not_hold_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "_MOST_WAITING", 1000)
    log = EventLog(tmp_path, "node", files := FileWorker())
    with full(tmp_path / EVENTS, 0):
        last = [log.write("detect", "code") for _ in range(100)][-1]
        files.finish(60)
    log.write("detect", "after")
    assert log.close()
    kept = read_events(tmp_path / EVENTS)
    jsonschema.validate(kept[-1], SCHEMA)
    assert kept[-1]["dropped"] + len(kept) == last + 1
    assert kept[-1]["dropped"] > 0


def test_the_verdict_waits_for_space(tmp_path):
    (tmp_path / EVENTS).touch()
    with full(tmp_path / EVENTS, 0):
        writer = threading.Thread(target=write_verdict, args=(tmp_path, SupervisorExit.DONE, "Finished.", 1, 3))
        writer.start()
        time.sleep(0.1)
        assert not (tmp_path / VERDICT).exists()
    writer.join()
    assert json.loads((tmp_path / VERDICT).read_bytes())["name"] == "done"
