"""A table of texts, and how its cells are formatted."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Cell = Callable[[Row], str]

NONE = "–"  # shown in place of a missing value
_NUMBER = re.compile(r"–|[-+]?[\d.,]+(e[-+]\d+)?( %)?")


class Table(NamedTuple):
    """A table of texts."""

    title: str  # what it shows
    columns: list[str]  # heads, with units
    rows: list[list[str]]  # cells
    remarks: tuple[str, ...] = ()  # sentences below it

    @property
    def numeric(self) -> list[bool]:
        """True if each column holds numbers only."""
        return [all(_NUMBER.fullmatch(cell) for cell in cells) for cells in zip(*self.rows, strict=True)]


def make_table(title: str, rows: Iterable[Row], columns: Mapping[str, str | Cell], *remarks: str) -> Table:
    """Make a table from rows; each column has a head, and a key or a function of the row."""

    def cell(row: Row, column: str | Cell) -> str:
        if not isinstance(column, str):
            return column(row)
        value = row.get(column)
        return NONE if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    cells = [[cell(row, column) for column in columns.values()] for row in rows]
    return Table(title, list(columns), cells, remarks)


def same(*keys: str) -> dict[str, str | Cell]:
    """Return columns whose heads are their keys."""
    return {key: key for key in keys}


def format_table(rows: Iterable[Sequence[str]], right: Sequence[bool] | None = None) -> list[str]:
    """Return the lines of a text table, its heads first; columns that are `right`, all but the first, end aligned."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.rjust if is_right else str.ljust for is_right in right or [False, *[True] * (len(widths) - 1)]]
    lines = ("  ".join(fit(cell, width) for fit, cell, width in zip(align, row, widths, strict=True)) for row in rows)
    return list(map(str.rstrip, lines))


def quantity(*keys: str, unit: float) -> Cell:
    """Return a cell that formats the value at nested `keys` in multiples of `unit`; '–' if there is none."""

    def cell(row: Row) -> str:
        value: Any = row
        for key in keys:
            value = None if value is None else value.get(key)
        return number(value, unit)

    return cell


def share(key: str) -> Cell:
    """Return a cell that formats the fraction at `key` as a percentage; '–' if there is none."""
    return lambda row: percent(row[key])


def number(value: float | None, unit: float = 1.0) -> str:
    """Format a value in multiples of `unit`: three significant digits, from 100 on whole numbers."""
    if value is None:
        return NONE
    value /= unit
    return f"{value:,.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:#.3g}"


def percent(fraction: float | None) -> str:
    """Format a fraction as a percentage."""
    return NONE if fraction is None else f"{100 * fraction:.1f} %"


def size_text(size: int) -> str:
    """Format bytes with a decimal unit, such as '47.5 MB'."""
    power = next((power for power in range(4) if size < 1000 ** (power + 1)), 4)
    return f"{size:.0f} B" if power == 0 else f"{size / 1000**power:.1f} {'kMGT'[power - 1]}B"
