"""The optimizers of all parameters."""

from dataclasses import dataclass, field, fields
from typing import Literal

from zaya_jax.config.checks import require, require_positive

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

    learning_rate: float = 6.0e-4  # with match_rms_adamw an update has RMS 0.2 times this, as AdamW's have
    momentum: float = 0.95
    momentum_form: MomentumForm = "sum"  # m ← μm + g, or Optax's mean with its correction of the first steps
    nesterov: bool = True
    newton_schulz_steps: int = 5
    coefficients: Coefficients = "standard"  # of the Newton–Schulz polynomial
    iterates: Dtype = "bfloat16"  # of Newton–Schulz; its sums are fp32 whatever they are
    scaling: Scaling = "match_rms_adamw"  # of the orthogonal matrix, by its shape
    gate_up: GateUp = "joint"  # an expert's gate and up projections as the one matrix they are stored as, or as two
    weight_decay: float = 0.1

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        require_positive("optimizer.muon", self, "learning_rate", "newton_schulz_steps")
        require(0 <= self.momentum < 1, "optimizer.muon.momentum", self.momentum, "at least 0 and below 1")
        require(self.weight_decay >= 0, "optimizer.muon.weight_decay", self.weight_decay, "at least 0")


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW for every other trained parameter."""

    learning_rate: float = 6.0e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1.0e-8
    weight_decay: float = 0.1

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        require_positive("optimizer.adamw", self, "learning_rate", "eps")
        for name in ("b1", "b2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.adamw.{name}", getattr(self, name),
                    "at least 0 and below 1")  # fmt: skip
        require(self.weight_decay >= 0, "optimizer.adamw.weight_decay", self.weight_decay, "at least 0")


@dataclass(frozen=True)
class RoleConfig:
    """Factors on the learning rate and weight decay of the parameters of one role."""

    learning_rate: float = 1.0  # times the optimizer's
    weight_decay: float | None = None  # likewise; where None, 1 for matrices, embedding, convolutions, else 0

    def check(self, where: str) -> None:
        """Raise `InputError` for a value outside its range; `where` is the role's own key."""
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"{where}.{name}", value, "at least 0")


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

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        for role in fields(self):
            getattr(self, role.name).check(f"optimizer.roles.{role.name}")


@dataclass(frozen=True)
class BalanceConfig:
    """The optimizer of the balancing bias, whose gradient is the load's distance from uniform (zaya1.md §3.3)."""

    rule: BalanceRule = "adamw"  # or a fixed step against the sign of the distance, or no step
    learning_rate: float = 1.0e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1.0e-8

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        require_positive("optimizer.balance", self, "learning_rate", "eps")
        for name in ("b1", "b2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.balance.{name}", getattr(self, name),
                    "at least 0 and below 1")  # fmt: skip


@dataclass(frozen=True)
class OptimizerConfig:
    """One transform a role, one schedule for all (`phases`)."""

    matrices: Matrices = "muon"  # the optimizer of attention, router and expert matrices
    muon: MuonConfig = field(default_factory=MuonConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    clip_norm: float = 1.0  # of the gradient over all parameters

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        for section in (self.muon, self.adamw, self.roles, self.balance):
            section.check()
        require_positive("optimizer", self, "clip_norm")
