"""The parallel layout of a phase."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zaya_jax.config.bounds import Positive
from zaya_jax.config.checks import require
from zaya_jax.config.model import ModelConfig

Reduce = Literal["step", "micro_batch"]
ContextAttention = Literal["all_gather", "ring"]
ContextLayout = Literal["contiguous", "zigzag"]
ExpertExchange = Literal["all_gather", "ragged"]


@dataclass(frozen=True)
class ParallelConfig:
    """Devices along each axis of the mesh, and how they communicate.

    Master weights and optimizer state are split over all devices, whatever the axes. Along `data` and `context` each
    device holds all parameters in the compute dtype, along `fsdp` a part of each layer's, along `expert` a part
    of the experts. Sequences of a batch are split over `data`, `fsdp` and `expert`, each sequence over `context`.
    """

    data: Positive[int] | None = None  # what the other axes leave where None
    fsdp: Positive[int] = 1
    expert: Positive[int] = 1
    context: Positive[int] = 1
    gradient_reduction: Reduce = "step"  # over devices: once a step, or after each micro-batch (less memory)
    context_attention: ContextAttention = "all_gather"  # ring: less memory from 4 devices on, a hop for each
    context_layout: ContextLayout = "zigzag"  # evens out causal attention; contiguous has one halo less
    expert_exchange: ExpertExchange = "all_gather"  # ragged moves each token only where it must, on GPUs alone

    @property
    def chunks(self) -> int:
        """Pieces of equal length that a sequence is cut into."""
        return self.context * (2 if self.context > 1 and self.context_layout == "zigzag" else 1)

    def check(self, where: str, model: ModelConfig, contexts: Mapping[str, int]) -> None:
        """Raise `InputError` where the axes do not divide what is split over them.

        Args:
          where: the key that the layout comes from.
          model: whose experts are split.
          contexts: the lengths of sequences, by what messages call them.
        """
        require(model.num_experts % self.expert == 0, f"{where}.expert", self.expert,
                f"a number that divides model.num_experts ({model.num_experts})")  # fmt: skip
        for name, length in contexts.items():
            require(length % self.chunks == 0, f"{where}.context", self.context,
                    f"a number that cuts {name} ({length}) into whole pieces, {self.chunks} of them with "
                    f"context_layout {self.context_layout}")  # fmt: skip
            require(self.context == 1 or length // self.chunks >= model.convolution_reach, f"{where}.context",
                    self.context, f"such that a piece holds the {model.convolution_reach} tokens that convolutions "
                    "look back")  # fmt: skip
