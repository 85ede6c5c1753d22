"""The phases of a run: token budgets, data, batches and learning-rate schedules."""

import itertools
from dataclasses import dataclass, field
from typing import Literal

from zaya_jax.config.bounds import NonNegative, Positive
from zaya_jax.config.checks import is_name, require, require_path
from zaya_jax.config.parallel import ParallelConfig
from zaya_jax.config.table import Table

Remat = Literal["none", "dots", "full"]
Packing = Literal["windows", "bins"]
OverLength = Literal["split", "trim", "drop"]
ScheduleShape = Literal["constant", "cosine", "linear", "wsd"]

MAX_SIZES = 8  # of a ramp's batches: each is compiled


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over tokens, as factors on the optimizer's rates, so that no batch size changes it.

    It rises linearly from 0 to `peak`, then goes to `final` as its shape says. It begins with the phase that
    gives it and spans the phases after it, up to the next one that gives its own.
    """

    shape: ScheduleShape = "cosine"  # wsd stays at the peak until its linear decay
    peak: Positive[float] = 1.0
    final: float = 0.1  # at the end of the last phase it spans; not used by constant
    warmup_tokens: NonNegative[int] = 0
    decay_tokens: int | None = None  # of wsd, and of it alone: tokens before the end over which it decays

    def check(self, where: str) -> None:
        """Raise `InputError` for a value outside its range; `where` is the schedule's own key."""
        require(self.final >= 0 and (self.shape == "constant" or self.final <= self.peak), f"{where}.final", self.final,
                f"at least 0 and at most {where}.peak ({self.peak})")  # fmt: skip
        if self.shape == "wsd":
            require(self.decay_tokens is not None and self.decay_tokens > 0, f"{where}.decay_tokens",
                    self.decay_tokens, "greater than zero, since the shape is wsd")  # fmt: skip
        else:
            require(self.decay_tokens is None, f"{where}.decay_tokens", self.decay_tokens,
                    f"left out or null, since the shape is {self.shape}")  # fmt: skip


@dataclass(frozen=True)
class BatchSizeConfig:
    """The size of steps up to a point of a phase."""

    until: int  # tokens of the phase
    tokens: Positive[int]  # a step


@dataclass(frozen=True)
class BatchConfig:
    """Tokens of a step, padding included. They may rise along the phase: linearly, or in given steps."""

    tokens: Positive[int] = 8192  # a step, once any ramp is over
    start: Positive[int] | None = None  # a step, where a linear ramp begins; the sizes between are multiples of it
    ramp_tokens: int = 0  # of the phase, over which a linear ramp rises
    stepped: tuple[BatchSizeConfig, ...] = ()  # sizes before `tokens`, in order
    micro_batch: Positive[int] | None = None  # sequences per device in a micro-batch; null: all of them

    def check(self, where: str) -> None:
        """Raise `InputError` for a value outside its range; `where` is the batch's own key."""
        if self.start is None:
            require(self.ramp_tokens == 0, f"{where}.ramp_tokens", self.ramp_tokens,
                    f"0 where {where}.start is not given")  # fmt: skip
        else:
            require(self.start < self.tokens and self.tokens % self.start == 0, f"{where}.start", self.start,
                    f"a part of {where}.tokens ({self.tokens}) that divides it")  # fmt: skip
            require(self.ramp_tokens > 0, f"{where}.ramp_tokens", self.ramp_tokens,
                    f"greater than zero where {where}.start is given")  # fmt: skip
            require(not self.stepped, f"{where}.stepped", [size.tokens for size in self.stepped],
                    f"left out where {where}.start is given")  # fmt: skip
        require(len(self.stepped) < MAX_SIZES, f"{where}.stepped", [size.tokens for size in self.stepped],
                f"a list of at most {MAX_SIZES - 1} sizes, since each is compiled")  # fmt: skip
        before = 0
        for index, size in enumerate(self.stepped):
            require(size.until > before, f"{where}.stepped.{index}.until", size.until, f"greater than {before}")
            before = size.until

    def sizes(self) -> list[tuple[int | None, int]]:
        """Tokens a step up to a token of the phase, in order; the last size has no end.

        A linear ramp of few multiples of `start` takes all of them, a longer one `MAX_SIZES` of them, spread
        evenly. Each begins where the ramp is nearer to it than to the one before.
        """
        if self.start is None:
            return [*((size.until, size.tokens) for size in self.stepped), (None, self.tokens)]
        most = self.tokens // self.start
        count = min(most, MAX_SIZES)
        multiples = [1 + round(index * (most - 1) / (count - 1)) for index in range(count)]
        ends: list[int | None] = []
        for low, high in itertools.pairwise(multiples):
            ends.append(self.ramp_tokens * (low + high - 2) // (2 * (most - 1)))  # where the ramp is midway
        return list(zip([*ends, None], [multiple * self.start for multiple in multiples], strict=True))


@dataclass(frozen=True)
class PhaseConfig:
    """A phase of the run. Values that it does not give are those of the run."""

    tokens: Positive[int]  # budget, padding included; the phase ends with the step that reaches it
    name: str = "train"
    context: Positive[int] | None = None  # tokens a row; data.context where None
    rope_base: Positive[float] | None = None  # of full layers; model.rope_base where None
    mixture: Table[float] = field(
        default_factory=Table[float]
    )  # rows of each source, as parts; by their tokens where empty
    packing: Packing = "windows"  # windows of the concatenated documents, or bins of whole documents
    over_length: OverLength = "split"  # what becomes of a document longer than a row
    template: str | None = None  # Jinja file that writes out conversations; the built-in one where None
    schedule: ScheduleConfig | None = None  # that of the phase before goes on where None
    batch: BatchConfig | None = None  # train.batch where None
    remat: Remat | None = None  # train.remat where None
    parallel: ParallelConfig | None = None  # that of the run where None

    def check(self, where: str) -> None:
        """Raise `InputError` for a value outside its range; `where` is the phase's own key."""
        require(is_name(self.name), f"{where}.name", self.name, "a name of at most 200 letters, digits, _ and -")
        for name, weight in self.mixture.items():
            require(weight > 0, f"{where}.mixture.{name}", weight, "greater than zero (a source not named is not read)")
        if self.template is not None:
            require_path(f"{where}.template", self.template)
        if self.schedule is not None:
            self.schedule.check(f"{where}.schedule")
        if self.batch is not None:
            self.batch.check(f"{where}.batch")
