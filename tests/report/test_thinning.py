"""Long lines become short ones that show the same: ends, peaks, dips and order."""

import math

from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.report.curves import Thinned, significant, thin

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=300)


@given(VALUES, st.integers(4, 60))
def test_a_thinned_line_has_few_points_of_the_line_with_its_ends_peaks_and_dips(values, most):
    steps = list(range(10, 10 + 3 * len(values), 3))
    xs, ys = thin(steps, values, most)
    assert len(xs) == len(ys) <= max(most, 4)
    assert xs == sorted(set(xs))
    points = dict(zip(steps, values, strict=True))
    assert all(y == points[x] or math.isnan(y) == math.isnan(points[x]) for x, y in zip(xs, ys, strict=True))
    assert (xs[0], xs[-1]) == (steps[0], steps[-1])
    known, kept = ([y for y in each if not math.isnan(y)] for each in (values, ys))
    assert bool(kept) == bool(known)
    if known:
        assert (min(kept), max(kept)) == (min(known), max(known))
    if len(values) <= most:
        assert len(ys) == len(values)


def test_a_gap_stays_a_gap():
    values = [1.0] * 400 + [math.nan] * 200 + [2.0] * 400
    xs, ys = thin(range(1000), values, 100)
    assert all(math.isnan(y) == (400 <= x < 600) for x, y in zip(xs, ys, strict=True))
    assert any(math.isnan(y) for y in ys)


@given(st.integers(1, 500), st.integers(2, 30))
def test_items_are_kept_evenly_and_with_the_last(count, most):
    kept = Thinned[str](most)
    for step in range(count):
        kept.add(step, str(step))
    kept.close()
    assert kept.items == list(map(str, kept.steps))
    assert (kept.steps[0], kept.steps[-1]) == (0, count - 1)
    assert min(count, most // 2) <= len(kept.steps) <= most + 1
    gaps = {later - earlier for earlier, later in zip(kept.steps, kept.steps[1:-1], strict=False)}
    assert len(gaps) <= 1


def test_nothing_is_kept_of_nothing():
    kept = Thinned[int](4)
    kept.close()
    assert kept.steps == []


@given(st.floats(allow_nan=True))
def test_numbers_are_rounded_to_what_a_plot_can_show(value):
    rounded = significant(value)
    if not math.isfinite(value):
        assert rounded is None
    elif math.isfinite(rounded):
        assert abs(rounded - value) <= 5e-5 * abs(value)
        assert len(f"{abs(rounded):.5g}".replace(".", "").partition("e")[0].lstrip("0")) <= 5
