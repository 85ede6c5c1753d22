"""The training step of the 8B's layers: time, memory, and where the time goes."""

from typing import Any

import jax

from benchmarks.gpu_report.figures import step_figures
from benchmarks.gpu_report.training import small_config
from benchmarks.train_step import EIGHT_B, Layout, time_train_step
from zaya_jax.config import load_config


def measure_step(small: bool, layout: Layout, deterministic: bool = False) -> dict[str, Any]:
    """Time and trace the step of configs/bench_8b.yaml, with as many layers as fit; or of a small model.

    Args:
      small: whether to take the small model.
      layout: mesh axis that all devices lie along.
      deterministic: value of `train.deterministic`.

    Returns:
      For JSON: the result of `time_train_step`, and `figures`.
    """
    config = small_config() if small else load_config(EIGHT_B, [f"train.deterministic={str(deterministic).lower()}"])
    result = time_train_step(config, layout, 2 if small else 5)
    return result | {"figures": step_figures(result, jax.devices()[0].device_kind)}
