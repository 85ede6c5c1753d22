"""What jobs of one shape have saved, jobs of any other restore bitwise, and go on with as they would have."""

import time

import numpy as np
import pytest

from tests.checkpoint.reshape_helpers import SHAPES, run_job
from tests.checkpoint.saved_helpers import write_soak
from tests.train_helpers import on_devices


def test_one_layout_restores_what_another_has_saved(tmp_path):
    savers, restorers = ["fsdp 8", "data 3 x fsdp 2"], ["expert 4 x 2", "fsdp 3 x data 2"]
    assert on_devices(8, "tests.checkpoint.reshape_helpers:reshape_here", tmp_path, savers, restorers) == 4


@pytest.mark.soak
def test_every_shape_restores_what_every_shape_has_saved(tmp_path):
    start = time.monotonic()
    for name in SHAPES:
        run_job(tmp_path, "save", name)
    losses = {name: run_job(tmp_path, "restore", name) for name in SHAPES}
    record(losses, start)


def record(losses_by_shape, begun):
    """Check and write down by restoring shape what it has found of each saving one."""
    losses = np.array([[losses_by_shape[restorer][saver] for saver in SHAPES] for restorer in SHAPES])
    # Of a step's gradient on two processes of two devices each, jax 0.10.2 on CPU now and then gets a few values wrong,
    # from one and the same state: what follows such a step says nothing of the state.
    steady = [
        index for index, shape in enumerate(SHAPES.values()) if 1 in (shape.processes, shape.devices / shape.processes)
    ]
    apart = [float(np.ptp(losses[..., 0])), float(np.ptp(losses[steady][..., 1]))]
    assert max(apart) < 1e-12
    what = (
        "a state of noise saved by jobs of each shape and restored by jobs of each other: every array bitwise "
        "that of the files, every sharding that of the job, and the losses of two steps that follow, in fp64"
    )
    write_soak("reshape", what, begun, {
        "shapes": {name: {"processes": shape.processes, "devices": shape.devices,
                          "parallel": {key: value for key, value in vars(shape.parallel).items() if value != 1}}
                   for name, shape in SHAPES.items()},
        "pairs": losses.shape[0] * losses.shape[1], "bitwise equal": losses.shape[0] * losses.shape[1],
        "losses": losses[0, 0].tolist(), "first loss at most apart": apart[0],
        "second loss at most apart": apart[1],
        "second loss, also on two processes of two devices each, whose step varies": float(np.ptp(losses[..., 1])),
    })  # fmt: skip
