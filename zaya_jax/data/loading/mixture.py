"""Assign each row of a phase to a source, as a function of the weights and the row's index.

Rows of each source are spread evenly over a period by Webster's (Sainte-Laguë's) method, without randomness.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

LONGEST_PERIOD = 65_536  # rows


class Mixture:
    """An endless sequence of rows from several sources. Picklable and thread-safe.

    Weights are read as decimal fractions and become integers in lowest terms, whose sum is the period. If it would
    exceed 65,536, they are rounded to a period of that or a divisor of it, with at least one row per source.

    Within a period, the j-th row of a source with integer weight W has time (2j + 1) / 2W. Rows are sorted by time;
    ties keep the order of the sources. Among the first n rows, each of m sources with share w has n·w rows, with an
    error of at most (1 + w·(m - 2)) / 2.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Mix sources by weight, the relative number of rows, which is finite and above 0."""
        self.names: tuple[str, ...] = tuple(weights)
        self._per_period = _integers([Fraction(str(weight)) for weight in weights.values()])
        self.period: int = sum(self._per_period)
        # For integers this small, floating-point quotients are equal if and only if the fractions are.
        times = [(2 * np.arange(count) + 1) / (2 * count) for count in self._per_period]
        sources = np.repeat(np.arange(len(times), dtype=np.int32), self._per_period)
        self._source = sources[np.argsort(np.concatenate(times), kind="stable")]  # int32 [period]
        self._rows = [np.flatnonzero(self._source == source) for source in range(len(times))]  # int64 [rows] per source
        self._within = np.empty(self.period, np.int32)  # index of each row among those of its source
        for rows in self._rows:
            self._within[rows] = np.arange(len(rows))

    def locate(self, row: int) -> tuple[int, int]:
        """Return the source of a row, as an index into `names`, and the row's index within that source."""
        period, place = divmod(row, self.period)
        source = int(self._source[place])
        return source, period * self._per_period[source] + int(self._within[place])

    def counts(self, rows: int) -> list[int]:
        """Count the rows of each source among the first `rows`, in the order of `names`."""
        periods, rest = divmod(rows, self.period)
        pairs = zip(self._per_period, self._rows, strict=True)
        return [periods * count + int(np.searchsorted(places, rest)) for count, places in pairs]


def _integers(weights: list[Fraction]) -> list[int]:
    """Scale weights to integers in lowest terms, rounded if their sum would exceed `LONGEST_PERIOD`."""
    exact = _lowest_terms(weights)
    if sum(exact) <= LONGEST_PERIOD:
        return exact
    quotas = [Fraction(weight * LONGEST_PERIOD, sum(exact)) for weight in exact]
    rounded = [max(1, math.floor(quota)) for quota in quotas]
    while missing := LONGEST_PERIOD - sum(rounded):
        step = 1 if missing > 0 else -1
        free = [i for i, count in enumerate(rounded) if count + step >= 1]
        rounded[max(free, key=lambda i: step * (quotas[i] - rounded[i]))] += step
    return _lowest_terms([Fraction(count) for count in rounded])


def _lowest_terms(weights: list[Fraction]) -> list[int]:
    denominator = math.lcm(*(weight.denominator for weight in weights))
    integers = [int(weight * denominator) for weight in weights]
    divisor = math.gcd(*integers)
    return [integer // divisor for integer in integers]
