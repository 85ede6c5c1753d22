"""Detect NaN and infinite weights in host memory, at 5 GB/s and more."""

import numpy as np

from zaya_jax.errors import InputError

_BLOCK = 2**20  # elements checked at a time, so that they stay in the cache


def is_finite(x: np.ndarray) -> bool:
    """Return whether all elements of a float array are finite; copies arrays that are not contiguous."""
    # Without the sign bit, bit patterns order like numbers, followed by infinity and NaN. NumPy's own `isfinite` takes
    # seven times as long for 16 bits.
    bits = np.dtype(f"u{x.dtype.itemsize}")
    pattern, infinity = x.reshape(-1).view(bits), np.array(np.inf, x.dtype).view(bits)
    magnitude = bits.type(2 ** (8 * x.dtype.itemsize - 1) - 1)
    return all((pattern[at : at + _BLOCK] & magnitude).max() < infinity for at in range(0, pattern.size, _BLOCK))


def finite_cast(stored: np.ndarray, dtype: np.dtype, name: str, remedy: str) -> np.ndarray:
    """Return the values of the tensor `name` in `dtype`, contiguous; `InputError` if they are not finite.

    `remedy` says what to do if those that are `stored` are not finite.
    """
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(stored.astype(dtype, copy=False))
    if not is_finite(values):
        beyond = f"values beyond the range of {dtype.name}; choose a wider dtype"
        problem = beyond if is_finite(stored) else f"NaN or infinite values; {remedy}"
        raise InputError(f"The tensor {name} has {problem}.")
    return values
