"""Values that are NaN or infinite, told apart as numpy does."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.hf import finite
from zaya_jax.hf.finite import is_finite

KINDS = [np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]


@given(kind=st.sampled_from(KINDS), raw=st.binary(max_size=64))
def test_any_bits_are_told_apart_as_numpy_does(kind, raw):
    x = np.frombuffer(raw[: len(raw) // kind.itemsize * kind.itemsize], kind)
    assert is_finite(x) == bool(np.isfinite(x).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_value_anywhere_is_found(kind, value, monkeypatch):
    monkeypatch.setattr(finite, "_BLOCK", 7)
    largest = ml_dtypes.finfo(kind).max
    for at in range(20):
        x = np.full((4, 5), -largest, kind).T
        assert is_finite(x)
        x[at % 5, at // 5] = value
        assert not is_finite(x)
