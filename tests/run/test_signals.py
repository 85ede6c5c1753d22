"""Real signals to a real process; tests/job/test_preemption.py has those that a run saves for."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.compile_helpers import CHEAP
from tests.train_helpers import ROOT, write_run
from zaya_jax.run.checkpoints import saved_steps
from zaya_jax.run.folder import METRICS
from zaya_jax.run.progress_record import NAME, SIZE, VARIABLE, read_progress
from zaya_jax.run.signals import NAMES, Interrupts, Listener, print_error

pytestmark = pytest.mark.usefixtures("signals_arrive")


def start(path, *overrides):
    """Start a run in a new process group, as a terminal does, and wait until its signal handlers are installed."""
    environment = {**os.environ, "XLA_FLAGS": CHEAP}
    run = subprocess.Popen(
        [sys.executable, "-m", "zaya_jax.main", "--config", str(path), "sample.tokens=1", *overrides], cwd=ROOT,
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    while not _listens(run.pid):
        assert run.poll() is None, run.communicate()
        time.sleep(0.001)
    return run


def _listens(pid):
    return signal.SIGTERM in _signals(pid, "SigCgt")  # which Python leaves alone


def _signals(pid, field):
    """The signals that a process catches (SigCgt) or blocks (SigBlk)."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line for line in status.splitlines() if line.startswith(field)).split()[1], 16)
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


def test_processes_that_a_run_starts_do_not_end_with_the_terminal():
    code = """if True:
        import signal, subprocess, sys
        from multiprocessing import resource_tracker
        from zaya_jax.run.signals import interrupts_kept_from_children
        with interrupts_kept_from_children():
            worker = subprocess.Popen(["sleep", "60"])
        print(worker.pid, resource_tracker._resource_tracker._pid, flush=True)
        sys.stdin.read()
        worker.kill()
        sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    """
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as run:  # fmt: skip
        assert run.stdout is not None
        worker, tracker = run.stdout.readline().split()
        assert {signal.SIGINT, signal.SIGHUP} <= _signals(worker, "SigBlk")
        assert signal.SIGHUP in _signals(tracker, "SigBlk")
        run.communicate()
    assert run.returncode == 0  # nothing stays blocked


@pytest.mark.parametrize("number", NAMES)
def test_a_process_that_imports_ends_at_once_with_a_sentence_and_an_exit_record(tmp_path, monkeypatch, number):
    os.truncate(record := os.memfd_create(NAME), SIZE)
    monkeypatch.setenv(VARIABLE, f"/proc/{os.getpid()}/fd/{record}")
    run = start(write_run(tmp_path))
    time.sleep(0.3)
    os.killpg(run.pid, number)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 128 + number
    assert output.startswith(f"Stopped by {NAMES[number]}.")
    assert output.count("\n") == 1
    assert "newest checkpoint" not in output
    assert read_progress(record).exit_record.status == run.returncode
    os.close(record)


def test_listeners_nest_and_leave_nothing_behind():
    outer, inner = [], []
    before = signal.getsignal(signal.SIGTERM)
    with Listener(outer.append) as first:
        with Listener(inner.append) as second:
            os.kill(os.getpid(), signal.SIGTERM)
            while not inner:
                time.sleep(0.001)
            second.pass_on(signal.SIGTERM)
        while not outer:
            time.sleep(0.001)
        assert (first.nested, second.nested) == (False, True)
    assert (outer, inner) == ([signal.SIGTERM], [signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("presses", [1, 2])
def test_a_signal_is_answered_though_nobody_reads_the_output_any_more(presses):
    code = """if True:
        import os, signal, sys, time
        from zaya_jax.run.signals import NAMES, Listener, say_and_exit, warn
        seen = []
        def answer(number):
            seen.append(number)
            warn("first") if len(seen) < int(sys.argv[1]) else say_and_exit("last", 128 + number)
        Listener(answer).__enter__()
        for number in range(int(sys.argv[1])):
            os.kill(os.getpid(), signal.SIGINT)
            while len(seen) <= number:
                time.sleep(0.001)
        time.sleep(60)  # the last answer ends the process
    """
    reader, writer = os.pipe()
    os.close(reader)
    try:
        run = subprocess.run([sys.executable, "-c", code, str(presses)], cwd=ROOT, stdout=writer, stderr=writer,
                             check=False, timeout=60)  # fmt: skip
    finally:
        os.close(writer)
    assert run.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (
            "gc.callbacks.append(lambda *_: gc.callbacks.pop() and press()); gc.collect(); time.sleep(60)",
            "cleaned up\n",
        ),
        ("try: press()\nexcept BaseException as error: raise ImportError('x') from error", "cleaned up\n"),
        (
            "ctypes.pythonapi.PyRun_SimpleString(b'import __main__; __main__.press()')\n"
            "try: raise ImportError\nexcept ImportError: pass",
            "",
        ),
        ("try: press()\nexcept: \n try: time.sleep(0.5), press()\n except: time.sleep(60)", ""),
    ],
    ids=["dropped by a callback", "the cause of an import's error", "printed by an import", "a second press"],
)
def test_ctrl_c_ends_a_command_also_if_a_callback_drops_it_and_a_second_one_at_once(work, said):
    code = """if True:
        import ctypes, gc, os, signal, sys, time
        from zaya_jax.run.command_output import prepare_streams, run_command
        prepare_streams()
        def press():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        def run():
            try:
                exec(sys.argv[1])
            finally:
                print("cleaned up", flush=True)
        sys.exit(run_command(run))
    """
    command = [sys.executable, "-c", code, work]
    run = subprocess.run(command, cwd=ROOT, check=False, timeout=50, text=True, capture_output=True)
    assert (run.stdout, run.stderr, run.returncode) == (said, "Stopped by Ctrl-C.\n", 130)


