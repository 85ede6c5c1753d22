"""One trained run that tests of several folders read."""

import functools
from pathlib import Path
from typing import NamedTuple

from tests.train_helpers import small_run, trained
from zaya_jax.checkpoint.__main__ import main as checkpoint
from zaya_jax.train.final_report import report
from zaya_jax.train.fit import TrainResult


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
    _, result = trained(config)
    report(config, result)
    assert checkpoint(["export-hf", config.run_dir, str(folder / "export"), "--dtype", "float32"]) == 0
    return TrainedRun(Path(config.run_dir), result, folder / "export")
