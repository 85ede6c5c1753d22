"""The steps of a run against a simulation of it, step by step."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config_helpers import SMALL, changed, row_ranges
from zaya_jax.config import BatchConfig, BatchSizeConfig, PhaseConfig, ScheduleConfig
from zaya_jax.config.stages import (
    first_step,
    micro_batch,
    phase_steps,
    rows_before,
    schedule_spans,
    stage_at,
    stages,
    step_rows,
    tokens_before,
    total_steps,
)
from zaya_jax.errors import InputError


@st.composite
def batches(draw, context):
    """Batches of whole rows: of one size, with a linear ramp, or stepped."""
    rows = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["one", "ramp", "stepped"]))
    if kind == "ramp":
        parts = draw(st.integers(2, 20))
        return BatchConfig(rows * parts * context, start=rows * context, ramp_tokens=draw(st.integers(1, 4000)))
    ends = sorted(draw(st.sets(st.integers(1, 1500), max_size=4))) if kind == "stepped" else []
    sizes = tuple(BatchSizeConfig(end, draw(st.integers(1, 6)) * context) for end in ends)
    return BatchConfig(rows * context, stepped=sizes)


@st.composite
def runs(draw):
    """Configurations of up to four phases, some with a batch, a context and a schedule of their own."""
    phases = []
    for index in range(draw(st.integers(1, 4))):
        context = draw(st.sampled_from([None, 1, 2, 8, 24]))
        own = draw(st.booleans()) or context == 24  # the batch of the run is of 16 tokens
        phases.append(PhaseConfig(
            draw(st.integers(1, 3000)), f"p{index}", context=context,
            batch=draw(batches(context or 8)) if own else None,
            schedule=draw(st.sampled_from([None, ScheduleConfig(), ScheduleConfig("constant")])),
        ))  # fmt: skip
    names = [None, *(phase.name for phase in phases)]
    config = changed(SMALL, {"data.context": 8, "train.batch": BatchConfig(16), "phases": tuple(phases),
                             "start_phase": draw(st.sampled_from(names))})  # fmt: skip
    config.check()
    return config


class Step(NamedTuple):
    phase: int
    context: int
    tokens: int  # of it
    rows_before: int
    tokens_before: int


def size_at(batch, token):
    """Tokens of the step whose first token is `token` of the phase: of the interval that it lies in."""
    for until, size in batch.sizes():
        if until is None or token < until:
            return size
    raise AssertionError


def simulate(config):
    """Every step of the run, one after another."""
    steps, rows, tokens = [], 0, 0
    for index, phase in enumerate(config.phases):
        context, begun = config.context_for(phase), tokens
        while tokens - begun < phase.tokens:
            size = size_at(config.batch_for(phase), tokens - begun)
            steps.append(Step(index, context, size, rows, tokens))
            rows, tokens = rows + size // context, tokens + size
    return steps, rows, tokens


@given(runs())
def test_the_steps_are_those_of_a_simulation(config):
    steps, rows, tokens = simulate(config)
    assert total_steps(config) == len(steps)
    for number, step in enumerate(steps):
        stage = stage_at(config, number)
        assert (stage.phase, stage.context, stage.tokens) == step[:3]
        assert stage.first_step <= number < stage.end
        assert (rows_before(config, number), tokens_before(config, number)) == step[3:]
    assert (rows_before(config, len(steps)), tokens_before(config, len(steps))) == (rows, tokens)
    for index, (first, end) in enumerate(phase_steps(config)):
        own = [number for number, step in enumerate(steps) if step.phase == index]
        assert (first, end) == (own[0], own[-1] + 1)
        # A phase ends with the first step that reaches its budget.
        read = tokens_before(config, end) - tokens_before(config, first)
        assert config.phases[index].tokens <= read < config.phases[index].tokens + steps[end - 1].tokens
    if config.start_phase is None:
        assert first_step(config) == 0
    else:
        assert config.phases[steps[first_step(config)].phase].name == config.start_phase
        assert first_step(config) == 0 or steps[first_step(config) - 1].phase < steps[first_step(config)].phase


@given(runs())
def test_stages_are_not_empty_and_the_last_one_has_no_end(config):
    batch_stages = stages(config)
    assert all(stage.steps > 0 for stage in batch_stages)
    assert [stage.end for stage in batch_stages[:-1]] == [stage.first_step for stage in batch_stages[1:]]
    assert stage_at(config, total_steps(config) + 10**6) == batch_stages[-1]


@given(runs())
def test_a_schedule_spans_the_phases_up_to_the_next_one(config):
    steps, _, _ = simulate(config)
    spans = schedule_spans(config)
    assert len(spans) == len(config.phases)
    for index, (phase, span) in enumerate(zip(config.phases, spans, strict=True)):
        if phase.schedule is None and index:
            assert span == spans[index - 1]
            continue
        carried = list(itertools.takewhile(lambda later: later.schedule is None, config.phases[index + 1 :]))
        own = [step for step in steps if index <= step.phase <= index + len(carried)]
        assert span.schedule == (phase.schedule or ScheduleConfig())
        assert (span.first_token, span.tokens) == (own[0].tokens_before, sum(step.tokens for step in own))


@given(runs(), row_ranges())
def test_steps_read_the_rows_that_are_not_skipped_in_order(config, ranges):
    skipping = changed(config, {"data.skip_rows": ranges})
    assert stages(skipping) == stages(config)
    kept = itertools.filterfalse(lambda row: any(first <= row < end for first, end in ranges), itertools.count())
    unread = 0
    for step in range(min(total_steps(config), 60)):
        assert rows_before(skipping, step) == unread
        rows = list(itertools.islice(kept, rows_before(config, step + 1) - rows_before(config, step)))
        assert step_rows(skipping, step) == rows
        unread = rows[-1] + 1


def test_budgets_of_trillions_are_exact():
    ramp = BatchConfig(16_777_216, start=4_194_304, ramp_tokens=50 * 10**9)
    phases = (PhaseConfig(8 * 10**12 + 1, "base", context=4096, batch=ramp),
              PhaseConfig(1, "last", context=32768, batch=BatchConfig(16_777_216)))  # fmt: skip
    config = changed(SMALL, {"model.max_positions": 32768, "phases": phases})
    config.check()
    sizes = [(stage.tokens, stage.steps) for stage in stages(config)]
    token = 0
    for (size, steps), end in zip(sizes, (8_333_333_333, 25 * 10**9, 41_666_666_667), strict=False):  # 1/6, 1/2, 5/6
        assert token + (steps - 1) * size < end <= token + steps * size
        token += steps * size
    assert [size for size, _ in sizes] == [4_194_304, 8_388_608, 12_582_912, 16_777_216, 16_777_216]
    (_, end), last = phase_steps(config)
    assert last == (end, end + 1)
    assert 8 * 10**12 + 1 <= tokens_before(config, end) < 8 * 10**12 + 1 + 16_777_216


def test_more_steps_than_can_be_counted_are_refused():
    most = 2**31 - 1
    assert total_steps(changed(SMALL, {"phases": (PhaseConfig(32 * most, batch=BatchConfig(32)),)})) == most
    with pytest.raises(InputError, match=r"^phases\.train\.tokens is .* fewer than 2147483648 steps"):
        stages(changed(SMALL, {"phases": (PhaseConfig(32 * most + 1, batch=BatchConfig(32)),)}))


def test_ends_of_a_ramp_are_whole_tokens_however_long_it_is():
    batch = BatchConfig(4096, start=1024, ramp_tokens=6 * 10**400)
    assert [end for end, _ in batch.sizes()] == [10**400, 3 * 10**400, 5 * 10**400, None]


@given(sequences=st.integers(1, 40), shards=st.integers(1, 30), micro=st.none() | st.integers(1, 8))
def test_a_step_divides_into_micro_batches_of_each_shard(sequences, shards, micro):
    phase = PhaseConfig(1, batch=BatchConfig(8 * sequences, micro_batch=micro), context=8)
    config = changed(SMALL, {"phases": (phase,)})
    (stage,) = stages(config)
    of_shard, result = sequences // shards, micro_batch(config, stage, shards)
    if micro is None or micro > of_shard:  # one micro-batch
        assert result == max(1, of_shard)
        assert (sequences % (shards * result) == 0) == (sequences % shards == 0)
    else:
        assert result == micro
