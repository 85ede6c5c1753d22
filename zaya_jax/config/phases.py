"""The phases section of a configuration: token budgets, data, batches and learning-rate schedules."""

import itertools
from dataclasses import dataclass, field
from typing import Literal

from zaya_jax.config.bounds import NonNegative, Positive
from zaya_jax.config.checks import NAME, field_check, is_name, require, require_path
from zaya_jax.config.parallel import ParallelConfig
from zaya_jax.config.table import Table

Remat = Literal["none", "dots", "full"]
Packing = Literal["windows", "bins"]
OverLength = Literal["split", "trim", "drop"]
ScheduleShape = Literal["constant", "cosine", "linear", "wsd"]

MAX_SIZES = 8  # batch sizes of a ramp: each one is compiled


@dataclass(frozen=True)
class ScheduleConfig:
    """A learning-rate schedule: a factor on the optimizer's rates as a function of tokens, not of steps.

    The factor warms up linearly from 0 to `peak`, then decays to `final`. A schedule starts with the phase that sets it
    and continues until the next phase that sets its own.
    """

    shape: ScheduleShape = "cosine"  # form of the decay; wsd: constant at the peak, then a linear decay
    peak: Positive[float] = 1.0  # factor at the end of the warm-up
    final: float = 0.1  # factor at the end of the last phase that the schedule spans; unused with constant
    warmup_tokens: NonNegative[int] = 0  # length of the warm-up
    decay_tokens: int | None = None  # length of the decay at the end; wsd only

    def check(self, key: str) -> None:
        """Raise `InputError` if a value is out of range; `key` is the schedule's key."""
        must = field_check(self, key)
        in_range = self.final >= 0 and (self.shape == "constant" or self.final <= self.peak)
        must("final", in_range, f"at least 0 and at most {key}.peak ({self.peak})")
        if self.shape == "wsd":
            must("decay_tokens", (self.decay_tokens or 0) > 0, f"greater than 0 if {key}.shape is wsd")
        else:
            must("decay_tokens", self.decay_tokens is None, f"null unless {key}.shape is wsd (it is {self.shape})")


@dataclass(frozen=True)
class BatchSizeConfig:
    """The batch size up to a point of the phase."""

    until: int  # end of this batch size, in tokens since the start of the phase
    tokens: Positive[int]  # tokens per step


@dataclass(frozen=True)
class BatchConfig:
    """Batch size in tokens, padding included; it can ramp up linearly or in listed steps."""

    tokens: Positive[int] = 8192  # tokens per step, after any ramp
    start: Positive[int] | None = None  # tokens per step at the start of a linear ramp, whose sizes are multiples of it
    ramp_tokens: int = 0  # length of the linear ramp in tokens
    stepped: tuple[BatchSizeConfig, ...] = ()  # batch sizes before `tokens`, in order
    # sequences per device in a micro-batch, or all of a step (as with null) if a ramp has fewer
    micro_batch: Positive[int] | None = None

    def check(self, key: str) -> None:
        """Raise `InputError` if a value is out of range; `key` is the batch's key."""
        must, sizes = field_check(self, key), [size.tokens for size in self.stepped]
        if self.start is None:
            must("ramp_tokens", self.ramp_tokens == 0, f"0 unless {key}.start is set")
        else:
            divides = self.start < self.tokens and self.tokens % self.start == 0
            must("start", divides, f"a divisor of {key}.tokens ({self.tokens}) and smaller than it")
            must("ramp_tokens", self.ramp_tokens > 0, f"greater than 0 if {key}.start is set")
            require(not sizes, f"{key}.stepped", sizes, f"empty if {key}.start is set")
        allowed = f"a list of at most {MAX_SIZES - 1} sizes (each one is compiled)"
        require(len(sizes) < MAX_SIZES, f"{key}.stepped", sizes, allowed)
        before = 0
        for index, size in enumerate(self.stepped):
            require(size.until > before, f"{key}.stepped.{index}.until", size.until, f"greater than {before}")
            before = size.until

    def sizes(self) -> list[tuple[int | None, int]]:
        """List (end, tokens per step) in order; `end` counts the phase's tokens, and is None for the last size.

        A linear ramp uses at most `MAX_SIZES` evenly spread multiples of `start`. It switches to the next size at the
        point where the ideal ramp is halfway between the two.
        """
        if self.start is None:
            return [*((size.until, size.tokens) for size in self.stepped), (None, self.tokens)]
        most = self.tokens // self.start
        count = min(most, MAX_SIZES)
        multiples = [1 + round(index * (most - 1) / (count - 1)) for index in range(count)]
        middles = (low + high - 2 for low, high in itertools.pairwise(multiples))
        ends = [self.ramp_tokens * middle // (2 * (most - 1)) for middle in middles]
        return list(zip([*ends, None], [multiple * self.start for multiple in multiples], strict=True))


@dataclass(frozen=True)
class PhaseConfig:
    """A phase of the run. Keys set to null inherit the run's value."""

    tokens: Positive[int]  # token budget, padding included; the phase ends with the step that reaches it
    name: str = "train"  # unique; names the phase in overrides, messages and RUN_DIR@PHASE
    context: Positive[int] | None = None  # tokens per row; null: data.context
    rope_base: Positive[float] | None = None  # RoPE base of full layers; null: model.rope_base
    # relative share of each source in the rows, 0 to only evaluate it; empty: in proportion to their tokens
    mixture: Table[float] = field(default_factory=Table[float])
    # how documents fill rows; windows: concatenated, then cut; bins: whole documents, best fit
    packing: Packing = "windows"
    over_length: OverLength = "split"  # policy for documents longer than a row
    template: str | None = None  # file with a Jinja chat template; null: the built-in template
    schedule: ScheduleConfig | None = None  # learning rates; null: the previous phase's, else the default
    batch: BatchConfig | None = None  # batch sizes; null: train.batch
    remat: Remat | None = None  # what the backward pass recomputes; null: train.remat
    parallel: ParallelConfig | None = None  # layout on the devices; null: parallel

    def check(self, key: str) -> None:
        """Raise `InputError` if a value is out of range; `key` is the phase's key."""
        require(is_name(self.name), f"{key}.name", self.name, NAME)
        for name, weight in self.mixture.items():
            require(weight >= 0, f"{key}.mixture.{name}", weight, "at least 0 (0 only evaluates the source)")
        allowed = "a table in which at least one source has a weight greater than 0"
        require(not self.mixture or any(self.mixture.values()), f"{key}.mixture", dict(self.mixture), allowed)
        require_path(f"{key}.template", self.template)
        if self.schedule is not None:
            self.schedule.check(f"{key}.schedule")
        if self.batch is not None:
            self.batch.check(f"{key}.batch")
