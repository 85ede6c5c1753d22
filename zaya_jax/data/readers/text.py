"""Read text files, each of which is one document, unchanged: with byte order marks and carriage returns."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from zaya_jax.data.readers.documents import BadDocument, Document, Entry, FirstLine, Format, InputFile, Unit, reading
from zaya_jax.data.readers.fields import LONGEST


def cut_texts(files: Sequence[InputFile], unit_bytes: int) -> Iterator[Unit]:
    """Group whole files into units of at most `unit_bytes`; each larger file forms a separate unit."""
    paths: list[str] = []
    size = 0
    for file in files:
        if paths and size + file.bytes > unit_bytes:
            yield Unit("text", tuple(paths), 0, len(paths), size)
            paths, size = [], 0
        paths.append(file.path)
        size += file.bytes
    yield Unit("text", tuple(paths), 0, len(paths), size)


def read_text(unit: Unit, field: str = "") -> Iterator[Entry]:
    """Yield the text of each file of the unit; `InputError` if one cannot be read. `field` is not used."""
    del field
    for file in unit.files[unit.start : unit.stop]:
        with reading(f"The file {file}"):
            size = Path(file).stat().st_size
            data = Path(file).read_bytes() if size <= LONGEST else b""
        if size > LONGEST:
            split = shlex.join([Path(file).suffix, file, f"{file}-"])
            problem = f"it has {size:,} bytes, but one text has at most {LONGEST:,}; split it, and remove it, as with: "
            yield BadDocument(file, 1, "too large", f"{problem}split -C 50m --additional-suffix={split}")
            continue
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            yield BadDocument(file, 1, "not UTF-8", f"the byte at offset {error.start} cannot be decoded")
            continue
        if not text or text.isspace():
            yield BadDocument(file, 1, "empty", f"the file has {len(data)} bytes, all of them white space")
        else:
            yield Document(text, file, len(data), 0, FirstLine())


FORMAT = Format(cut_texts, read_text)
