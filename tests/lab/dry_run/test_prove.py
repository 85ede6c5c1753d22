import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from zaya_jax.config import load_config, to_yaml
from zaya_jax.errors import InputError
from zaya_jax.lab import compile_worker
from zaya_jax.lab.predict.compilers.compiled import FACTS
from zaya_jax.lab.predict.dry_run import dry_run_report as report

SMALL = ["train.batch.tokens=512", "model.num_layers=1", "model.vocab_size=64", "data.context=64"]
PLAIN = ["model.attention=gqa", "model.router=linear", "optimizer.matrices=adamw"]


def test_a_step_is_compiled_for_the_devices_there_are(tmp_path):
    assert jax.device_count() == 1
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config("configs/tiny.yaml", [*SMALL, *PLAIN])), encoding="utf-8")
    compile_worker.prove_step("1", "0", str(path), str(tmp_path))
    proof = json.loads((tmp_path / FACTS).read_text(encoding="utf-8"))
    assert proof["proof"] == "compiled"
    assert 1e8 < proof["host_bytes"] < 8e9


def test_another_process_simulates_the_devices(monkeypatch):
    config, asked = load_config("configs/tiny.yaml", [*SMALL, "seed=5"]), []

    def run(command, env, **_):
        asked.extend([command[:6], load_config(command[6]), env["JAX_NUM_CPU_DEVICES"], env["JAX_PLATFORMS"]])
        (Path(command[7]) / FACTS).write_text('{"proof": "compiled", "host_bytes": 5}', encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    proof = report.prove(config, 0, 6)
    assert asked == [[sys.executable, "-m", "zaya_jax.lab.compile_worker", "proof", "6", "0"], config, "6", "cpu"]
    assert proof.pop("seconds") >= 0
    assert proof == {"proof": "compiled", "host_bytes": 5}


def test_a_step_that_does_not_compile_is_one_sentence():
    # Eight sequences do not split over three devices; the estimate would have said so first.
    config = load_config("configs/tiny.yaml", SMALL)
    with pytest.raises(InputError, match=r"^The step of phases\.train cannot be compiled for 3 devices: .*"):
        report.prove(config, 0, 3)
