"""The optimizer section of a configuration."""

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

    learning_rate: Positive[float] = 6.0e-4  # with match_rms_adamw an update has RMS 0.2 × this, like AdamW's
    momentum: Decay = 0.95
    momentum_form: MomentumForm = "sum"  # m ← μm + g; ema: Optax's bias-corrected moving average
    nesterov: bool = True
    newton_schulz_steps: Positive[int] = 5
    coefficients: Coefficients = "standard"  # of the Newton–Schulz polynomial
    newton_schulz_dtype: Dtype = "bfloat16"  # of the iterates; sums are always fp32
    scaling: Scaling = "match_rms_adamw"  # of the orthogonalized update, by its shape
    gate_up: GateUp = "joint"  # orthogonalize an expert's gate and up projections as one matrix; split: as two
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
    """Learning-rate and weight-decay factors for the parameters of one role."""

    learning_rate: NonNegative[float] = 1.0  # multiplies the optimizer's rate
    weight_decay: NonNegative[float] | None = None  # null: 1 for matrices, embedding and convolutions, else 0


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

    rule: BalanceRule = "adamw"  # sign: a fixed step against the sign of the gradient; none: frozen biases
    learning_rate: Positive[float] = 1.0e-3
    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: Positive[float] = 1.0e-8


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizers of all parameters; the schedules of `phases` scale all of their learning rates."""

    matrices: Matrices = "muon"  # the optimizer of attention, router and expert matrices
    muon: MuonConfig = field(default_factory=MuonConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    clip_norm: Positive[float] = 1.0  # maximum global gradient norm
