"""How fast a step was: tokens/s, FLOP/s and the share of the devices' peak."""

from typing import Any

from zaya_jax.config import Config
from zaya_jax.config.stages import stage_at
from zaya_jax.hardware.data_sheets import peak_flops
from zaya_jax.model.arithmetic import training_flops_per_token


def throughput(
    config: Config, step: int, tokens: float, seconds: float, device_kind: str, devices: int
) -> dict[str, Any]:
    """What the timings of a step have beside its seconds.

    Args:
      config: of the run.
      step: counted from 1; its context sets the FLOPs of a token.
      tokens: that the loss counts.
      seconds: of the step.
      device_kind: the runtime's name of the devices.
      devices: their number.

    Returns:
      `tokens_per_second`, `flops_per_second` (head and attention counted, recomputation not) and `mfu`, None where the
      peak of the devices is not known.
    """
    speed, context = tokens / max(seconds, 1e-9), stage_at(config, step - 1).context
    flops = speed * training_flops_per_token(config.model, context, frozen_head=config.lora is not None)
    peak = peak_flops(device_kind)
    mfu = None if peak is None else flops / (peak * devices)
    return {"tokens_per_second": speed, "flops_per_second": flops, "mfu": mfu}
