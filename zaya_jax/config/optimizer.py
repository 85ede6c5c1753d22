"""The optimizers of all parameters."""

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
    """Muon for attention, router and expert matrices (zaya1.md §3.1)."""

    learning_rate: Positive[float] = 6.0e-4  # with match_rms_adamw an update has RMS 0.2 times this, as AdamW's have
    momentum: Decay = 0.95
    momentum_form: MomentumForm = "sum"  # m ← μm + g, or Optax's mean with its correction of the first steps
    nesterov: bool = True
    newton_schulz_steps: Positive[int] = 5
    coefficients: Coefficients = "standard"  # of the Newton–Schulz polynomial
    newton_schulz_dtype: Dtype = "bfloat16"  # of Newton–Schulz; its sums are fp32 whatever they are
    scaling: Scaling = "match_rms_adamw"  # of the orthogonal matrix, by its shape
    gate_up: GateUp = "joint"  # an expert's gate and up projections as the one matrix they are stored as, or as two
    weight_decay: NonNegative[float] = 0.1


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW for every other trained parameter."""

    learning_rate: Positive[float] = 6.0e-4
    b1: Decay = 0.9
    b2: Decay = 0.95
    eps: Positive[float] = 1.0e-8
    weight_decay: NonNegative[float] = 0.1


@dataclass(frozen=True)
class RoleConfig:
    """Factors on the learning rate and weight decay of the parameters of one role."""

    learning_rate: NonNegative[float] = 1.0  # times the optimizer's
    weight_decay: NonNegative[float] | None = None  # likewise; None: 1 for matrices, embedding, convolutions, else 0


@dataclass(frozen=True)
class RolesConfig:
    """A section for each role that a parameter can have."""

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
    """The optimizer of the balancing bias, whose gradient is the load's distance from uniform (zaya1.md §3.3)."""

    rule: BalanceRule = "adamw"  # or a fixed step against the sign of the distance, or no step
    learning_rate: Positive[float] = 1.0e-3
    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: Positive[float] = 1.0e-8


@dataclass(frozen=True)
class OptimizerConfig:
    """One transform a role, one schedule for all (`phases`)."""

    matrices: Matrices = "muon"  # the optimizer of attention, router and expert matrices
    muon: MuonConfig = field(default_factory=MuonConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    clip_norm: Positive[float] = 1.0  # of the gradient over all parameters
