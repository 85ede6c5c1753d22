"""Read a column of Parquet and Arrow tables, one row after the other.

Parquet files are cut between row groups, and Arrow files between record batches. Arrow streams, which `datasets` writes
in shards of 500 MB, have no index of their batches and are one piece.
"""

import functools
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zaya_jax.data.readers import documents, fields
from zaya_jax.errors import InputError

_FEWEST_ROWS, _MOST_ROWS, _BATCH_BYTES = 4, 256, 2**27  # of what is decoded of a Parquet file at a time
_COMPACT_BYTES = 2**25  # of a row group that is read dictionary-encoded
_READ_BYTES = 2**20  # read buffer; without it, pyarrow holds a whole compressed column chunk in memory
_ARROW_FILE_MAGIC = b"ARROW1"  # a stream starts with the length of its schema instead
# Types of which a few bytes can stand for many values.
_SHARED = re.compile(r"dictionary|view|run_end|(?<!not )null|struct<>|\[0\]")
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
_TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.null())


def count_pieces(file: str) -> int:
    """Return the number of pieces that a file can be cut into, 0 for a Parquet file without rows."""
    with _open(file) as table:
        return table.pieces


def count_rows(file: str, stop: int | None = None) -> int:
    """Count the rows of a file, or of its pieces before `stop`, without reading columns."""
    with _open(file) as table:
        return table.count_rows(table.pieces if stop is None else stop)


def read_table(unit: documents.Unit, field: str) -> Iterator[documents.Entry]:
    """Yield the rows of the unit's pieces; `InputError` if the file is damaged, lost pieces, or has no such column."""
    [file] = unit.files
    with _open(file) as table:
        documents.require_pieces(unit, file, table.pieces, *table.noun)
        columns, before = check_columns(file, table.schema, field), 0
        is_pair = fields.is_pair(field, columns[0])
        first = documents.FirstLine(lambda: 1 + count_rows(file, unit.start)) if unit.start else documents.FirstLine()
        for batch, size in table.batches(unit, columns):
            place = {"size": size, "before": before, "first": first}
            yield from column_documents(batch, file=file, columns=columns, **place, is_pair=is_pair)
            before += len(batch)


@contextmanager
def _open(file: str) -> "Iterator[_Parquet | _Arrow]":
    name, kind = ("Parquet", _Parquet) if file.endswith(".parquet") else ("Arrow", _Arrow)
    with documents.reading(f"The {name} file {file}", pa.ArrowException), closing(kind(file)) as table:
        yield table


class _Parquet:
    """An open Parquet file, whose pieces are row groups."""

    noun = "row group", "s"

    def __init__(self, file: str) -> None:
        self._file, self._table = file, _parquet(file)
        self._metadata, self.schema = self._table.metadata, self._table.schema_arrow
        self.pieces = self._metadata.num_row_groups if self._metadata.num_rows else 0

    def count_rows(self, stop: int) -> int:
        return sum(self._metadata.row_group(i).num_rows for i in range(stop))

    def batches(self, unit: documents.Unit, columns: list[str]) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield batches of few bytes, and the part of the unit's bytes that each stands for."""
        paths = [self._table.schema.column(i).path for i in range(self._metadata.num_columns)]
        leaves = [i for i, path in enumerate(paths) if f"{path}.".startswith(tuple(f"{name}." for name in columns))]
        total, before = self.count_rows(unit.stop) - self.count_rows(unit.start), 0
        with closing(_parquet(self._file, [paths[i] for i in leaves], self._metadata)) as compact:
            for group in range(unit.start, unit.stop):
                # A few bytes can stand for many rows, but however it is encoded, a value is no larger than its
                # column's pages, and a row has no more values than the other rows leave. Decoding deltas takes several
                # times as much memory. What stays dictionary-encoded has its pages and an index a value.
                chunks = [self._metadata.row_group(group).column(i) for i in leaves]
                count = max(1, self._metadata.row_group(group).num_rows)
                has_deltas = any("DELTA_BYTE_ARRAY" in chunk.encodings for chunk in chunks)
                largest = max(chunk.total_uncompressed_size * (chunk.num_values - count + 1) for chunk in chunks)
                rows = _BATCH_BYTES // max(1, largest * (4 if has_deltas else 1))
                size = sum(chunk.total_uncompressed_size + 4 * chunk.num_values for chunk in chunks)
                is_compact = rows < _FEWEST_ROWS and size <= _COMPACT_BYTES and not has_deltas
                source = compact if is_compact else self._table
                rows = count if is_compact else min(max(_FEWEST_ROWS, rows), _MOST_ROWS)
                for batch in source.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                    yield batch, documents.even_share(unit.bytes, total, before, before + len(batch))
                    before += len(batch)

    def close(self) -> None:
        self._table.close()


def _parquet(file: str, compact: list[str] | None = None, metadata: Any = None) -> pq.ParquetFile:
    """Open a file, whose `metadata` may be known; text in the `compact` leaf columns stays dictionary-encoded."""
    source = pa.OSFile(os.fsencode(file))  # as text, the path would have to be UTF-8
    settings = {"buffer_size": _READ_BYTES, "page_checksum_verification": True}
    return pq.ParquetFile(source, metadata=metadata, read_dictionary=compact, **settings)


