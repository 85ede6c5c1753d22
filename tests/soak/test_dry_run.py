"""The dry run of the 8B, on the machine of its bound: 3 minutes and 8 GB a phase on two cores."""

import json
import subprocess
import sys

import pytest

from tests.train_helpers import ROOT

SECONDS, BYTES = 180, 8e9


@pytest.mark.soak
@pytest.mark.parametrize("devices", [8, 64, 1024])
def test_every_phase_of_the_8b_is_compiled_within_minutes_and_little_memory(devices):
    command = [sys.executable, "-m", "zaya_jax.main", "--config", "configs/zaya1_8b.yaml", "--dry-run", "--devices",
               str(devices), "--hardware", "mi300x", "--json"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    phases = json.loads(done.stdout)["phases"]
    assert len(phases) > 3
    for phase in phases:
        proof = phase["compiled"]
        print(json.dumps({"devices": devices, "phase": phase["phase"], **proof}))
        assert proof["proof"] == "compiled"
        assert proof["seconds"] < SECONDS
        assert proof["host_bytes"] < BYTES
