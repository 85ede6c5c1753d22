"""The sections optimizer and lora of a configuration."""

from dataclasses import dataclass, field
from typing import Literal

from zaya_jax.config.bounds import Decay, NonNegative, Positive

Dtype = Literal["float32", "bfloat16"]
ComputeDtype = Literal["float32", "bfloat16", "float64"]
MomentumForm = Literal["sum", "ema"]
Coefficients = Literal["standard", "dion", "polar_express"]
Scaling = Literal["match_rms_adamw", "original", "unit_rms"]
GateUp = Literal["joint", "split"]
BalanceRule = Literal["adamw", "sign", "none"]
Matrices = Literal["muon", "adamw"]


@dataclass(frozen=True)
class MuonConfig:
    """Muon for attention, router and expert matrices (docs/reference.md §3.1)."""

    learning_rate: Positive[float] = 6.0e-4  # base rate; with match_rms_adamw an update has RMS 0.2 × this, as AdamW's
    momentum: Decay = 0.95  # decay of the momentum μ per step
    momentum_form: MomentumForm = "sum"  # momentum m of gradients g; sum: m ← μm + g; ema: a bias-corrected mean
    nesterov: bool = True  # orthogonalize g + μm instead of m
    newton_schulz_steps: Positive[int] = 5  # iterations that orthogonalize an update
    coefficients: Coefficients = "standard"  # which Newton–Schulz polynomial
    newton_schulz_dtype: Dtype = "bfloat16"  # dtype of the iterates; sums are always fp32
    scaling: Scaling = "match_rms_adamw"  # how the shape of a matrix scales its orthogonalized update
    gate_up: GateUp = "joint"  # orthogonalize an expert's gate and up projections as one matrix; split: as two
    weight_decay: NonNegative[float] = 0.1  # decoupled weight decay, multiplied by the learning rate


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW for every other trained parameter."""

    learning_rate: Positive[float] = 6.0e-4  # base rate, which the schedule scales
    b1: Decay = 0.9  # decay of the mean of gradients
    b2: Decay = 0.95  # decay of the mean of squared gradients
    eps: Positive[float] = 1.0e-8  # added to the square root of the mean of squared gradients
    weight_decay: NonNegative[float] = 0.1  # decoupled weight decay, multiplied by the learning rate


@dataclass(frozen=True)
class RoleConfig:
    """Learning-rate and weight-decay factors for the parameters of one role."""

    learning_rate: NonNegative[float] = 1.0  # factor on the optimizer's learning rate
    # factor on the optimizer's decay; null: 1 for matrices, embedding and convolutions, else 0
    weight_decay: NonNegative[float] | None = None


@dataclass(frozen=True)
class RolesConfig:
    """One section for each parameter role."""

    attention: RoleConfig = field(default_factory=RoleConfig)
    router: RoleConfig = field(default_factory=RoleConfig)
    expert: RoleConfig = field(default_factory=RoleConfig)
    embedding: RoleConfig = field(default_factory=RoleConfig)
    convolution: RoleConfig = field(default_factory=RoleConfig)
    norm: RoleConfig = field(default_factory=RoleConfig)
    scale: RoleConfig = field(default_factory=RoleConfig)
    temperature: RoleConfig = field(default_factory=RoleConfig)
    bias: RoleConfig = field(default_factory=RoleConfig)


@dataclass(frozen=True)
class BalanceConfig:
    """The optimizer of the balancing biases; their gradient is the load minus uniform load (docs/reference.md §3.3)."""

    rule: BalanceRule = "adamw"  # form of the update; sign: a fixed step against the gradient's sign; none: frozen
    learning_rate: Positive[float] = 1.0e-3  # base rate, which the schedule scales; with sign, the size of the step
    b1: Decay = 0.9  # decay of the mean of gradients
    b2: Decay = 0.999  # decay of the mean of squared gradients
    eps: Positive[float] = 1.0e-8  # added to the square root of the mean of squared gradients


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizers of all parameters; the schedules of `phases` scale all of their learning rates."""

    matrices: Matrices = "muon"  # the optimizer of attention, router and expert matrices
    muon: MuonConfig = field(default_factory=MuonConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    clip_norm: Positive[float] = 1.0  # maximum global gradient norm


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of attention and expert matrices (arXiv 2106.09685): W + (alpha / rank)·A·B."""

    rank: Positive[int]  # width of A and B
    alpha: Positive[float]  # scale of the product A·B, divided by the rank

    @property
    def scale(self) -> float:
        """The factor on the product A·B."""
        return self.alpha / self.rank
