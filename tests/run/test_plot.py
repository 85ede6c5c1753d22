"""Pictures share a style; smoothing is a centred mean that keeps gaps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.run.figures import smoothed

LOSSES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), max_size=40)


@given(values=LOSSES, width=st.integers(0, 50))
def test_smoothed_values_are_means_of_their_neighbours_and_gaps_stay(values, width):
    means = smoothed(values, width)
    assert [math.isnan(mean) for mean in means] == [math.isnan(value) for value in values]
    for index, mean in enumerate(means):
        if not math.isnan(mean):
            near = values[max(0, index - width // 2) : index + width // 2 + 1]
            known = [value for value in near if not math.isnan(value)]
            assert mean == pytest.approx(math.fsum(known) / len(known), abs=1e-8)
