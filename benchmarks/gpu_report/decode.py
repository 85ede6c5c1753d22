"""The time of a decode step by part, and of the first token."""

from typing import Any

import numpy as np

from benchmarks.decode import NEW, PROMPT, our_decode
from benchmarks.gpu_report.figures import Figures
from benchmarks.step import default_config
from benchmarks.train_step import EIGHT_B
from zaya_jax.config.shipped import shipped
from zaya_jax.lab.measure.step_parts import break_down_generation
from zaya_jax.lab.measure.timing import time_calls

_BATCHES = (1, 64)


def measure_decode(small: bool) -> dict[str, Any]:
    """Trace decode steps of the 8B's layers in bf16, and time prompts of a model of 52.75M parameters.

    Args:
      small: whether to trace the tiny model instead, one prompt, and to generate less.

    Returns:
      For JSON: the times of `machine step --work decode` by batch size, and `figures`.
    """
    prompt, new, repeats = (32, 8, 1) if small else (PROMPT, NEW, 3)
    config = default_config().model
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (1 if small else 8, prompt))
    figures: Figures = {}
    for count in (1, new):
        decode = our_decode(config, "float32" if small else "bfloat16", prompts, count)
        seconds = time_calls(decode, repeats).median
        figures[f"{len(prompts)} × {prompt} tokens, then {count}"] = [round(1e3 * seconds, 2), "ms"]
    result: dict[str, Any] = {"batches": {}}
    for batch in _BATCHES[: 1 if small else None]:
        traced = break_down_generation(str(shipped("tiny.yaml") if small else EIGHT_B), [], "decode", batch, prompt, 1)
        result["batches"][str(batch)] = {key: traced[key] for key in ("steps", "seconds", "untraced_seconds", "parts")}
        figures[f"decode step, batch {batch}"] = [round(1e3 * traced["untraced_seconds"], 3), "ms"]
    return result | {"figures": figures}
