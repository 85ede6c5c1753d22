"""The result of a check of a machine or job, and how it is printed."""

from typing import Literal, NamedTuple

from zaya_jax.lab.result import print_once
from zaya_jax.lab.result_tables import UNITS


class Check(NamedTuple):
    """The result of a check."""

    check: str  # its name
    status: Literal["PASS", "WARN", "FAIL"]  # 'FAIL' if the job should not start
    value: float | None  # what was measured; None for a check that measures nothing
    unit: str  # of `value`
    message: str  # a sentence or list; '' if there is nothing to say

    def print(self) -> None:
        """Print the check as a line, in the first process of the job."""
        quantity = "" if self.value is None else f"{format_quantity(self.value, self.unit):>14}  "
        print_once(f"{self.status:<5}{self.check:<22}{quantity}{self.message}".rstrip())


def format_quantity(value: float, unit: str) -> str:
    """Format a value with three significant digits, in the unit of tables."""
    scale, shown = UNITS.get(unit, (1, unit))
    return f"{value / scale:,.3g} {shown}"
