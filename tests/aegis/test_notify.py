"""The site's command gets each severe event, and the supervisor never waits for it: real processes."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.aegis.metrics_helpers import ROOT
from zaya_jax.aegis.events import EventLog
from zaya_jax.aegis.failure import Severity
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.notify import Notifier
from zaya_jax.aegis.policy import NotifyPolicy, load_policy
from zaya_jax.aegis.processes import kill_orphans
from zaya_jax.errors import InputError

SHELL = "/bin/sh"
# Other tests of this process may have started threads; a supervisor has one.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def notifier(script, *arguments, **options):
    return Notifier(NotifyPolicy((SHELL, "-c", script, *map(str, arguments)), **options))


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_command_gets_the_event_as_one_line_and_its_arguments_as_they_are(tmp_path):
    # As `sh -c` would read it: nothing of it is expanded.
    argument = f"$(touch {tmp_path}/no); * 'x"
    sent = notifier('cat > "$0/event"; printf %s "$1" > "$0/argument"', tmp_path, argument)
    event = {"severity": "error", "text": "a\nb ∞ " + "x" * 200_000}  # more than a pipe holds
    sent.send(event)
    sent.close(60.0)
    text = (tmp_path / "event").read_text()
    assert text.count("\n") == 1
    assert json.loads(text) == event
    assert (tmp_path / "argument").read_text() == argument
    assert sorted(path.name for path in tmp_path.iterdir()) == ["argument", "event"]


@pytest.mark.parametrize(
    ("least", "severities"),
    [("warning", ["warning", "error", "fatal"]), ("error", ["error", "fatal"]), ("fatal", ["fatal"])],
)
def test_only_events_that_are_severe_enough_are_sent(tmp_path, least, severities):
    sent = notifier('cat >> "$0/events"', tmp_path, severity=least)
    log = EventLog(tmp_path, "node", FileWorker(), sent.send)
    for severity in Severity:
        log.write("detect", "x", severity=severity)
        sent.close(60.0)
    log.close()
    sent.send({})
    sent.close(60.0)
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["severity"] for event in events] == severities
    assert events == [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()][-len(events) :]


def test_without_a_command_nothing_happens():
    sent = Notifier(NotifyPolicy())
    sent.send({"severity": "fatal"})
    assert not sent.pids


def test_ten_commands_run_at_most_and_nobody_waits_for_them(tmp_path):
    sent = notifier("exec sleep 60", timeout_seconds=60.0)
    for _ in range(12):
        sent.send({"severity": "fatal"})
        sent.poll()
    assert len(sent.pids) == 10
    pids = sent.pids
    sent.close(0.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_the_whole_session_is_killed_at_the_timeout(tmp_path):
    sent = notifier('trap "" TERM; sleep 60 & echo $! > "$0/pid"; wait', tmp_path, timeout_seconds=0.3)
    sent.send({"severity": "fatal"})
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    assert child.pid in sent.pids
    assert os.getsid(child.pid) != os.getsid(0)
    wait_until(lambda: sent.poll() or not sent.pids)
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert not sent.pids


@pytest.mark.parametrize("command", [(SHELL, "-c", "exit 3"), ("/no/such/command",), (SHELL, "\0"), ("/etc/passwd",)])
def test_failures_raise_nothing(command):
    sent = Notifier(NotifyPolicy(command))
    sent.send({"severity": "fatal"})
    sent.close(60.0)
    assert not sent.pids


def test_an_event_that_is_not_json_starts_nothing():
    sent = notifier("sleep 60")
    sent.send({"severity": "fatal", "x": object()})
    assert not sent.pids


def test_whoever_ends_orphans_can_spare_the_commands():
    sent = notifier("sleep 60; true", timeout_seconds=60.0)  # a shell with a child
    sent.send({"severity": "fatal"})
    wait_until(lambda: len(sent.pids) == 2)
    others = {child.pid for child in psutil.Process().children(recursive=True)} - sent.pids
    kill_orphans(sent.pids | others)
    assert len(sent.pids) == 2
    sent.close(0.0)


@pytest.mark.parametrize("flight", ["setsid sleep 60", "setsid sh -c 'setsid sleep 60 & exit 0' & wait",
                                    "env -i setsid sleep 60", "(setsid sleep 60 &) & exit 0",
                                    "(env -i setsid sh -c 'sleep 60 & exit 0' &); exec sleep 60"])  # fmt: skip
def test_what_leaves_the_session_of_a_command_ends_at_its_timeout_too(tmp_path, flight):
    script = f"""
import contextlib, sys, time
import psutil
from zaya_jax.aegis.notify import Notifier, NotifyPolicy
from zaya_jax.aegis.processes import adopt_orphans

def sleepers():
    left = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if child.status() != psutil.STATUS_ZOMBIE and child.name() == "sleep":
                left.append(child)
    return left

adopt_orphans()
sent = Notifier(NotifyPolicy(("/bin/sh", "-c", {flight!r}), "fatal", 2.0))
sent.send({{"severity": "fatal"}})
while not sleepers():
    time.sleep(0.01)
assert {{child.pid for child in sleepers()}} <= sent.pids
while sent.poll() or sent.pids:
    time.sleep(0.01)
deadline = time.monotonic() + 5  # a killed process may take a moment to end
while sleepers() and time.monotonic() < deadline:
    time.sleep(0.01)
assert not sleepers()
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)


def test_a_command_ends_with_its_supervisor():
    script = ("import sys, time; from zaya_jax.aegis.notify import Notifier, NotifyPolicy; "
              "sent = Notifier(NotifyPolicy(('/bin/sleep', '60'))); sent.send({'severity': 'fatal'}); "
              "print(*sent.pids, flush=True); time.sleep(60)")  # fmt: skip
    supervisor = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    command = psutil.Process(int(supervisor.stdout.readline()))
    supervisor.kill()
    supervisor.communicate()
    wait_until(lambda: not command.is_running() or command.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("command: [mail]", "notify.command is ['mail'], but must be a list that starts with the absolute path"),
        ("command: [/etc/passwd]", "of an executable file."),
        ("command: /bin/true", "notify.command"),
        ("timeout_seconds: 0", "notify.timeout_seconds is 0.0, but must be greater than 0."),
        ("severity: info", "notify.severity"),
    ],
)
def test_a_policy_is_checked(tmp_path, text, words):
    path = tmp_path / "policy.yaml"
    path.write_text(f"notify:\n  {text}\n")
    with pytest.raises(InputError) as caught:
        load_policy(path)
    assert words in str(caught.value)


def test_a_policy_names_the_command(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("notify: {command: [/bin/sh, -c, 'mail root'], severity: fatal, timeout_seconds: 5}\n")
    assert load_policy(path).notify == NotifyPolicy((SHELL, "-c", "mail root"), "fatal", 5.0)
