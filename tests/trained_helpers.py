"""One trained run that tests of several folders read."""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.helpers import random_values
from tests.train_helpers import compile_once, small_run
from zaya_jax.checkpoint.__main__ import main as checkpoint
from zaya_jax.config import ModelConfig
from zaya_jax.model import tree
from zaya_jax.model.zaya import Zaya, abstract_model
from zaya_jax.train import initialization, state
from zaya_jax.train.loop import TrainResult, run_training
from zaya_jax.train.report import report


class TrainedRun(NamedTuple):
    """A run with all that the command `zaya train` writes, what training returned, and an export; read only."""

    folder: Path
    result: TrainResult
    export: Path


def start(config: ModelConfig) -> Zaya:
    """A model at random; the first layer's γ has no effect, and comes back from an export as one."""
    values, name = random_values(config), "blocks.0.mixture.router.state_scale"
    scale = np.array(values[name])
    scale[0] = 1
    return tree.with_values(abstract_model(config), {**values, name: scale})


@functools.cache
def trained_run(base: Path) -> TrainedRun:
    """The run, trained once in this process, in a folder of `base`: `tmp_path_factory.getbasetemp()`."""
    folder = base / "trained"
    config = small_run(folder, "train.log_every=1", "sample.tokens=0")
    model = start(config.model)
    with pytest.MonkeyPatch.context() as patch:
        compile_once(patch)
        # Tracing how a model is drawn takes longer than all steps.
        patch.setattr(initialization, "init_state", state.init_state)
        patch.setattr(state, "Zaya", lambda *_: model)
        result = run_training(config)
    report(config, result)
    assert checkpoint(["export-hf", config.run_dir, str(folder / "export"), "--dtype", "float32"]) == 0
    return TrainedRun(Path(config.run_dir), result, folder / "export")
