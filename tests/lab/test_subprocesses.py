import functools
import os
import signal
from types import SimpleNamespace

import pytest

from zaya_jax.config import load_config
from zaya_jax.errors import InputError
from zaya_jax.lab.measure import timing
from zaya_jax.lab.measure.context_attention import simulate_devices
from zaya_jax.lab.measure.timing import interleave
from zaya_jax.lab.subprocesses import restored_environment, run_in_subprocess


def test_a_step_is_made_once_and_runs_in_another_process():
    with run_in_subprocess(functools.partial, os.getpid) as one, run_in_subprocess(functools.partial, os.getpid) as two:
        assert one() == one()
        assert len({one(), two(), os.getpid()}) == 3


def test_what_making_or_a_step_raises_is_raised_here():
    with pytest.raises(InputError, match=r"no_such\.yaml"), run_in_subprocess(load_config, "no_such.yaml"):
        pytest.fail("nothing was made")
    with (
        pytest.raises(RuntimeError, match="ZeroDivisionError"),
        run_in_subprocess(functools.partial, divmod, 1, 0) as step,
    ):
        step()


def test_the_process_ends_with_the_block():
    with run_in_subprocess(functools.partial, os.getpid) as step:
        pid = step()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_process_that_dies_or_is_killed_between_two_steps_is_told():
    with run_in_subprocess(functools.partial, os._exit, 3) as step, pytest.raises(RuntimeError, match="status 3"):
        step()
    with run_in_subprocess(functools.partial, os.getpid) as step:
        pid = step()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RuntimeError, match="status -9"):
            step()


def test_the_environment_inside_a_block_is_that_of_the_processes_started_there(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    before = dict(os.environ)
    with restored_environment():
        simulate_devices()
        with run_in_subprocess(functools.partial, os.getenv, "XLA_FLAGS") as step:
            assert step().startswith("--xla_cpu_enable_fast_math=false --xla_cpu_enable_con")
        assert os.environ["JAX_NUM_CPU_DEVICES"] == "8"
    assert dict(os.environ) == before


def test_a_step_may_start_processes():
    code = ("import multiprocessing as m, os; process = m.get_context('spawn').Process(target=os.getpid); "
            "process.start(); process.join(); assert process.exitcode == 0")  # fmt: skip
    with run_in_subprocess(functools.partial, exec, code) as step:
        step()


def test_steps_are_timed_in_turn_each_after_an_untimed_pass(monkeypatch):
    calls, now = [], [0.0]

    def step(name, seconds):
        def run():
            calls.append(name)
            now[0] += seconds
            return len(calls)

        return run

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda _: None))
    passes = interleave({"ours": step("ours", 1.0), "peer": step("peer", 3.0)}, 2)
    assert calls == ["ours", "ours", "peer", "peer"] * 2
    assert passes == {"ours": ([1.0, 1.0], [2, 6]), "peer": ([3.0, 3.0], [4, 8])}
