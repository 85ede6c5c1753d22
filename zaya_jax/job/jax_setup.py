"""Prepare jax for a run, before it initializes its backend."""

import os
import sys

from zaya_jax.config import Config
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset, keep_compilations
from zaya_jax.hardware.measurements import measured_preset
from zaya_jax.hardware.presets import Preset


def prepare_jax(config: Config, platform: str | None = None) -> Preset:
    """Set the environment and jax's flags for a run, before jax initializes its backend; return the machine's preset.

    A `platform` becomes JAX_PLATFORMS, in place of the environment of the preset.
    """
    preset = select_preset(config.preset)
    if "jax" not in sys.modules:  # once jax is imported, XLA may have read its flags already
        if platform is None:
            apply_preset(preset if config.measurements is None else measured_preset(preset, config.measurements))
            keep_compilations()
        else:
            os.environ["JAX_PLATFORMS"] = platform
    import jax

    if config.train.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    return preset
