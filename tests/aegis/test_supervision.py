"""One fault is one fault, however many events tell of it."""

import json
import time

from hypothesis import example, given, settings
from hypothesis import strategies as st

from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.aegis.goodput import measure_goodput
from zaya_jax.aegis.supervision_report import SAME_FAULT, format_report, format_status, list_faults

CLASSES = ("crash", "gpu", "host_memory", "network")


def event(number, kind, unix, attempt=1, **fields):
    return {"id": number, "kind": kind, "unix": unix, "time": str(unix), "attempt": attempt, "code": "x", "text": "",
            "cause": None, "severity": "error"} | fields  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.floats(0, 300), st.booleans()), max_size=8),
       st.sampled_from(CLASSES), st.integers(1, 5))  # fmt: skip
def test_what_ended_an_attempt_is_one_fault_and_other_faults_are_their_own(signs, fault, attempts):
    events, expected = [], 0
    for attempt in range(1, attempts + 1):
        start = 1000.0 * attempt
        for kind, at, is_line in signs:
            severity = "info" if is_line else "warning"
            events.append(event(len(events) + 1, "detect", start + at, attempt, fault=kind, severity=severity))
            expected += not is_line and not (kind == fault and 300 - at < SAME_FAULT)
        cause = event(len(events) + 1, "detect", start + 300, attempt, fault="crash", code="exit--9")
        events += [
            cause,
            event(len(events) + 2, "end", start + 300, attempt, fault=fault, code="end", cause=cause["id"]),
        ]
        expected += 1
    faults = list_faults(events)
    assert len(faults) == expected
    assert [each["fault"] for each in faults if each["code"] == "end"] == [fault] * attempts


def test_a_fault_that_ended_nothing_counts():
    assert len(list_faults([event(1, "detect", 1.0, fault="gpu"), event(2, "end", 2.0, code="finished")])) == 1


STEPS, SECONDS = st.integers(-1, 5), st.one_of(st.floats(0, 9), st.floats(), st.just(""), st.just(10**400))
FIELDS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["start", "end", "end", "detect", "decide", "recover", "inject"])},
    optional={"monotonic": SECONDS, "first_step": STEPS, "last_step": STEPS, "cause": STEPS, "attempt": st.just(2),
              "fault": st.sampled_from(["", "crash"]), "times": st.dictionaries(st.just("data"), SECONDS),
              "exit_statuses": st.lists(STEPS, max_size=1)},
)  # fmt: skip


@settings(max_examples=200)
@given(st.lists(FIELDS, max_size=6))
def test_events_of_any_content_are_read_or_left_out(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    written = [event(index, "start", float(index)) | fields for index, fields in enumerate([{"monotonic": 0.0}, *rows])]
    path.write_text("".join(f"{json.dumps({'v': 1} | each)}\n" for each in written))
    events = read_events(path)
    assert measure_goodput(events).steps >= 0
    list_faults(events)


ANY = st.one_of(
    st.none(), st.integers(-1, 10**400), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=1)
)
RANKS = st.one_of(ANY, st.lists(st.one_of(ANY, st.fixed_dictionaries(
    {"phase": st.just("data"), "rank": st.one_of(st.just(0), ANY)},
    optional={"step": st.one_of(st.just(1), ANY), "loss": ANY, "first_step": st.one_of(st.just(0), ANY),
              "times": st.one_of(ANY, st.dictionaries(st.sampled_from(["data", "\x1b[2J"]), ANY))},
)), max_size=2))  # fmt: skip


@settings(max_examples=200)
@given(RANKS, st.one_of(st.just(1), ANY), ANY, st.one_of(st.just(0.0), ANY))
@example([{"phase": "data", "rank": 0, "times": {}}], 1, 1, 0.0)
@example([{"phase": "data", "rank": 0, "times": {}, "first_step": 0, "step": None}], 1, 1, 0.0)
@example([{"phase": "data", "rank": 0, "times": {"data": 10**400}, "first_step": 0, "step": 1}], 1, 1, 0.0)
@example([], 1, 1, 10**400)
def test_a_state_of_any_content_is_described_or_left_out(tmp_path_factory, ranks, attempt, pid, unix):
    run = tmp_path_factory.mktemp("run")
    folder = run / "aegis" / "node"
    folder.mkdir(parents=True)
    (folder / EVENTS).write_text(json.dumps({"v": 1, "monotonic": 1.0} | event(1, "start", time.time())) + "\n")
    unix = time.time() if unix == 0 else unix
    state = {"unix": unix, "state": "running", "attempt": attempt, "pid": pid, "ranks": ranks}
    (folder / "state.json").write_text(json.dumps(state))
    for text in (format_status(run), format_report(run)):
        assert "Node node: " in text
        assert "\x1b" not in text
