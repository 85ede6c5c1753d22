import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.data.loading.mixture import LONGEST_PERIOD, Mixture

# Short periods for what is looked at row by row, and any weights for what is looked at in places.
small = st.lists(st.integers(1, 40), min_size=1, max_size=8)
hundredths = st.lists(st.integers(1, 300).map(lambda n: n / 100), min_size=1, max_size=6)
anything = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=6)


def mixture_of(weights):
    return Mixture({f"source {i}": weight for i, weight in enumerate(weights)})


def rows_of(mixture, count):
    return [mixture.locate(row) for row in range(count)]


@settings(max_examples=25, deadline=None)
@given(small | hundredths, st.integers(0, 1000))
def test_counts_are_those_of_the_rows_and_each_source_is_read_in_order(weights, rows):
    mixture = mixture_of(weights)
    seen = [0] * len(weights)
    for source, row in rows_of(mixture, rows):
        assert row == seen[source]
        seen[source] += 1
    assert mixture.counts(rows) == seen


@settings(max_examples=15, deadline=None)
@given(anything, st.integers(0, 10**15))
def test_a_row_far_on_is_the_next_of_its_source(weights, row):
    mixture = mixture_of(weights)
    source, own = mixture.locate(row)
    before, after = mixture.counts(row), mixture.counts(row + 1)
    assert own == before[source]
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(i == source) for i in range(len(weights))]
    assert sum(before) == row


@settings(max_examples=15, deadline=None)
@given(small | hundredths | anything, st.data())
def test_every_stretch_from_the_start_holds_the_shares(weights, data):
    mixture = mixture_of(weights)
    per_period = mixture.counts(mixture.period)
    for rows in data.draw(st.lists(st.integers(0, 2 * mixture.period), max_size=20)):
        for count, of_period in zip(mixture.counts(rows), per_period, strict=True):
            share = Fraction(of_period, mixture.period)
            assert abs(count - rows * share) <= (1 + share * (len(weights) - 2)) / 2


@settings(max_examples=25, deadline=None)
@given(small | hundredths)
def test_a_short_period_has_exactly_the_shares(weights):
    exact = [Fraction(str(weight)) for weight in weights]
    mixture = mixture_of(weights)
    counts = mixture.counts(mixture.period)
    assert [Fraction(count, mixture.period) for count in counts] == [weight / sum(exact) for weight in exact]
    assert math.gcd(*counts) == 1


@settings(max_examples=25, deadline=None)
@given(anything)
def test_any_weights_are_rounded_by_less_than_a_row_a_period_and_none_is_lost(weights):
    mixture = mixture_of(weights)
    assert mixture.period <= LONGEST_PERIOD
    for weight, count in zip(weights, mixture.counts(LONGEST_PERIOD), strict=True):
        quota = weight / sum(weights) * LONGEST_PERIOD
        assert count >= 1
        # A source of less than a row gets one, which the others give.
        assert abs(count - quota) < len(weights)


@settings(max_examples=15, deadline=None)
@given(small | anything.map(lambda weights: [round(weight, 3) + 1 for weight in weights]))
def test_the_unit_of_the_weights_does_not_matter(weights):
    ten_times = [Fraction(str(weight)) * 10 for weight in weights]
    mixture, scaled = mixture_of(weights), mixture_of(ten_times)
    assert mixture.period == scaled.period
    assert rows_of(mixture, min(mixture.period, 500)) == rows_of(scaled, min(mixture.period, 500))


@pytest.mark.parametrize("sources", [1, 2, 7])
def test_equal_weights_take_turns(sources):
    mixture = mixture_of([0.3] * sources)
    assert mixture.period == sources
    assert rows_of(mixture, 3 * sources) == [(i, turn) for turn in range(3) for i in range(sources)]


def test_the_order_of_the_rows_is_fixed():
    # It must not change between versions, or a resumed run would repeat text.
    mixture = Mixture({"web": 0.5, "code": 0.3, "maths": 0.2})
    assert (mixture.names, mixture.period) == (("web", "code", "maths"), 10)
    assert [source for source, _ in rows_of(mixture, 10)] == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1, 65_535], [1, 65_535]),
        ([1, 10_000_000], [1, 65_535]),
        ([1e-300, 1, 1], [1, 32_768, 32_767]),
        ([1e-9] * 5 + [1, 1], [1] * 5 + [32_765, 32_766]),
        ([1, 1, 1.00001], [21_845, 21_845, 21_846]),
    ],
)
def test_a_small_weight_keeps_a_row_of_the_period(weights, expected):
    mixture = mixture_of(weights)
    assert mixture.period == LONGEST_PERIOD
    assert mixture.counts(LONGEST_PERIOD) == expected
