"""Read a column of Parquet files, one row group after the other."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zaya_jax.data.readers.columns import check_columns, column_documents
from zaya_jax.data.readers.unit import Entry, FirstLine, Format, Unit, cut_evenly, even_share, reading, require_pieces

_FEWEST_ROWS, _MOST_ROWS, _BATCH_BYTES = 4, 256, 2**27  # of what is decoded at a time
_COMPACT_BYTES = 2**25  # of a row group that is read dictionary-encoded, and of its rows that are decoded at a time
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


def _open(file: str, metadata: pq.FileMetaData | None = None, compact: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a file; text in the `compact` leaf columns stays dictionary-encoded."""
    with reading(f"The Parquet file {file}", pa.ArrowException):
        # As text, the path would have to be UTF-8.
        return pq.ParquetFile(pa.OSFile(os.fsencode(file)), metadata=metadata, read_dictionary=list(compact),
                              buffer_size=_READ_BYTES, page_checksum_verification=True)  # fmt: skip


def _batches(file: str, table: pq.ParquetFile, unit: Unit, columns: list[str]) -> Iterator[pa.RecordBatch]:
    paths = [table.schema.column(i).path for i in range(table.metadata.num_columns)]
    leaves = [i for i, path in enumerate(paths) if f"{path}.".startswith(tuple(f"{name}." for name in columns))]
    with closing(_open(file, table.metadata, [paths[i] for i in leaves])) as compact:
        for group in range(unit.start, unit.stop):
            # A few bytes can stand for many rows, but however it is encoded, a value is no larger than its column's
            # pages, and a row has no more values than the other rows leave. Decoding deltas takes several times as much
            # memory. What stays dictionary-encoded has its pages and an index a value.
            chunks = [table.metadata.row_group(group).column(i) for i in leaves]
            count = max(1, table.metadata.row_group(group).num_rows)
            has_deltas = any("DELTA_BYTE_ARRAY" in chunk.encodings for chunk in chunks)
            largest = max(chunk.total_uncompressed_size * (chunk.num_values - count + 1) for chunk in chunks)
            rows = _BATCH_BYTES // max(1, largest * (4 if has_deltas else 1))
            size = sum(chunk.total_uncompressed_size + 4 * chunk.num_values for chunk in chunks)
            is_compact = rows < _FEWEST_ROWS and size <= _COMPACT_BYTES and not has_deltas
            source, rows = (compact, count) if is_compact else (table, max(_FEWEST_ROWS, min(_MOST_ROWS, rows)))
            with reading(f"The Parquet file {file}", pa.ArrowException):
                for batch in source.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                    yield from _expand(batch, table.schema_arrow) if is_compact else [batch]


def _expand(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in the types of `schema`, but a row that stands for too much as it is."""
    try:
        is_small = sum(map(_expanded_size, batch.columns)) <= _COMPACT_BYTES
        batch = batch.cast(pa.schema([schema.field(name) for name in batch.schema.names])) if is_small else batch
    except pa.ArrowNotImplementedError:  # of maps and list views
        is_small = True
    half = len(batch) // 2
    if is_small or not half:
        yield batch
        return
    for rows in (range(half), range(half, len(batch))):  # taken, since the cast of a slice expands all rows
        yield from _expand(batch.take(pa.array(rows)), schema)


def _expanded_size(array: pa.Array) -> int:
    """Return the bytes that an array has without dictionaries."""
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.call_function("binary_length", [array.dictionary])
        return pc.call_function("sum", [lengths.take(array.indices)]).as_py() or 0
    if hasattr(array, "flatten"):
        parts = array.flatten()
        return sum(map(_expanded_size, parts if isinstance(array, pa.StructArray) else [parts]))
    return array.nbytes


FORMAT = Format(partial(cut_evenly, count_row_groups), read_parquet)
