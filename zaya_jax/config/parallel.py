"""The parallel section of a configuration: the device mesh and its communication."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zaya_jax.config.bounds import Positive
from zaya_jax.config.checks import field_check
from zaya_jax.config.model import ModelConfig
from zaya_jax.errors import InputError

Reduce = Literal["step", "micro_batch"]
ContextAttention = Literal["all_gather", "ring"]
ContextLayout = Literal["contiguous", "zigzag"]
ExpertExchange = Literal["all_gather", "ragged"]

AXES = ("data", "fsdp", "expert", "context")  # each a field of `ParallelConfig`
BATCH_AXES = ("data", "fsdp", "expert")  # sequences of a batch are split over these


@dataclass(frozen=True)
class ParallelConfig:
    """Number of devices along each mesh axis, and how the devices communicate.

    Master weights and optimizer state are sharded over all devices, as far as these divide them. Parameters in the
    compute dtype are replicated along `data` and `context`, sharded by layer parameters along `fsdp` and by experts
    along `expert`. The sequences of a batch are split over `data`, `fsdp` and `expert`, and each sequence over
    `context`.
    """

    data: Positive[int] | None = None  # replicas of the parameters; null: all devices that the other axes leave
    fsdp: Positive[int] = 1  # devices that share the parameters of each layer
    expert: Positive[int] = 1  # devices that share the experts, a divisor of model.num_experts
    context: Positive[int] = 1  # devices that share each sequence
    gradient_reduction: Reduce = "step"  # when gradients are reduced; micro_batch: after each one (less memory)
    # how context-parallel devices get keys; ring: less memory from 4 devices on
    context_attention: ContextAttention = "all_gather"
    context_layout: ContextLayout = "zigzag"  # zigzag balances causal attention; contiguous needs one halo less
    # how tokens reach experts; ragged: each token goes only to the device of its expert (GPUs only)
    expert_exchange: ExpertExchange = "all_gather"

    @property
    def chunks(self) -> int:
        """Number of equal chunks that a sequence is cut into."""
        return self.context * self.pieces

    @property
    def pieces(self) -> int:
        """Number of chunks of a sequence that a device holds."""
        return 2 if self.context > 1 and self.context_layout == "zigzag" else 1

    def check(self, key: str, model: ModelConfig, contexts: Mapping[str, int]) -> None:
        """Raise `InputError` if an axis does not divide what it splits; `contexts`: sequence lengths by key."""
        must, reach = field_check(self, key), model.convolution_reach
        must("expert", model.num_experts % self.expert == 0, f"a divisor of model.num_experts ({model.num_experts})")
        for name, length in contexts.items():
            chunks = f"{self.chunks}, the number of chunks with context_layout {self.context_layout}"
            must("context", length % self.chunks == 0, f"such that {name} ({length}) is a multiple of {chunks}")
            tokens = f"at least {reach} tokens, the number that the convolutions look back"
            is_long = self.context == 1 or length // self.chunks >= reach
            must("context", is_long, f"such that a chunk of {name} has {tokens}")


def axis_sizes(config: ParallelConfig, devices: int, key: str = "parallel") -> dict[str, int]:
    """Return the number of devices along each axis of the layout at `key`; `InputError` if they are not `devices`."""
    sizes = {axis: getattr(config, axis) for axis in AXES if axis != "data"}
    fixed = math.prod(sizes.values())
    data = devices // fixed if config.data is None else config.data
    if data * fixed != devices:
        axes = " × ".join(f"{key}.{axis} {size}" for axis, size in sizes.items())
        there = f"{devices}, the number of devices in this job."
        if config.data is None:
            raise InputError(f"{axes} is {fixed}, but must divide {there}")
        remedy = f"Change one, or set {key}.data=null to compute it."
        raise InputError(f"{key}.data {data} × {axes} is {data * fixed}, but must be {there} {remedy}")
    return {"data": data, **sizes}
