import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.io_estimate import fragmentation, io_estimate
from zaya_jax.errors import InputError

# zaya1.md §6.3
ZAYA1 = {"global_batch": 4096, "context": 4096, "step_seconds": 2.5, "max_operations_per_second": 70_000}
sizes = st.integers(1, 2**20)


def test_the_published_numbers_of_the_run():
    load = io_estimate(**ZAYA1)
    assert load.bytes_per_step == 64 * 2**20
    assert load.operations_per_step == 16_384
    assert load.operations_per_second == pytest.approx(6554, abs=0.5)
    assert load.shortest_step_seconds == pytest.approx(0.234, abs=0.0005)


def test_scattered_data_still_suffices():
    load = io_estimate(**ZAYA1, fragmentation=8)
    assert load.bytes_per_step == 64 * 2**20
    assert load.operations_per_second == pytest.approx(8 * 6553.6)
    assert load.operations_per_second < 70_000
    assert load.shortest_step_seconds == pytest.approx(8 * 16_384 / 70_000)


@given(sizes, sizes, st.sampled_from([2, 4]), sizes, st.floats(0.01, 1000), st.floats(1, 8))
def test_a_step_as_short_as_can_be_fed_uses_all_operations(batch, context, token, page, seconds, scattered):
    settings = {"global_batch": batch, "context": context, "token_bytes": token, "page_bytes": page}
    load = io_estimate(**settings, step_seconds=seconds, max_operations_per_second=70_000, fragmentation=scattered)
    at_limit = io_estimate(
        **settings,
        step_seconds=load.shortest_step_seconds,
        max_operations_per_second=70_000,
        fragmentation=scattered,
    )
    assert at_limit.operations_per_second == pytest.approx(70_000)
    assert load.operations_per_second * seconds == pytest.approx(load.operations_per_step)


@given(st.integers(0, 1000), sizes, st.sampled_from([2, 4]), sizes)
def test_fragmentation_counts_the_extra_pages_of_each_sequence(extra, context, token, page):
    scattered = fragmentation(extra_faults=extra, context=context, token_bytes=token, page_bytes=page)
    pages = context * token / page
    assert scattered * pages == pytest.approx(pages + extra)
    assert scattered >= 1


def test_a_sequence_of_four_pages_with_four_more_faults_is_fragmented_by_two():
    assert fragmentation(extra_faults=4, context=4096) == 2


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize(
    "name", ["global_batch", "context", "step_seconds", "max_operations_per_second", "token_bytes", "page_bytes"]
)
def test_a_load_of_nothing_is_an_error(name, value):
    with pytest.raises(InputError, match=f"^{name} is {value}; it must be finite and above 0"):
        io_estimate(**{**ZAYA1, name: value})


@pytest.mark.parametrize("value", [0, 0.5, math.nan, math.inf])
def test_no_data_is_less_fragmented_than_pages_in_a_row(value):
    with pytest.raises(InputError, match=f"fragmentation is {value}; it must be finite and at least 1"):
        io_estimate(**ZAYA1, fragmentation=value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("extra_faults", -1, "extra_faults is -1; it must be finite and not below 0"),
        ("extra_faults", math.nan, "extra_faults is nan"),
        ("context", 0, "context is 0"),
        ("token_bytes", -4, "token_bytes is -4"),
        ("page_bytes", 0, "page_bytes is 0"),
    ],
)
def test_a_fragmentation_of_nothing_is_an_error(name, value, message):
    with pytest.raises(InputError, match=message):
        fragmentation(**{"extra_faults": 1, "context": 8, name: value})
