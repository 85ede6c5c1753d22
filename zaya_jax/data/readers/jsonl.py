"""Read JSON: files with an object per line, plain or compressed, and `.json` files that are one list of objects.

Lines are read one at a time; one of over `LONGEST` bytes is a bad document. Only a newline byte ends a line. Blank
lines are skipped silently, as other tools do. NaN and Infinity are accepted, as in Python's `json`.
"""

import bz2
import io
import json
import lzma
import math
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO, Any

import zstandard

from zaya_jax.data.readers import documents, fields
from zaya_jax.errors import InputError
from zaya_jax.run.files import read_start

_READ_BYTES = 2**20  # bytes
_FRAME_READ_BYTES = 2**12  # bytes; in zstd, 4 of them can stand for 128 KiB
_ZSTD_WINDOW = 2**31  # bytes; the largest, of `zstd --long=31`, as in Pushshift's files
_EMPTY_BYTES = 512  # no compressed file of nothing is larger
_COUNTED_BYTES = 64 * 2**20  # maximum bytes before a unit that are read to count its line numbers
# By suffix, what makes a decompressor of one frame, with `decompress`, `eof` and `unused_data`.
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": partial(zlib.decompressobj, zlib.MAX_WBITS + 16),
    ".zst": zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj,
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
}
COMPRESSED = tuple(_DECOMPRESSORS)
_DAMAGE = EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError  # what decompressors raise, besides `OSError`


def cut_jsonl(files: Sequence[documents.InputFile], unit_bytes: int) -> Iterator[documents.Unit]:
    """Cut at multiples of `unit_bytes`; a list or a compressed file is one unit, and one of nothing is none."""
    for file in filter(_has_lines, files):
        if file.path.endswith(COMPRESSED) or is_list(file.path):
            yield from documents.cut_evenly(lambda path: 1, [file], unit_bytes)
            continue
        for start in range(0, file.bytes, unit_bytes):
            stop = min(start + unit_bytes, file.bytes)
            yield documents.Unit("jsonl", (file.path,), start, stop, stop - start)


def is_list(file: str) -> bool:
    """Return whether a file is one list, as Alpaca's is; it is in memory while it is read."""
    with documents.reading(f"The file {file}"):
        start = read_start(file, 1000) if file.endswith(".json") else b""
    return start.removeprefix(BOM_UTF8).lstrip().startswith(b"[")


def _has_lines(file: documents.InputFile) -> bool:
    """Return whether a file may have a line that is not blank, by its first MiB if it could be one of nothing."""
    if file.bytes > _EMPTY_BYTES:
        return True
    compressed = file.path.endswith(COMPRESSED)
    with _open(file.path, buffering=0) as raw, documents.reading(f"The file {file.path}", *_DAMAGE):
        start = (_decompress(file.path, raw) if compressed else raw).read(_READ_BYTES)
    return len(start) == _READ_BYTES or bool(start.removeprefix(BOM_UTF8).strip())


def read_jsonl(unit: documents.Unit, field: str) -> Iterator[documents.Entry]:
    """Yield the field of each line that starts in the unit; `InputError` if the file cannot be read, or is damaged.

    Line numbers in messages count from the start of the file or, in units beyond `_COUNTED_BYTES`, from that of the
    unit, and `[from byte N]` is appended to the file name.
    """
    [file] = unit.files
    if is_list(file):
        yield from _items(file, field, unit.bytes)
        return
    if file.endswith(COMPRESSED):
        with _open(file, buffering=0) as raw, closing(_decompress(file, raw)) as stream:
            yield from _documents(file, field, _lines(file, stream, raw, math.inf), documents.FirstLine())
        return
    start, first = _first_start(unit), documents.FirstLine()
    lines = plain_lines(file, start, unit.stop)
    if start > _COUNTED_BYTES:
        file += f"[from byte {start}]"
    elif start:
        first = documents.FirstLine(partial(_line_number, file, start))
    yield from _documents(file, field, lines, first)


def _items(file: str, field: str, size: int) -> Iterator[documents.Entry]:
    if size > fields.LONGEST:
        advice = f"Convert it, for example with: jq -c '.[]' {file} > {Path(file).with_suffix('.jsonl')}"
        raise InputError(f"The file {file} is one JSON list of more than {fields.LONGEST:,} bytes. {advice}")
    try:
        with _open(file) as stream:
            records = json.loads(stream.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"The file {file} is not valid JSON: {error}.") from error
    first = documents.FirstLine()
    for index, record in enumerate(records):
        share = documents.even_share(size, len(records), index, index + 1)
        yield read_object(record, field).entry(file, share, index, first)


def _documents(
    file: str, field: str, lines: Iterator[tuple[bytes, int]], first: documents.FirstLine
) -> Iterator[documents.Entry]:
    for index, (line, size) in enumerate(lines):
        if len(line) <= fields.LONGEST and (not line or line.isspace()):
            continue
        yield _parse(line, field).entry(file, size, index, first)