def test_a_block_that_ctrl_c_ends_has_no_second_press_and_a_dropped_one_arrives_inside_it(monkeypatch):
    def state():
        return signal.getsignal(signal.SIGINT), sys.unraisablehook, sys.excepthook, signal.set_wakeup_fd(-1)

    def press():
        with Interrupts(exits=False):
            for _ in range(2):
                time.sleep(0.3)
                with contextlib.suppress(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.1)
            time.sleep(0.1)  # so that the second press is received before it would be forgotten
            Interrupts.repeat()

    monkeypatch.setattr(Interrupts, "_repeat", None)
    before = state()
    with pytest.raises(KeyboardInterrupt):
        press()
    assert state() == before
    with Interrupts(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: Interrupts().__enter__().nested).result() is False
    assert state() == before


@pytest.mark.soak
@pytest.mark.parametrize("workers", [0, 1])
def test_at_any_moment_one_or_two_signals_end_a_run_and_the_next_start_resumes(tmp_path, workers):
    path, rng = write_run(tmp_path), random.Random(workers)
    settings = ['phases=[{"tokens": 38400, "schedule": {"warmup_tokens": 256}}]', "checkpoint.every=50",
                "evaluation.every=70", f"data.workers={workers}"]  # fmt: skip
    uninterrupted = start(path, *settings, f"run_dir={tmp_path / 'whole'}")
    began = time.monotonic()
    assert "Run folder" in uninterrupted.communicate()[0]
    length = time.monotonic() - began
    for _ in range(12):
        run = start(path, *settings)
        number, presses = rng.choice(list(NAMES)), rng.choice((1, 2))
        time.sleep(rng.uniform(0, 1.1 * length))
        for _ in range(presses):
            if run.poll() is None:
                os.killpg(run.pid, number)
            time.sleep(0.05)
        output = run.communicate(timeout=60)[0]
        assert run.returncode in (128 + number, 0), output
        assert "Traceback" not in output
        assert "leaked" not in output
        assert "Error" not in output
    assert "Run folder" in start(path, *settings).communicate()[0]
    assert (tmp_path / "run" / METRICS).read_bytes() == (tmp_path / "whole" / METRICS).read_bytes()


@pytest.mark.soak
def test_a_killed_data_worker_ends_a_run_with_a_sentence_and_a_checkpoint(tmp_path):
    settings = ['phases=[{"tokens": 384000, "schedule": {"warmup_tokens": 256}}]', "checkpoint.every=10000",
                "evaluation.every=10000", "data.workers=2"]  # fmt: skip
    run, metrics = start(write_run(tmp_path), *settings), tmp_path / "run" / METRICS
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 20:
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid,args", "--ppid", str(run.pid)], capture_output=True, text=True, check=True
    )
    workers = [int(line.split()[0]) for line in listed.stdout.splitlines() if "spawn_main" in line]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 1
    assert "Traceback" not in output
    assert "leaked" not in output
    last = output.splitlines()[-1]
    assert last.startswith("Stopped: A data worker process was killed (signal 9), probably because memory ran out.")
    assert "data.workers (now 2;" in last
    (step,) = saved_steps(tmp_path / "run" / "checkpoints")
    assert f"Step {step} is saved." in last
    assert metrics.read_bytes().count(b"\n") == step


def test_the_last_sentence_is_said_though_no_thread_can_start(monkeypatch, capfd):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    print_error("Stopped.")
    assert capfd.readouterr().err == "Stopped.\n"


def test_what_was_printed_before_the_last_sentence_is_waited_for(monkeypatch, capfd):
    class Slow:
        def flush(self):
            time.sleep(0.1)
            os.write(1, b"printed\n")

    monkeypatch.setattr(sys, "stdout", Slow())
    print_error("Stopped.")
    assert capfd.readouterr() == ("printed\n", "Stopped.\n")
