"""Fit time = α + size / β to measured times, with confidence intervals, and derive sizes from it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

SATURATED = 0.9  # share of β that messages of the knee reach
CONFIDENCE = 0.95
_ROUNDS = 4  # of reweighting; the weights change by less than 1 % after the third


class Estimate(NamedTuple):
    """An estimate and its confidence interval."""

    value: float
    low: float
    high: float


class Fit(NamedTuple):
    """Latency and bandwidth of a collective."""

    alpha: Estimate  # seconds of an empty message
    beta: Estimate  # algorithm bandwidth of an infinite one, bytes/s
    half_size: float  # n½: the size in bytes that reaches half of β
    knee: float  # the smallest size in bytes that reaches `SATURATED` of β; larger buffers overlap less


def fit_times(sizes: Sequence[float], seconds: Sequence[float]) -> Fit | None:
    """Fit by least squares of relative errors, since times of all sizes scatter by similar percentages.

    The weights are those of the fitted times, so that a time that happens to be short does not count more. The
    confidence intervals are those of Student's t distribution; that of β is the inverse of the slope's.

    Returns:
      The fit; None with fewer than three different `sizes` in bytes, or if times do not grow with the size.
    """
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    if len(set(sizes)) < 3:
        return None
    weights, line, covariance = 1 / time, np.zeros(2), np.zeros((2, 2))
    for _ in range(_ROUNDS):
        line, covariance = np.polyfit(size, time, 1, w=weights, cov=True)
        weights = 1 / np.maximum(np.polyval(line, size), 0.1 * time)
    margins = np.sqrt(np.diag(covariance)) * stdtrit(len(size) - 2, (1 + CONFIDENCE) / 2)
    (slope, start), low, high = line.tolist(), (line - margins).tolist(), (line + margins).tolist()
    if slope <= 0:
        return None
    half, fastest = max(start, 0.0) / slope, 1 / low[0] if low[0] > 0 else float("inf")
    beta = Estimate(1 / slope, 1 / high[0], fastest)
    return Fit(Estimate(start, low[1], high[1]), beta, half, half * SATURATED / (1 - SATURATED))
