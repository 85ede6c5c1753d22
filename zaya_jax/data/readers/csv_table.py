"""Read CSV files, whose first row names the columns; cells are separated by commas, and may be in quotes.

A cell in quotes may contain line ends, so only a reader from the start of a file knows where rows begin: a file is one
unit.
"""

import csv
import functools
import sys
from collections.abc import Iterator

from zaya_jax.data.readers import documents, fields
from zaya_jax.data.readers.jsonl import plain_lines, read_object
from zaya_jax.errors import InputError


def read_csv(unit: documents.Unit, field: str) -> Iterator[documents.Entry]:
    """Yield the column of each row; `InputError` if the file cannot be read, or has no such column.

    Numbers in messages are those of the lines on which rows begin.
    """
    [file] = unit.files
    csv.field_size_limit(fields.LONGEST)
    read_bytes = [0]  # since the last row
    rows = csv.reader(_texts(file, read_bytes), strict=True)
    names, first = _header(file, rows, field), documents.FirstLine()
    while True:
        before = rows.line_num
        try:
            cells = next(rows)
            parsed = _parse(cells, names, field)
        except StopIteration:
            return
        except csv.Error as error:
            cells, parsed = [""], documents.Parsed(bad=("invalid CSV", str(error)))
        if cells:  # else the line is blank
            yield parsed.entry(file, read_bytes[0], before, first)
            read_bytes[0] = 0


def _header(file: str, rows: Iterator[list[str]], field: str) -> list[str]:
    try:
        names = next(rows, [])
    except csv.Error as error:
        raise InputError(f"The first row of {file}, which names the columns, cannot be read: {error}.") from error
    if len(names) == 1 and field not in names and (other := next((sign for sign in ";\t" if sign in names[0]), "")):
        problem = f"{names[0]!r}, whose cells seem to be separated by {other!r}"
        raise InputError(f"The first row of {file} is {problem}. Write the table with commas between cells.")
    name = fields.find_field(field, names) or field
    # Columns without a name are those of commas at the end of each row.
    fields.require_columns(file, field, names, filter(None, names) if fields.is_pair(field, name) else [name])
    return names


def _parse(cells: list[str], names: list[str], field: str) -> documents.Parsed:
    if len(cells) != len(names):
        problem = f"the row has {len(cells)} cells, but the first row names {len(names)} columns"
        return documents.Parsed(bad=("invalid CSV", problem))
    if any("\udc80" <= sign <= "\udcff" for cell in cells if not cell.isascii() for sign in cell):
        return documents.Parsed(bad=("not UTF-8", "a byte of the row cannot be decoded"))
    return read_object(dict(zip(names, cells, strict=True)), field)


def _texts(file: str, read_bytes: list[int]) -> Iterator[str]:
    for line, size in plain_lines(file, 0, sys.maxsize):
        read_bytes[0] += size
        yield line.decode(errors="surrogateescape")


FORMAT = documents.Format(functools.partial(documents.cut_evenly, lambda path: 1), read_csv)
