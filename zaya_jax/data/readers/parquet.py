"""Read a column of Parquet files, one row group after the other."""

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from zaya_jax.data.readers.columns import check_columns, column_documents
from zaya_jax.data.readers.unit import Entry, FirstLine, Format, Unit, cut_evenly, even_share, reading, require_pieces

_FEWEST_ROWS, _MOST_ROWS, _BATCH_BYTES = 4, 256, 2**27  # of what is decoded at a time
_READ_BYTES = 2**20  # read buffer; without it, pyarrow holds a whole compressed column chunk in memory


def count_row_groups(file: str) -> int:
    """Return the number of row groups, or 0 if the file has no row. Reads only the footer.

    Raises:
      InputError: the file cannot be read or is damaged.
    """
    with closing(_open(file)) as table:
        return table.metadata.num_row_groups if table.metadata.num_rows else 0


def read_parquet(unit: Unit, field: str) -> Iterator[Entry]:
    """Yield the rows of the unit's row groups; a null becomes a `BadDocument`.

    Raises:
      InputError: the file cannot be read, is damaged, lost row groups, or has no such column.
    """
    [file] = unit.files
    with closing(_open(file)) as table:
        require_pieces(unit, file, table.metadata.num_row_groups, "row group")
        columns = check_columns(file, table.schema_arrow, field)
        rows = [table.metadata.row_group(i).num_rows for i in range(unit.stop)]
        first, before, total = FirstLine(1 + sum(rows[: unit.start])), 0, sum(rows[unit.start :])
        for batch in _batches(file, table, unit, columns):
            size = even_share(unit.bytes, total, before, before + len(batch))
            yield from column_documents(batch, file=file, columns=columns, size=size, before=before, first=first)
            before += len(batch)


def _open(file: str) -> pq.ParquetFile:
    with reading(f"The Parquet file {file}", pa.ArrowException):
        # As text, the path would have to be UTF-8.
        return pq.ParquetFile(pa.OSFile(os.fsencode(file)), buffer_size=_READ_BYTES, page_checksum_verification=True)


def _batches(file: str, table: pq.ParquetFile, unit: Unit, columns: list[str]) -> Iterator[pa.RecordBatch]:
    leaves = [i for i in range(table.metadata.num_columns)
              if f"{table.schema.column(i).path}.".startswith(tuple(f"{name}." for name in columns))]  # fmt: skip
    for group in range(unit.start, unit.stop):
        # A few bytes can stand for many rows, but however it is encoded, a value is no larger than its column's pages,
        # and a row has no more values than the other rows leave. Decoding deltas takes several times as much memory.
        chunks = [table.metadata.row_group(group).column(i) for i in leaves]
        count = max(1, table.metadata.row_group(group).num_rows)
        largest = max(chunk.total_uncompressed_size * (chunk.num_values - count + 1)
                      * (4 if "DELTA_BYTE_ARRAY" in chunk.encodings else 1) for chunk in chunks)  # fmt: skip
        rows = max(_FEWEST_ROWS, min(_MOST_ROWS, _BATCH_BYTES // max(1, largest)))
        with reading(f"The Parquet file {file}", pa.ArrowException):
            yield from table.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)


FORMAT = Format(partial(cut_evenly, count_row_groups), read_parquet)
