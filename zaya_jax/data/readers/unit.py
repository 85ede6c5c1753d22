"""Units of input, and the documents and bad documents that reading them gives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from zaya_jax.errors import InputError

Reason = Literal["invalid JSON", "not UTF-8", "empty", "no field", "wrong type", "lost field"]

# A text, a list as JSON has it (chat messages, not validated here), or the token ids of a Megatron document.
Value = str | list[Any] | np.ndarray


class Unit(NamedTuple):
    """A piece of input that one worker turns into one shard. It can be pickled and written as JSON.

    Its range counts what the format has: bytes (plain JSONL, in which a line belongs to the unit it starts in), row
    groups (Parquet), record batches (Arrow files), documents (Megatron), `files` (text). What cannot be split,
    compressed JSONL and Arrow streams, is 0 to 1.
    """

    format: str  # of `FORMATS`
    files: tuple[str, ...]  # paths; several for text alone, where each file is one document
    start: int
    stop: int  # the first that is not of the range
    bytes: int  # of input, for progress; those of all the units of a file add up to its size


class FirstLine:
    """The number of a unit's first line in its file, worked out when it is first asked for.

    Reading needs no line numbers, and to count the lines before a unit in the middle of a file is to read them all.
    """

    def __init__(self, number: int | Callable[[], int] = 1):
        """Take the number, or a picklable function that finds it."""
        self._number = number

    @cached_property
    def number(self) -> int:
        """Counted from 1."""
        return self._number if isinstance(self._number, int) else self._number()


class Document(NamedTuple):
    """A document that was read; its `value` is neither empty nor only white space."""

    value: Value
    file: str  # its path
    bytes: int  # of input that it stands for, for progress
    lines_before: int  # lines of the unit before it, from which `line` is found
    first: FirstLine  # of the unit, shared by all its documents

    @property
    def line(self) -> int:
        """Counted from 1: line of a JSONL file, row of a table, document of a Megatron file; 1 for text.

        The first call for a unit may read the file up to the unit.

        Raises:
          InputError: that cannot be done.
        """
        return self.first.number + self.lines_before


class BadDocument(NamedTuple):
    """A place that should hold a document and does not."""

    file: str  # its path
    line: int  # as `Document.line`
    reason: Reason
    detail: str  # what is wrong exactly, a clause


Entry = Document | BadDocument  # what a reader yields


class InputFile(NamedTuple):
    """A file of input that is there."""

    format: str  # of `FORMATS`
    path: str
    bytes: int


class Format(NamedTuple):
    """How the files of one format are cut into units, and how a unit is read."""

    cut: Callable[[Sequence[InputFile], int], Iterator[Unit]]  # files in a row, to units of about so many bytes
    read: Callable[[Unit, str], Iterator[Entry]]  # a unit; by the key or column that holds documents, if it has such
    companions: Callable[[str], tuple[str, ...]] = lambda path: ()  # files that must lie beside one


def cut_evenly(count_pieces: Callable[[str], int], files: Sequence[InputFile], unit_bytes: int) -> Iterator[Unit]:
    """Cut each file into units of about equal numbers of its `count_pieces(path)` pieces, as row groups are."""
    for file in files:
        pieces = count_pieces(file.path)
        count = min(pieces, -(-file.bytes // unit_bytes))
        for i in range(count):
            start, stop = pieces * i // count, pieces * (i + 1) // count
            yield Unit(file.format, (file.path,), start, stop, even_share(file.bytes, count, i, i + 1))


def even_share(total: int, count: int, start: int, stop: int) -> int:
    """The integers that `count` equal parts have of `total`, summed over the parts `start` to `stop`."""
    return total * stop // count - total * start // count


@contextmanager
def reading(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise `InputError` that `what` cannot be read where the block raises `OSError` or one of `errors`."""
    try:
        yield
    except (OSError, *errors) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip().rstrip(".")
        raise InputError(f"{what} cannot be read: {why}.") from error
