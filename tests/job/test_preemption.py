"""The request to end; tests/train/test_fit.py has what a run does then."""

import os
import signal
import threading
import time

import pytest

from tests.job.processes_helpers import finish_job, start_job
from tests.train_helpers import differing, restore, write_run
from zaya_jax.config import load_config
from zaya_jax.job.preemption import Preemption
from zaya_jax.run.checkpoints import saved_steps
from zaya_jax.run.folder import METRICS
from zaya_jax.run.signals import NAMES

pytestmark = pytest.mark.usefixtures("signals_arrive")


@pytest.mark.parametrize(
    ("number", "name", "status"),
    [(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130), (signal.SIGHUP, "SIGHUP", 129)],
)
def test_it_is_heeded_in_the_block_alone_and_once_there_is_something_to_save(capfd, number, name, status):
    received = []
    before = signal.signal(number, lambda *_: received.append(1))
    try:
        handler = signal.getsignal(number)
        with Preemption() as stop:
            os.kill(os.getpid(), number)
            assert (received, stop.reached()) == ([1], False)  # does what it did before
            stop.arm()
            os.kill(os.getpid(), number)
            assert (received, stop.reached()) == ([1], True)
            assert stop.reached()  # and remembered
            assert (NAMES[stop.number], 128 + stop.number) == (name, status)
            os.kill(os.getpid(), number)
            assert received == [1, 1]  # a second one, too
        assert signal.getsignal(number) is handler
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(number, before)
    assert capfd.readouterr().err == (f"{name}: saving after this step, then exiting. Another {name} exits at once.\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_under_a_supervisor_a_second_signal_is_no_second_request(capfd, number):
    received = []
    before = signal.signal(number, lambda *_: received.append(1))
    try:
        with Preemption(is_supervised=True) as stop:
            os.kill(os.getpid(), number)
            assert received == [1]  # nothing to save yet
            stop.arm()
            for _ in range(3):
                os.kill(os.getpid(), number)
            assert (received, stop.reached()) == ([1], True)
    finally:
        signal.signal(number, before)
    assert capfd.readouterr().err == f"{NAMES[number]}: saving after this step, then exiting.\n"


def test_a_signal_that_is_ignored_as_under_nohup_stays_ignored(capfd):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Preemption() as stop:
        stop.arm()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.reached()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.reached(), stop.number) == (True, signal.SIGTERM)
    assert "SIGHUP" not in capfd.readouterr().err


def test_in_another_thread_the_signal_is_left_alone():
    seen = []

    def listen():
        with Preemption() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.reached()))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [(signal.getsignal(signal.SIGTERM), False)]


def ask_one_of(folder, run, processes, sent_to, number):
    """Start a job, ask one of its processes to end after some rows, and give how each ended."""
    command = ["--config", str(write_run(folder, run)), "train.batch.micro_batch=1", "evaluation.batch_size=4",
               "sample.tokens=1",
               'phases=[{"tokens": 38400, "schedule": {"warmup_tokens": 256}}]', "checkpoint.every=1000",
               "evaluation.every=1000"]  # fmt: skip
    job = start_job(folder, [command] * processes, devices=2)
    metrics = folder / run / METRICS
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 20:
        time.sleep(0.02)
        assert [process.poll() for process in job] == [None] * processes, finish_job(folder, job)
    for process in job if sent_to is None else [job[sent_to]]:
        process.send_signal(number)
    return command, finish_job(folder, job)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("processes", "sent_to", "number"),
    [(1, 0, signal.SIGTERM), (1, 0, signal.SIGINT), (1, 0, signal.SIGHUP), (2, 0, signal.SIGTERM),
     (2, 1, signal.SIGTERM), (2, None, signal.SIGINT)],
)  # fmt: skip
def test_real_processes_save_at_one_step_and_go_on_bitwise(tmp_path, processes, sent_to, number):
    command, outcomes = ask_one_of(tmp_path, "asked", processes, sent_to, number)
    assert [status for status, _ in outcomes] == [128 + number] * processes, outcomes
    for _, text in outcomes:
        assert text.count(f"Stopped by {NAMES[number]} after step ") == 1
        assert "which is saved" in text
        assert "Traceback" not in text
    (step,) = saved_steps(tmp_path / "asked" / "checkpoints")
    assert 20 <= step < 300
    for _, text in outcomes:
        assert f"after step {step}, which is saved" in text
    finished = finish_job(tmp_path, start_job(tmp_path, [command] * processes, devices=2))
    assert [status for status, _ in finished] == [0] * processes, finished
    alone = ["--config", str(write_run(tmp_path, "alone")), *command[2:]]
    finished = finish_job(tmp_path, start_job(tmp_path, [alone] * processes, devices=2))
    assert [status for status, _ in finished] == [0] * processes, finished
    first, second = (load_config(tmp_path / f"{run}.yaml", command[2:]) for run in ("asked", "alone"))
    (state, data), (expected, place) = restore(first, 300), restore(second, 300)
    assert not differing(state, expected)
    assert data == place
    assert (tmp_path / "asked" / METRICS).read_bytes() == (tmp_path / "alone" / METRICS).read_bytes()
