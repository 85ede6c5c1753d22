"""Types that all input formats share: units of input, documents, and how a format is cut and read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.config.checks import counted
from zaya_jax.errors import InputError

# A text, chat messages (a list, or an object if they come with tools; validated later), or token ids of Megatron.
Value = str | list[Any] | dict[str, Any] | np.ndarray


class Unit(NamedTuple):
    """A piece of input that one worker turns into one shard. Can be pickled and written as JSON."""

    format: str  # a key of `FORMATS`
    files: tuple[str, ...]  # paths; several only for text, where each file is one document
    # In bytes for plain JSONL (a line belongs to the unit in which it starts), row groups for Parquet, record batches
    # for Arrow files, documents for Megatron, `files` for text; 0 and 1 for compressed JSONL and Arrow streams.
    start: int
    stop: int  # exclusive
    bytes: int  # size of the input, for progress; all units of a file add up to its size


class FirstLine:
    """The line number of a unit's first line in its file, counted on first use, as only messages need it."""

    def __init__(self, number: int | Callable[[], int] = 1):
        self._number = number

    @cached_property
    def number(self) -> int:
        """The line number, from 1."""
        return self._number if isinstance(self._number, int) else self._number()


class Document(NamedTuple):
    """A document of the input, neither empty nor only white space."""

    value: Value
    file: str  # path
    bytes: int  # size in the input, for progress
    lines_before: int  # number of lines of the unit before the document
    first: FirstLine  # first line of the unit, shared by all its documents
    unread: Sequence[str] = ()  # keys next to a conversation that are not read

    @property
    def line(self) -> int:
        """The number, from 1, of the line (JSONL), row (tables) or document (Megatron) in its file; 1 for text."""
        return self.first.number + self.lines_before


class BadDocument(NamedTuple):
    """A line, row, file or record without a usable document."""

    file: str  # path
    line: int  # see `Document.line`
    reason: str  # a category to count, such as `not UTF-8`
    detail: str  # exact problem, as a clause
    bytes = 0
    unread = ()


Entry = Document | BadDocument  # what a reader yields


class Parsed(NamedTuple):
    """What a line, row or object holds."""

    value: Any = ""  # see `Value`
    bad: tuple[str, str] | None = None  # why it cannot be used, see `BadDocument`
    unread: Sequence[str] = ()  # see `Document`

    def entry(self, file: str, size: int, lines_before: int, first: FirstLine) -> Entry:
        """Return the document at a place of a file, see `Document`, or the bad one."""
        if self.bad is None:
            return Document(self.value, file, size, lines_before, first, self.unread)
        return BadDocument(file, first.number + lines_before, *self.bad)


class InputFile(NamedTuple):
    """An input file."""

    format: str  # a key of `FORMATS`
    path: str
    bytes: int


class Format(NamedTuple):
    """The functions that cut the files of a format into units and read a unit."""

    cut: Callable[[Sequence[InputFile], int], Iterator[Unit]]  # (consecutive files, approximate unit bytes) → units
    read: Callable[[Unit, str], Iterator[Entry]]  # (unit, JSON key or column) → documents
    companions: Callable[[str], tuple[str, ...]] = lambda path: ()  # path → paths that must exist next to it


def cut_evenly(count_pieces: Callable[[str], int], files: Sequence[InputFile], unit_bytes: int) -> Iterator[Unit]:
    """Cut each file into units with about equally many of its `count_pieces(path)` pieces, such as row groups."""
    for file in files:
        pieces = count_pieces(file.path)
        count = min(pieces, -(-file.bytes // unit_bytes))
        for i in range(count):
            start, stop = pieces * i // count, pieces * (i + 1) // count
            yield Unit(file.format, (file.path,), start, stop, even_share(file.bytes, count, i, i + 1))


def even_share(total: int, count: int, start: int, stop: int) -> int:
    """Return the integer share of the parts [start, stop) if `total` is divided into `count` parts without loss."""
    return total * stop // count - total * start // count


def require_pieces(unit: Unit, file: str, count: int, noun: str, ending: str = "s") -> None:
    """Raise `InputError` if a file has fewer pieces than the unit: `count` of what `noun` (plural: `ending`) names."""
    if count < unit.stop:
        change = f"fewer than the {unit.stop:,} it had; do not change inputs while they are prepared."
        raise InputError(f"The file {file} has {counted(count, noun, ending)}, {change}")


@contextmanager
def reading(subject: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn `OSError`, `MemoryError` and `errors` in the block into an `InputError` that `subject` cannot be read."""
    try:
        yield
    except (OSError, MemoryError, *errors) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip().rstrip(".")
        raise InputError(f"{subject} cannot be read: {reason}.") from error
