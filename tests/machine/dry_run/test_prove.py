import functools
import os
import pickle
import subprocess

import jax
import pytest

from zaya_jax.config import load_config
from zaya_jax.errors import InputError
from zaya_jax.machine.compilers.compiled import run_worker
from zaya_jax.machine.dry_run import prove, report

SMALL = ["train.batch.tokens=512", "model.num_layers=1", "model.vocab_size=64", "data.context=64"]
PLAIN = ["model.attention=gqa", "model.router=linear", "optimizer.matrices=adamw"]


def test_a_step_is_compiled_for_the_devices_there_are():
    assert jax.device_count() == 1
    assert prove.compile_simulated(load_config("configs/tiny.yaml", [*SMALL, *PLAIN]), 0) == {"proof": "compiled"}


def test_another_process_simulates_the_devices(monkeypatch):
    config, asked = load_config("configs/tiny.yaml", [*SMALL, "seed=5"]), []

    def run(command, input, env, **_):
        work = pickle.loads(input)  # noqa: S301 (of this process)
        asked.extend([work.func, work.args, env["JAX_NUM_CPU_DEVICES"], env["JAX_PLATFORMS"]])
        return subprocess.CompletedProcess(command, 0, b'A word of XLA.\n{"proof": "compiled", "host_bytes": 5}\n', b"")

    monkeypatch.setattr(subprocess, "run", run)
    proof = prove.prove(config, 0, 6)
    assert asked == [prove.compile_simulated, (config, 0), "6", "cpu"]
    assert proof.pop("seconds") >= 0
    assert proof == {"proof": "compiled", "host_bytes": 5}


def test_a_process_reports_its_memory_and_what_its_function_returns():
    result = run_worker(functools.partial(dict, answer=42), os.environ, "It cannot be done")
    assert 1e7 < result.pop("host_bytes") < 8e9
    assert result == {"answer": 42}


def test_a_step_that_does_not_compile_is_one_sentence():
    # Eight sequences do not split over three devices; the estimate would have said so first.
    config = load_config("configs/tiny.yaml", SMALL)
    with pytest.raises(InputError, match=r"^The step of phases\.train cannot be compiled for 3 devices: .*"):
        report.prove(config, 0, 3)