class _Arrow:
    """An open, memory-mapped Arrow IPC file, whose pieces are record batches, or stream, which is one piece."""

    def __init__(self, file: str) -> None:
        self._file, self._source = file, pa.memory_map(os.fsencode(file))
        self._is_stream = self._source.read(len(_ARROW_FILE_MAGIC)) != _ARROW_FILE_MAGIC
        self.noun = ("stream", "s") if self._is_stream else ("record batch", "es")
        reader = self._reader([])
        self.schema = reader.schema
        self.pieces = 1 if self._is_stream else reader.num_record_batches

    def count_rows(self, stop: int) -> int:
        return sum(batch.num_rows for batch in self._batches([], 0, stop))

    def batches(self, unit: documents.Unit, columns: list[str]) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield the batches of a unit, and the part of its bytes that each stands for."""
        before, pieces = 0, unit.stop - unit.start
        for number, batch in enumerate(self._batches(columns, unit.start, unit.stop), 1):
            try:
                batch.validate(full=True)  # memory-mapped offsets are unchecked, and could point outside it
            except pa.ArrowInvalid as error:
                if "UTF8" not in str(error):  # invalid UTF-8 is reported per row
                    raise
            read = min(self._source.tell(), unit.bytes) if self._is_stream else unit.bytes * number // pieces
            yield batch, read - before
            before = read

    def _batches(self, columns: list[str], start: int, stop: int) -> Iterator[pa.RecordBatch]:
        reader = self._reader(columns)
        if not self._is_stream:
            yield from map(reader.get_batch, range(start, stop))
            return
        end = self._source.tell()
        for batch in reader:
            end = self._source.tell()
            yield batch
        if self._source.tell() == end:  # pyarrow accepts the end of the file instead of the marker
            problem = "ends without its end-of-stream marker, so it is truncated"
            raise InputError(f"The Arrow file {self._file} {problem}. Copy or write it again.")

    def _reader(self, columns: list[str]) -> Any:
        """Open a reader of the given columns, whose names must be unique; without any, of all."""
        indices = [self.schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
        self._source.seek(0)
        return (pa.ipc.open_stream if self._is_stream else pa.ipc.open_file)(self._source, options=options)

    def close(self) -> None:
        self._source.close()


def check_columns(file: str, schema: pa.Schema, field: str) -> list[str]:
    """Return the columns to read: that of the field and, of conversations, all others, which may change their meaning.

    `InputError` unless the file has each of them once, and the type of the first is text or lists.
    """
    name = fields.find_field(field, schema.names) or field
    fields.require_columns(file, field, schema.names, [name])
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not isinstance(kind, _LISTS):
        if kind not in _TEXTS:
            problem = f"has type {kind}, but must have text or lists"
            columns = ", ".join(map(repr, schema.names))
            raise InputError(f"The column {name!r} of the file {file} {problem}; its columns are {columns}.")
        if not fields.is_pair(field, name):
            return [name]
    fields.require_columns(file, field, schema.names, schema.names)
    return [name, *(other for other in schema.names if other != name)]


def column_documents(
    batch: pa.RecordBatch,
    *,
    file: str,
    columns: list[str],
    size: int,
    before: int,
    first: documents.FirstLine,
    is_pair: bool = False,
) -> Iterator[documents.Entry]:
    """Yield the rows of a batch, which stands for `size` bytes of the unit, and follows `before` of its rows."""
    array, (field, *names) = batch.column(columns[0]), columns
    beside = {name: batch.column(name) for name in names}
    is_small = array.nbytes <= fields.LONGEST and not _SHARED.search(str(array.type))
    for i, row in enumerate(array):  # one at a time: in a dictionary, a few bytes can stand for many megabytes
        value, others = _value(row, is_small), {name: _value(column[i]) for name, column in beside.items()}
        share = documents.even_share(size, len(array), i, i + 1)
        yield fields.read_record({field: value, **others}, field, is_pair=is_pair).entry(file, share, before + i, first)


def _value(row: Any, is_small: bool = False) -> object:
    """Return a value as Python has it, or the error why that is impossible."""
    plain = row.value if isinstance(row, pa.DictionaryScalar) else row
    if isinstance(plain, pa.BinaryScalar) and not isinstance(plain, pa.StringScalar):  # an image: counted, not read
        return True if plain.is_valid else None
    try:
        _ = is_small or _subtract(fields.LONGEST, row)
        return row.as_py()
    except (ValueError, OverflowError, MemoryError) as error:
        return error


def _subtract(left: int, value: Any) -> int:
    """Return `left` less the bytes that a value has once converted. Raise `MemoryError` as soon as that is negative."""
    value = value.value if isinstance(value, pa.DictionaryScalar) else value
    left -= 8 + (value.as_buffer().size if isinstance(value, pa.BinaryScalar) and value.is_valid else 0)
    parts = value.values if isinstance(value, pa.ListScalar) else ()
    if parts and pa.types.is_primitive(parts.type):  # numbers, such as an embedding's
        left, parts = left - 8 * len(parts), ()
    if left < 0:
        raise MemoryError
    if isinstance(value, pa.StructScalar) and value.is_valid:
        parts = (value[i] for i in range(len(value)))
    return functools.reduce(_subtract, parts or (), left)


FORMAT = documents.Format(functools.partial(documents.cut_evenly, count_pieces), read_table)
