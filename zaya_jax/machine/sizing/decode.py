"""Predict the time of a decode step on one device. Nothing here is measured.

A step reads the parameters that its tokens use, and the cache, at the bandwidth that `Hardware.reached` assumes; and
each layer launches kernels, of which each takes a fixed time. Arithmetic hides behind the reads, since a decode step
has about one multiply-add for each parameter that it reads (docs/reference.md §1.3).
"""

from typing import NamedTuple

import jax.numpy as jnp

from zaya_jax.config import ModelConfig
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.model.arithmetic import active_parameters, cached_values, total_parameters

# A decode step runs the forward pass, which launches 41 of a layer's 117 kernels in XLA's program of the 8B for an
# H200, and 42 of 120 for an MI300X (`hardware.assumptions.layer_launches`).
FORWARD_LAUNCHES = 1 / 3


class DecodeEstimate(NamedTuple):
    """The prediction for a step that decodes one token of one sequence."""

    parameters: int  # bytes of parameters that the step reads
    cache: int  # bytes of keys, values and convolution states that it reads
    memory: int  # bytes of all parameters and the cache
    seconds: dict[str, float]  # predicted time by component

    @property
    def step_seconds(self) -> float:
        """Predicted time of the step: the latency of a token."""
        return sum(self.seconds.values())


def estimate_decode(model: ModelConfig, context: int, dtype: str, hardware: Hardware) -> DecodeEstimate:
    """Predict a decode step on one device.

    Args:
      model: the architecture.
      context: tokens in the cache.
      dtype: name of the dtype of parameters and cache.
      hardware: data sheet or measurements.
    """
    item, reached = jnp.dtype(dtype).itemsize, hardware.reached
    parameters = item * (active_parameters(model) + model.vocab_size * model.hidden_size)  # those of the head are read
    cache = item * cached_values(model, context)
    seconds = {
        "memory traffic": (parameters + cache) / (hardware.bandwidth * reached.memory),
        "kernel launches": model.num_layers * reached.layer_launches * FORWARD_LAUNCHES * reached.launch,
    }
    return DecodeEstimate(parameters, cache, item * total_parameters(model) + cache, seconds)
