"""The measurements that a run begins with, over its life: on real runs, of an emulated table of the CPU."""

import json
import shutil
from pathlib import Path

import pytest

from tests.train.test_interruption import copied_run
from tests.train_helpers import STEADY, change
from zaya_jax.config import PhaseConfig
from zaya_jax.ops.kernel_table import REFERENCE, KernelTable, own_table, parse_table
from zaya_jax.parallel.kernels import TABLE
from zaya_jax.run.manifest import read_manifest
from zaya_jax.train.fit import run_training

pytestmark = pytest.mark.usefixtures("quick")
SAID = "Results will not be bitwise identical"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def measured(sizes: list) -> KernelTable:
    """Write one's own table for this CPU."""
    tree = {"device": "cpu", "operations": {"residual_norm": {"sources": "0", "sizes": sizes}}}
    own_table("cpu").parent.mkdir(parents=True, exist_ok=True)
    own_table("cpu").write_text(json.dumps(tree))
    return parse_table(tree, "cpu", "")


def train(config, steps):
    return Path(run_training(change(config, {"phases": (PhaseConfig(steps * 128, schedule=STEADY),)})).run_dir)


def recorded(run, step):
    """The digest in a checkpoint."""
    return read_manifest(run / "checkpoints" / str(step)).metadata["environment"]["kernels"]


def test_a_run_keeps_the_measurements_that_it_began_with(finished, tmp_path, capsys):
    config = change(finished[0], {"run_dir": str(tmp_path / "run")})
    first = measured([])
    run = train(config, 2)
    assert (run / TABLE).read_text() == first.text
    assert recorded(run, 2) == first.digest
    second = measured([{"dtype": "float32", "rows": 1, "widths": [], "implementation": REFERENCE, "tiles": {}}])
    assert second.digest != first.digest
    assert recorded(train(config, 3), 3) == first.digest
    assert SAID not in capsys.readouterr().out
    (run / TABLE).unlink()
    assert recorded(train(config, 4), 4) is None
    assert f"Resuming with kernels=null; the checkpoint was saved with kernels={first.digest}. {SAID}" in (
        capsys.readouterr().out.replace("'", "").replace("None", "null")
    )
    shutil.rmtree(run)
    assert recorded(train(config, 2), 2) == second.digest


def test_a_run_that_began_without_measurements_goes_on_without(finished, tmp_path, capsys):
    config = copied_run(finished, tmp_path)
    measured([])
    run = train(config, 14)
    assert not (run / TABLE).exists()
    assert recorded(run, 14) is None
    assert SAID not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", json.dumps({"device": "NVIDIA H200", "operations": {}})])
def test_measurements_that_do_not_belong_to_the_device_are_said_and_kept(finished, tmp_path, capsys, text):
    config = change(finished[0], {"run_dir": str(tmp_path / "run")})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / TABLE).write_text(text)
    run = train(config, 2)
    assert "Not used: " in (out := capsys.readouterr().out)
    assert str(run / TABLE) in out
    assert (run / TABLE).read_text() == text
