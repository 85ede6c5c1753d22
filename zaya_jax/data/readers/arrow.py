"""Read Arrow IPC files and streams, memory-mapped.

Files can be cut into several units. Streams, which `datasets` writes, have no index of their batches and are one unit
each; `datasets` writes shards of 500 MB.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from functools import partial

import pyarrow as pa

from zaya_jax.config.checks import counted
from zaya_jax.data.readers.columns import check_columns, column_documents
from zaya_jax.data.readers.unit import Entry, FirstLine, Format, Unit, cut_evenly, even_share, reading
from zaya_jax.errors import InputError

_FILE_MAGIC = b"ARROW1"  # a stream starts with the length of its schema instead


def count_pieces(file: str) -> int:
    """Return the number of pieces that a file can be cut into: its record batches, or 1 for a stream.

    Raises:
      InputError: the file cannot be read or is damaged.
    """
    with closing(_map(file)) as source:
        reader = _reader(file, source)
        return reader.num_record_batches if isinstance(reader, pa.RecordBatchFileReader) else 1


def count_rows(file: str, stop: int | None = None) -> int:
    """Count the rows of a file or stream without reading columns. `stop` limits a file to its first record batches.

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
    """Yield the rows of the unit's record batches; a null becomes a `BadDocument`.

    Raises:
      InputError: the file cannot be read, is damaged, lost record batches, or has no such column.
    """
    [file] = unit.files
    with closing(_map(file)) as source:
        columns = check_columns(file, _reader(file, source).schema, field)
        reader = _reader(file, source, columns)
        first, before = FirstLine(), 0
        if isinstance(reader, pa.RecordBatchFileReader):
            if reader.num_record_batches < unit.stop:
                raise InputError(
                    f"The file {file} has {counted(reader.num_record_batches, 'record batch', 'es')}, fewer than the "
                    f"{unit.stop} it had; do not change inputs while they are prepared."
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
        return pa.memory_map(file.encode(errors="surrogateescape"))  # as text, it would have to be UTF-8


def _reader(
    file: str, source: pa.MemoryMappedFile, columns: list[str] | None = None
) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """Open a reader of the given columns, whose names must be unique; None reads all."""
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
    """Yield the record batches of a stream. Without its end-of-stream marker it is truncated, which is an error."""
    end = source.tell()
    for batch in reader:
        end = source.tell()
        yield batch
    if source.tell() == end:  # no marker was read; pyarrow accepts the end of the file instead
        raise InputError(f"The Arrow file {file} ends without its end-of-stream marker, so it is truncated. Copy or "
                         "write it again.")  # fmt: skip


def _checked(file: str, batches: Iterator[tuple[pa.RecordBatch, int]]) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Validate each batch before use, because memory-mapped offsets are unchecked and could point outside it."""
    with _reading(file):
        for batch, size in batches:
            try:
                batch.validate(full=True)
            except pa.ArrowInvalid as error:
                if "UTF8" not in str(error):  # invalid UTF-8 is reported per row
                    raise
            yield batch, size


def _first_row(file: str, batch: int) -> int:
    """Return the row number, from 1, of a record batch's first row."""
    return 1 + count_rows(file, batch)


def _reading(file: str) -> AbstractContextManager[None]:
    return reading(f"The Arrow file {file}", pa.ArrowException)


FORMAT = Format(partial(cut_evenly, count_pieces), read_arrow)
