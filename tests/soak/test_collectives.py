"""The sweep of collectives over jobs of two and four processes."""

import json
import os
import subprocess
import sys

import pytest

from tests.job.processes_helpers import free_port
from tests.lab.helpers import parse_rows
from tests.train_helpers import ROOT
from zaya_jax.lab.measure.collectives.operations import COLLECTIVES

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("processes", [2, 4])
def test_results_are_right_over_processes(processes, tmp_path):
    flags = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes), "--max-bytes", "64K",
             "--factor", "64", "--repeats", "3", "--dtypes", "float32", "bfloat16"]  # fmt: skip
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
    job = [
        subprocess.Popen(
            [sys.executable, "-m", "zaya_jax.machine", "collectives", *flags, "--process", str(index),
             "--output", str(tmp_path / f"{index}.json")],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        )
        for index in range(processes)
    ]  # fmt: skip
    tables = [process.communicate(timeout=500)[0] for process in job]
    assert [process.returncode for process in job] == [0] * processes
    rows = parse_rows(tables[0])
    assert len(rows) == len(COLLECTIVES) * 2 * 3
    assert {(row["wrong"], row["wrong_in_place"]) for row in rows} == {("0", "0")}
    assert not parse_rows(tables[1])
    result = json.loads((tmp_path / "0.json").read_text())
    assert {row["operation"] for row in result["results"]} >= {"all_reduce", "reduce_scatter_via_allreduce"}
