"""What jobs of one shape have saved, jobs of any other restore bitwise, and go on with as they would have."""

import json
import os
import platform
import time
from importlib.metadata import version

import numpy as np
import pytest

from tests.checkpoint.reshape_helpers import SHAPES, run_job
from tests.train_helpers import ROOT, on_devices
from zaya_jax.checkpoint.environment import cpu_name


def test_one_layout_restores_what_another_has_saved(tmp_path):
    pairs = on_devices(8, "tests.checkpoint.reshape_helpers:reshape_here", tmp_path, ["fsdp 8"], ["expert 4 x 2"])
    assert pairs == 1


@pytest.mark.soak
def test_every_shape_restores_what_every_shape_has_saved(tmp_path):
    begun = time.monotonic()
    for name in SHAPES:
        run_job(tmp_path, "save", name)
    found = {name: run_job(tmp_path, "restore", name) for name in SHAPES}
    record(found, time.monotonic() - begun)


def record(found, seconds):
    """Check and write down by restoring shape what it has found of each saving one."""
    losses = np.array([[found[restorer][saver] for saver in SHAPES] for restorer in SHAPES])
    apart = float(np.ptp(losses, axis=(0, 1)).max())
    assert apart < 1e-12
    tree = {
        "what": "a state of noise saved by jobs of each shape and restored by jobs of each other: every array bitwise "
                "that of the files, every sharding that of the job, and the losses of the two steps that follow, fp64",
        "command": "make soak",
        "shapes": {name: {"processes": shape.processes, "devices": shape.devices,
                          "parallel": {key: value for key, value in vars(shape.parallel).items() if value != 1}}
                   for name, shape in SHAPES.items()},
        "pairs": losses.shape[0] * losses.shape[1], "bitwise equal": losses.shape[0] * losses.shape[1],
        "losses": losses[0, 0].tolist(), "losses at most apart": apart, "seconds": round(seconds),
        "versions": {"python": platform.python_version(),
                     **{name: version(name) for name in ("jax", "orbax-checkpoint", "tensorstore")}},
        "hardware": {"machine": platform.machine(), "cpu": cpu_name(), "cpus": len(os.sched_getaffinity(0))},
    }  # fmt: skip
    (ROOT / "benchmarks" / "soak_reshape.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
