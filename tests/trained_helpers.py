"""One trained run that tests of several folders read."""

import functools
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.train_helpers import compile_once, small_run
from zaya_jax.checkpoint.__main__ import main as checkpoint
from zaya_jax.train import loop
from zaya_jax.train.loop import TrainResult, run_training
from zaya_jax.train.report import report


class TrainedRun(NamedTuple):
    """A run with all that the command `zaya train` writes, what training returned, and an export; read only."""

    folder: Path
    result: TrainResult
    export: Path


@functools.cache
def trained_run(base: Path) -> TrainedRun:
    """The run, trained once in this process, in a folder of `base`: `tmp_path_factory.getbasetemp()`."""
    folder = base / "trained"
    config = small_run(folder, "train.log_every=1", "sample.tokens=0")
    with pytest.MonkeyPatch.context() as patch:
        compile_once(patch)
        patch.setattr(loop, "plot_run", lambda rows, path, compressors: path.touch())  # half of a run's time
        result = run_training(config)
    report(config, result)
    assert checkpoint(["export-hf", config.run_dir, str(folder / "export"), "--dtype", "float32"]) == 0
    return TrainedRun(Path(config.run_dir), result, folder / "export")
