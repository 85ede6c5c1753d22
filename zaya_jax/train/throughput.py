"""The speed of a step: tokens/s, FLOP/s and MFU (model FLOPs utilization)."""

from typing import Any

from zaya_jax.config import Config
from zaya_jax.config.stages import stage_at
from zaya_jax.hardware.data_sheets import peak_flops
from zaya_jax.model.arithmetic import training_flops_per_token


def throughput(
    config: Config, step: int, tokens: float, seconds: float, device_kind: str, devices: int
) -> dict[str, Any]:
    """Compute the speed of a step.

    Args:
      config: configuration of the run.
      step: the step, counted from 1; its context determines the FLOPs per token.
      tokens: number of tokens in the loss.
      seconds: duration of the step.
      device_kind: the runtime's name for the devices.
      devices: number of devices.

    Returns:
      `tokens_per_second`; `flops_per_second`, with head and attention, without recomputation; and `mfu`, None if the
      peak of the devices is not known.
    """
    speed, context = tokens / max(seconds, 1e-9), stage_at(config, step - 1).context
    flops = speed * training_flops_per_token(config.model, context, frozen_head=config.lora is not None)
    peak = peak_flops(device_kind)
    mfu = None if peak is None else flops / (peak * devices)
    return {"tokens_per_second": speed, "flops_per_second": flops, "mfu": mfu}
