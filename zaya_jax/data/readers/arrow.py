"""Arrow's IPC formats, memory-mapped: the stream, which `datasets` writes, and the file, which can be split.

A stream has no index of its batches, so it is one unit; `datasets` cuts shards of 500 MB.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pyarrow as pa

from zaya_jax.data.readers.columns import check_columns, column_documents
from zaya_jax.data.readers.unit import Entry, FirstLine, Unit, even_share
from zaya_jax.errors import InputError

_FILE_MAGIC = b"ARROW1"  # a stream begins with the length of its schema


def count_pieces(file: str) -> int:
    """How many pieces the file can be cut into: its record batches, or 1 for a stream.

    Raises:
      InputError: the file cannot be read or is damaged.
    """
    with closing(_map(file)) as source:
        reader = _reader(file, source)
        return reader.num_record_batches if isinstance(reader, pa.RecordBatchFileReader) else 1


def count_rows(file: str) -> int:
    """How many rows the file has; reads no column.

    Raises:
      InputError: the file cannot be read, is damaged or incomplete.
    """
    with closing(_map(file)) as source:
        reader = _reader(file, source)
        if isinstance(reader, pa.RecordBatchFileReader):
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = _batches(file, reader, source)
        try:
            return sum(batch.num_rows for batch in batches)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, error) from error


def read_arrow(unit: Unit, field: str) -> Iterator[Entry]:
    """The rows of the unit's record batches; a null is `BadDocument`.

    Args:
      unit: a range of record batches, or a stream.
      field: the column.

    Raises:
      InputError: the file cannot be read, is damaged, has fewer batches than it had, or has no such column.
    """
    [file] = unit.files
    with closing(_map(file)) as source:
        columns = check_columns(file, _reader(file, source).schema, field)
        reader = _reader(file, source, columns)
        first, before = FirstLine(), 0
        if isinstance(reader, pa.RecordBatchFileReader):
            if reader.num_record_batches < unit.stop:
                raise InputError(
                    f"The file {file} has {reader.num_record_batches} record batches, fewer than the {unit.stop} "
                    "it had; do not change it meanwhile."
                )
            first = FirstLine(partial(_row_number, file, unit.start)) if unit.start else first
            batches = _file_batches(reader, unit)
        else:
            batches = _stream_batches(reader, source, unit)
        for batch, size in _checked(file, batches):
            yield from column_documents(batch, file=file, columns=columns, size=size, before=before, first=first)
            before += len(batch)


def _map(file: str) -> pa.MemoryMappedFile:
    try:
        return pa.memory_map(file)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def _reader(
    file: str, source: pa.MemoryMappedFile, columns: list[str] | None = None
) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """A reader of some columns, each there once, or of all."""
    indices = [] if columns is None else [_reader(file, source).schema.get_field_index(name) for name in columns]
    options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
    try:
        source.seek(0)
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def _file_batches(reader: pa.RecordBatchFileReader, unit: Unit) -> Iterator[tuple[pa.RecordBatch, int]]:
    count = unit.stop - unit.start
    for i in range(count):
        yield reader.get_batch(unit.start + i), even_share(unit.bytes, count, i, i + 1)


def _stream_batches(
    reader: pa.RecordBatchStreamReader, source: pa.MemoryMappedFile, unit: Unit
) -> Iterator[tuple[pa.RecordBatch, int]]:
    before = 0
    for batch in _batches(unit.files[0], reader, source):
        position = min(source.tell(), unit.bytes)
        yield batch, position - before
        before = position


def _batches(file: str, reader: pa.RecordBatchStreamReader, source: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """The record batches of a stream, which must end with its marker: without it some may be missing."""
    end = source.tell()
    for batch in reader:
        end = source.tell()
        yield batch
    if source.tell() == end:  # the reader takes the end of the file for that of the stream
        raise InputError(f"The Arrow file {file} ends without its end-of-stream marker, so a part of it is missing. "
                         "Copy or write it again.")  # fmt: skip


def _checked(file: str, batches: Iterator[tuple[pa.RecordBatch, int]]) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The batches, each with offsets that lie inside it: what is memory-mapped nobody has looked at."""
    try:
        for batch, size in batches:
            try:
                batch.validate(full=True)
            except pa.ArrowInvalid as error:
                if "UTF8" not in str(error):  # that is told row by row
                    raise
            yield batch, size
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def _row_number(file: str, batch: int) -> int:
    """The number of a record batch's first row, counted from 1."""
    with closing(_map(file)) as source:
        reader = _reader(file, source)
        try:
            return 1 + sum(reader.get_batch(i).num_rows for i in range(batch))
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, error) from error


def _unreadable(file: str, error: Exception) -> InputError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip().rstrip(".")
    return InputError(f"The Arrow file {file} cannot be read: {why}.")
