"""Phases that cannot be are refused by index, name and field; sizes of a batch along a phase."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config_helpers import NO_PATHS, SMALL, SOURCES, changed, refused
from zaya_jax.config import BatchConfig, BatchSizeConfig, PhaseConfig, ScheduleConfig, Table
from zaya_jax.config.checks import shown
from zaya_jax.config.phases import MAX_SIZES

CHANGES = {"data.sources": SOURCES, "train.batch": BatchConfig(128)}


def phases(second, **first):
    """Changes to the small configuration: two phases, of them `second` called 'mid'."""
    return CHANGES | {"phases": (PhaseConfig(**{"tokens": 1000, **first}),
                                 PhaseConfig(**{"tokens": 1000, "name": "mid", **second}))}  # fmt: skip


def size(until, tokens=64):
    return BatchSizeConfig(until, tokens)


def batch(*args, **fields):
    return {"batch": BatchConfig(*args, **fields)}


def schedule(*args, **fields):
    return {"schedule": ScheduleConfig(*args, **fields)}


SIZES = [BatchSizeConfig(until, 64) for until in range(1, 1 + MAX_SIZES)]
BAD = [
    *(({"tokens": value}, "tokens", value) for value in (0, -5)),
    *(({"context": value}, "context", value) for value in (0, 65)),
    ({"rope_base": 0.0}, "rope_base", 0.0),
    ({"mixture": Table({"web": 0.0, "code": 0.0})}, "mixture", {"web": 0.0, "code": 0.0}),
    ({"mixture": Table({"web": -1.0})}, "mixture.web", -1.0),
    *(({"mixture": Table({name: 1.0})}, "mixture", name) for name in ("webb", "corpus")),
    # the batch
    *((batch(tokens), "batch.tokens", tokens) for tokens in (0, 100)),
    (batch(128, stepped=(size(9, 40),)), "batch.stepped.0.tokens", 40),
    *((batch(128, micro_batch=micro), "batch.micro_batch", micro) for micro in (0, 3)),
    (batch(128, start=64, ramp_tokens=9, micro_batch=4), "batch.micro_batch", 4),
    *((batch(tokens, start=start, ramp_tokens=9), "batch.start", start)
      for tokens, start in [(128, 16), (128, 0), (128, -32), (160, 64), (128, 128), (128, 256)]),
    (batch(128, ramp_tokens=9), "batch.ramp_tokens", 9),
    (batch(128, start=32), "batch.ramp_tokens", 0),
    (batch(128, start=32, ramp_tokens=9, stepped=(size(9),)), "batch.stepped", [64]),
    (batch(128, stepped=tuple(SIZES)), "batch.stepped", [64] * MAX_SIZES),
    (batch(128, stepped=(size(9), size(9))), "batch.stepped.1.until", 9),
    (batch(128, stepped=(size(9), size(12), size(3))), "batch.stepped.2.until", 3),
    (batch(128, stepped=(size(0),)), "batch.stepped.0.until", 0),
    (batch(128, stepped=(size(9), size(12, 0))), "batch.stepped.1.tokens", 0),
    # the schedule
    (schedule(peak=0.0), "schedule.peak", 0.0),
    *((schedule(final=final), "schedule.final", final) for final in (1.5, -0.1)),
    (schedule("linear", 0.05), "schedule.final", 0.1),
    *((schedule(warmup_tokens=tokens), "schedule.warmup_tokens", tokens) for tokens in (-1, 1001)),
    (schedule("wsd", warmup_tokens=900, decay_tokens=101), "schedule.decay_tokens", 101),
    *((schedule("wsd", decay_tokens=tokens), "schedule.decay_tokens", tokens) for tokens in (None, 0)),
    *((schedule(shape, decay_tokens=5), "schedule.decay_tokens", 5) for shape in ("constant", "cosine", "linear")),
]  # fmt: skip


@pytest.mark.parametrize(("second", "key", "value"), BAD)
def test_a_value_that_cannot_be_is_refused_with_its_phase_and_key(second, key, value):
    assert refused(phases(second)).startswith(f"phases.mid.{key} is {shown(value)}, but must be ")


def test_the_phase_that_is_named_is_the_one_that_is_wrong():
    assert refused(phases({}, context=65, name="a-9")).startswith("phases.a-9.context is 65, ")
    # A schedule spans the phases up to the next that gives one, and the first phase's own is named.
    long = schedule(warmup_tokens=1500)
    changed(SMALL, phases({}, **long)).check()
    assert refused(phases(schedule(), **long)).startswith("phases.train.schedule.warmup_tokens is 1500, but ")
    # A phase without `batch` inherits the run's, so the error names train.batch.
    message = refused(phases({"context": 48}))
    assert message.startswith("train.batch.tokens is 128, but must be a multiple of phases.mid.context (48): ")


@pytest.mark.parametrize("name", ["", "x" * 201, "a b", "1a", "a.b", "a/b", "..", "a\n", "a=b"])
def test_a_phase_needs_a_name_that_a_key_can_hold(name):
    assert refused(phases({"name": name})).startswith(f"phases.1.name is {shown(name)}, ")


def test_names_of_phases_are_unique_there_is_one_and_start_phase_is_among_them():
    assert refused(phases({"name": "train"})).startswith("phases.1.name is 'train', but must be unique ")
    assert refused({"phases": ()}).startswith("phases has 0 items, ")
    message = refused(phases({}) | {"start_phase": "midd"})
    assert message == "start_phase is 'midd', but must be one of train, mid."


@pytest.mark.parametrize("value", NO_PATHS)
def test_a_template_that_can_be_no_path_is_named(value):
    message = refused(phases({"template": value}))
    assert message.startswith("phases.mid.template is ")
    assert " is not a valid path: " in message


@pytest.mark.parametrize("second", [
    {"tokens": 1},
    {"tokens": 10**15},
    {"context": 64},
    batch(32),
    batch(128, micro_batch=4),
    batch(128, stepped=tuple(SIZES[1:])),
    batch(32 * 10**6, start=32, ramp_tokens=1),
    schedule(warmup_tokens=1000),
    schedule("wsd", warmup_tokens=400, decay_tokens=600, final=0.0),
    schedule("constant", peak=0.01),  # its final is not used
    schedule(peak=2.0, final=2.0),
])  # fmt: skip
def test_the_edges_of_the_possible(second):
    changed(SMALL, phases(second)).check()


@given(start=st.integers(1, 50), parts=st.integers(2, 3000), ramp=st.integers(1, 10**13))
def test_a_ramp_is_few_multiples_of_its_start_that_rise_evenly(start, parts, ramp):
    config = BatchConfig(start * parts, start=start, ramp_tokens=ramp)
    config.check("batch")
    ends, sizes = zip(*config.sizes(), strict=True)
    multiples = [size // start for size in sizes]
    assert [size % start for size in sizes] == [0] * len(sizes)
    assert (multiples[0], multiples[-1], ends[-1]) == (1, parts, None)
    assert len(multiples) == min(parts, MAX_SIZES)
    gaps = [high - low for low, high in itertools.pairwise(multiples)]
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1
    assert list(ends[:-1]) == sorted(ends[:-1])
    assert ends[0] >= 0
    assert ends[-2] <= ramp


@given(start=st.integers(1, 50), parts=st.integers(2, 3000), ramp=st.integers(1, 10**9), place=st.floats(0, 1.2))
def test_a_ramp_is_the_nearest_of_its_sizes_to_the_line(start, parts, ramp, place):
    config = BatchConfig(start * parts, start=start, ramp_tokens=ramp)
    token = int(place * ramp)
    here = next(size for end, size in config.sizes() if end is None or token < end)
    line = start + (config.tokens - start) * min(token / ramp, 1)
    nearest = min(abs(size - line) for _, size in config.sizes())
    # An end is a whole token, so that a token next to it may be on either side.
    assert abs(here - line) <= nearest + 2 * (config.tokens - start) / ramp + 1e-6 * config.tokens
