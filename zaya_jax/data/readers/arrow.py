"""Arrow's IPC formats, memory-mapped: the stream, which `datasets` writes, and the file, which can be split.

A stream has no index of its batches, so it is one unit; `datasets` cuts shards of 500 MB.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from functools import partial

import pyarrow as pa

from zaya_jax.data.readers.columns import check_columns, column_documents
from zaya_jax.data.readers.unit import Entry, FirstLine, Format, Unit, cut_evenly, even_share, reading
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


def count_rows(file: str, stop: int | None = None) -> int:
    """How many rows the file has, or of a file of Arrow's its first `stop` record batches; reads no column.

    Raises:
      InputError: the file cannot be read, is damaged or incomplete.
    """
    with closing(_map(file)) as source, _reading(file):
        reader = _reader(file, source)
        if isinstance(reader, pa.RecordBatchFileReader):
            batches = map(reader.get_batch, range(reader.num_record_batches if stop is None else stop))
        else:
            batches = _batches(file, reader, source)
        return sum(batch.num_rows for batch in batches)


def read_arrow(unit: Unit, field: str) -> Iterator[Entry]:
    """The rows of the unit's record batches; a null is `BadDocument`.

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
                    "it had; do not change inputs while they are prepared."
                )
            first = FirstLine(partial(_first_row, file, unit.start)) if unit.start else first
            batches = _file_batches(reader, unit)
        else:
            batches = _stream_batches(reader, source, unit)
        for batch, size in _checked(file, batches):
            yield from column_documents(batch, file=file, columns=columns, size=size, before=before, first=first)
            before += len(batch)


def _map(file: str) -> pa.MemoryMappedFile:
    with _reading(file):
        return pa.memory_map(file)


def _reader(
    file: str, source: pa.MemoryMappedFile, columns: list[str] | None = None
) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """A reader of some columns, each there once, or of all."""
    indices = [] if columns is None else [_reader(file, source).schema.get_field_index(name) for name in columns]
    options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
    with _reading(file):
        source.seek(0)
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)


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
        raise InputError(f"The Arrow file {file} ends without its end-of-stream marker, so it is truncated. Copy or "
                         "write it again.")  # fmt: skip


def _checked(file: str, batches: Iterator[tuple[pa.RecordBatch, int]]) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The batches, each with offsets that lie inside it: what is memory-mapped nobody has looked at."""
    with _reading(file):
        for batch, size in batches:
            try:
                batch.validate(full=True)
            except pa.ArrowInvalid as error:
                if "UTF8" not in str(error):  # that is told row by row
                    raise
            yield batch, size


def _first_row(file: str, batch: int) -> int:
    """The number of a record batch's first row, counted from 1."""
    return 1 + count_rows(file, batch)


def _reading(file: str) -> AbstractContextManager[None]:
    return reading(f"The Arrow file {file}", pa.ArrowException)


FORMAT = Format(partial(cut_evenly, count_pieces), read_arrow)
