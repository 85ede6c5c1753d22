"""The request to end; tests/train/test_loop.py has what a run does then."""

import os
import signal
import threading
import time

import pytest

from tests.parallel.processes_helpers import finish_job, start_job
from tests.train_helpers import differing, restore, write_run
from zaya_jax.checkpoint.folder import saved_steps
from zaya_jax.config import load_config
from zaya_jax.parallel.preemption import Preemption
from zaya_jax.train.run_folder import METRICS


def ask():
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_is_heeded_in_the_block_alone():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as stop:
        assert not stop.reached()
        ask()
        assert stop.reached()
        assert stop.reached()  # and remembered
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_does_what_it_did_before():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with Preemption() as stop:
            ask()
            assert heard == []
            ask()
            assert heard == [1]
            assert stop.reached()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_the_signal_is_left_alone():
    found = []

    def listen():
        with Preemption() as stop:
            found.append((signal.getsignal(signal.SIGTERM), stop.reached()))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [(signal.getsignal(signal.SIGTERM), False)]


def ask_one_of(folder, run, processes, sent_to):
    """Start a job, ask one of its processes to end after some rows, and give how each ended."""
    command = ["--config", str(write_run(folder, run)), "train.batch.micro=1", "evaluation.batch=4", "sample.tokens=1",
               'phases=[{"tokens": 38400, "schedule": {"warmup_tokens": 256}}]', "checkpoint.every=1000",
               "evaluation.every=1000"]  # fmt: skip
    job = start_job(folder, [command] * processes, devices=2)
    metrics = folder / run / METRICS
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 20:
        time.sleep(0.02)
        assert [process.poll() for process in job] == [None] * processes, finish_job(folder, job)
    job[sent_to].send_signal(signal.SIGTERM)
    return command, finish_job(folder, job)


@pytest.mark.soak
@pytest.mark.parametrize(("processes", "sent_to"), [(1, 0), (2, 0), (2, 1)])
def test_real_processes_save_at_one_step_and_go_on_bitwise(tmp_path, processes, sent_to):
    command, found = ask_one_of(tmp_path, "asked", processes, sent_to)
    assert [status for status, _ in found] == [143] * processes, found
    for _, text in found:
        assert text.count("Stopped: asked to end (SIGTERM) after step ") == 1
        assert "which is saved" in text
        assert "Traceback" not in text
    (step,) = saved_steps(tmp_path / "asked" / "checkpoints")
    assert 20 <= step < 300
    for _, text in found:
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
