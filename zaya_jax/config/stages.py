"""The steps of a run, computed exactly from its token budgets before anything is compiled."""

import bisect
import functools
from typing import NamedTuple

from zaya_jax.config.checks import require
from zaya_jax.config.phases import ScheduleConfig
from zaya_jax.config.schema import Config


class BatchStage(NamedTuple):
    """Consecutive steps of one phase that share one batch size."""

    phase: int  # index in `Config.phases`
    first_step: int  # index in the run, from 0
    steps: int
    context: int  # tokens per row
    sequences: int  # rows per step
    first_row: int  # index among the rows that the run trains on, from 0
    first_token: int  # index in the run, from 0, padding included

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.sequences * self.context

    @property
    def end(self) -> int:
        """The first step after this stage."""
        return self.first_step + self.steps


class Span(NamedTuple):
    """A learning-rate schedule and the range of tokens that it spans."""

    schedule: ScheduleConfig
    first_token: int
    tokens: int


@functools.lru_cache(maxsize=64)
def stages(config: Config) -> tuple[BatchStage, ...]:
    """List the stages of a run in order, of which none is empty; `InputError` if int32 cannot count its steps.

    The position of a step's first token sets its batch size. A phase ends with the first step that reaches its budget.
    """
    batch_stages: list[BatchStage] = []
    step = row = token = 0
    for index, phase in enumerate(config.phases):
        context, phase_start = config.context_for(phase), token
        for until, size in config.batch_for(phase).sizes():
            bound = phase_start + (phase.tokens if until is None else min(until, phase.tokens))
            count = max(0, -(-(bound - token) // size))
            if count:
                batch_stages.append(BatchStage(index, step, count, context, size // context, row, token))
            step, row, token = step + count, row + count * (size // context), token + count * size
        fewer = f"small enough for the run to have fewer than {2**31} steps (it would have {step})"
        require(step < 2**31, f"{config.phase_key(index)}.tokens", phase.tokens, fewer)
    return tuple(batch_stages)


def micro_batch(config: Config, stage: BatchStage, shards: int) -> int:
    """Return the sequences of a micro-batch on each of the `shards` that a batch is split over.

    A shard with fewer sequences than the key `micro_batch` has one micro-batch, and so has one if the key is null.
    """
    of_shard = max(1, stage.sequences // shards)
    return min(config.batch_for(config.phases[stage.phase]).micro_batch or of_shard, of_shard)


def largest_stage(config: Config, phase: int) -> BatchStage:
    """Return the stage of a phase with the largest batch."""
    return max((stage for stage in stages(config) if stage.phase == phase), key=lambda stage: stage.sequences)


def total_steps(config: Config) -> int:
    """Return the number of steps in the whole run."""
    return stages(config)[-1].end


def first_step(config: Config) -> int:
    """Return the step at which the run starts: 0, or the first step of `start_phase`."""
    if config.start_phase is None:
        return 0
    index = [phase.name for phase in config.phases].index(config.start_phase)
    return phase_steps(config)[index][0]


def phase_steps(config: Config) -> list[tuple[int, int]]:
    """Return the first step of each phase, and the step after its last."""
    by_phase = [[stage for stage in stages(config) if stage.phase == index] for index in range(len(config.phases))]
    return [(phase[0].first_step, phase[-1].end) for phase in by_phase]


def stage_at(config: Config, step: int) -> BatchStage:
    """Return the stage of `step` (from 0), or the last stage for steps after the end."""
    batch_stages = stages(config)
    return batch_stages[bisect.bisect_right(batch_stages, step, key=lambda stage: stage.first_step) - 1]


def tokens_before(config: Config, step: int) -> int:
    """Count the tokens of all steps before `step`, padding included."""
    stage = stage_at(config, step)
    return stage.first_token + (step - stage.first_step) * stage.tokens


def rows_before(config: Config, step: int) -> int:
    """Count the rows of the data up to the last one read before `step`, including the skipped ones among them."""
    return _data_row(config, _rows_trained_before(config, step) - 1) + 1


def step_rows(config: Config, step: int) -> list[int]:
    """List the rows that `step` reads, as indices in the run's data."""
    first = _rows_trained_before(config, step)
    return [_data_row(config, row) for row in range(first, first + stage_at(config, step).sequences)]


def _rows_trained_before(config: Config, step: int) -> int:
    stage = stage_at(config, step)
    return stage.first_row + (step - stage.first_step) * stage.sequences


def _data_row(config: Config, row: int) -> int:
    """Return the index in the data of row `row` of those that the run trains on, see `data.skip_rows`."""
    for first, end in config.data.skip_rows:
        if row < first:
            break
        row += end - first
    return row


def schedule_spans(config: Config) -> list[Span]:
    """Return the schedule of each phase: its own, or the one it inherits from the phase before."""
    steps, spans = phase_steps(config), []
    for first, after in config.schedule_phases():
        begin, end = tokens_before(config, steps[first][0]), tokens_before(config, steps[after - 1][1])
        span = Span(config.phases[first].schedule or ScheduleConfig(), begin, end - begin)
        spans += [span] * (after - first)
    return spans