def _parse(line: bytes, field: str) -> documents.Parsed:
    if len(line) > fields.LONGEST:
        return documents.Parsed(bad=("too large", f"the line has more than {fields.LONGEST:,} bytes"))
    try:
        tree = json.loads(line.decode("utf-8"))
        if rb"\u" in line and isinstance(tree, dict):  # only an escape can write an unpaired surrogate
            json.dumps(tree.get(fields.find_field(field, tree) or field), ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        return documents.Parsed(bad=("not UTF-8", f"the byte at offset {error.start} of the line cannot be decoded"))
    except UnicodeEncodeError:
        return documents.Parsed(bad=("not UTF-8", f"{field!r} has an escaped unpaired surrogate"))
    except RecursionError:
        return documents.Parsed(bad=("invalid JSON", "it is nested too deeply"))
    except ValueError as error:  # bad syntax, or an integer with thousands of digits
        return documents.Parsed(bad=("invalid JSON", str(error)))
    return read_object(tree, field)


def read_object(tree: Any, field: str) -> documents.Parsed:
    """Read the field of a JSON object, see `fields.find_field`."""
    if not isinstance(tree, dict):
        return documents.Parsed(bad=("wrong type", f"the record is {fields.json_kind(tree)}, but must be an object"))
    name = fields.find_field(field, tree)
    if name is None:
        keys, hint = ", ".join(map(repr, tree)), fields.suggest_chat(field, tree)
        return documents.Parsed(bad=("no field", f"the object has no key {field!r}; its keys are {keys:.200}{hint}"))
    return fields.read_record(tree, name, is_pair=fields.is_pair(field, name))


def _first_start(unit: documents.Unit) -> int:
    """Return the position of the first line that starts in the unit, or the end of the unit if none does."""
    [file] = unit.files
    with documents.reading(f"The file {file}"), open(file, "rb") as stream:
        documents.require_pieces(unit, file, stream.seek(0, io.SEEK_END), "byte")
        if unit.start == 0:
            return 0
        position = stream.seek(unit.start - 1)  # if it is a newline, a line starts at the unit's start
        while tail := stream.readline(min(_READ_BYTES, unit.stop - 1 - position)):
            position += len(tail)
            if tail.endswith(b"\n"):
                return position
        return unit.stop


def plain_lines(file: str, start: int, stop: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines that start in a range of bytes, each with its size in bytes."""
    with _open(file) as stream:
        stream.seek(start)
        yield from _lines(file, stream, stream, stop)


def _line_number(file: str, position: int) -> int:
    return 1 + sum(1 for _ in plain_lines(file, 0, position))


def _lines(file: str, stream: IO[bytes], raw: IO[bytes], stop: float) -> Iterator[tuple[bytes, int]]:
    """Yield the lines that start before a position, each with the bytes of `raw` that were read for it."""
    position = raw.tell()
    while position < stop and (line := _read_line(stream, file)):
        before, position = position, raw.tell()
        yield line if before else line.removeprefix(BOM_UTF8), position - before


def _decompress(file: str, raw: IO[bytes]) -> IO[bytes]:
    stream: Any = _Frames(raw, _DECOMPRESSORS[Path(file).suffix])
    return io.BufferedReader(stream, _READ_BYTES)


class _Frames(io.RawIOBase):
    """Decompresses all frames of a file (members, streams); one that ends too early is an `EOFError`.

    Python's own readers of bz2 and xz would take damage after a first frame for the end of the file.
    """

    def __init__(self, raw: IO[bytes], begin: Callable[[], Any]) -> None:
        self._raw, self._begin = raw, begin
        self._frame: Any = None
        self._input, self._output = b"", memoryview(b"")  # whose slices are no copies

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._output:
            rest = self._frame is not None and not self._frame.eof and not getattr(self._frame, "needs_input", True)
            data = b"" if rest else self._input or self._raw.read(_FRAME_READ_BYTES)
            if not data and not rest:
                break
            if self._frame is None or self._frame.eof:
                data = data.lstrip(b"\0") if self._frame else data  # padding between frames
                self._frame = self._begin() if data else self._frame
            self._input = b""
            if data or rest:
                most = [_READ_BYTES] if hasattr(self._frame, "needs_input") else []  # of bz2, 4 KiB can be 5 GB
                self._output = memoryview(self._frame.decompress(data, *most))
                self._input = self._frame.unused_data if self._frame.eof else b""
        if not self._output and self._frame is not None and not self._frame.eof:
            raise EOFError("it ends too early")
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


def _open(file: str, buffering: int = _READ_BYTES) -> IO[bytes]:
    with documents.reading(f"The file {file}"):
        return open(file, "rb", buffering=buffering)


def _read_line(stream: IO[bytes], file: str) -> bytes:
    """Read a line; of one that is longer than `LONGEST`, return the beginning, and pass over the rest."""
    with documents.reading(f"The file {file}", *(_DAMAGE if file.endswith(COMPRESSED) else ())):
        line = part = stream.readline(fields.LONGEST + 1)
        while len(line) > fields.LONGEST and part and not part.endswith(b"\n"):
            part = stream.readline(_READ_BYTES)
    return line


FORMAT = documents.Format(cut_jsonl, read_jsonl)
