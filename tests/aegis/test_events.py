"""The log of events: what the schema knows, and what it survives. `check_events` compares those of runs with it."""

import os

from hypothesis import given
from hypothesis import strategies as st

from tests.aegis.aegis_helpers import SCHEMA
from zaya_jax.aegis.events import EventLog
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.observation import FaultClass, Severity
from zaya_jax.run.progress_record import Phase
from zaya_jax.run.supervision import EVENTS, read_events


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


def test_a_full_disk_does_not_end_the_supervisor(tmp_path):
    log = EventLog(tmp_path, "node", FileWorker())
    os.close(log._file)
    log._file = os.open("/dev/full", os.O_WRONLY)
    for severity in Severity:
        log.write("detect", "code", severity=severity)
    log.close()
