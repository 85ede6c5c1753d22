r"""Read Megatron-LM's indexed datasets: token ids in a `.bin` file, and their documents in an `.idx` file next to it.

The `.idx` file has the layout of `megatron/core/datasets/indexed_dataset.py`, in little-endian byte order:

    9 bytes  b"MMIDIDX\x00\x00"
    uint64   version, 1
    uint8    code of the tokens' dtype
    uint64   number of sequences
    uint64   number of document indices, one more than there are documents
    int32    length of each sequence, in tokens
    int64    start of each sequence in the `.bin`, in bytes
    int64    document indices: document i is sequences indices[i] to indices[i + 1]
"""

import itertools
import os
import struct
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zaya_jax.data.readers.documents import BadDocument, Document, FirstLine, Format, Unit, cut_evenly, require_pieces
from zaya_jax.data.readers.fields import LONGEST
from zaya_jax.errors import InputError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class Index(NamedTuple):
    """An `.idx` file, mapped, and checked against the sizes of both files."""

    file: str  # path of the `.idx`
    dtype: np.dtype  # integer dtype of a token
    lengths: np.ndarray  # int32 [sequences], in tokens
    pointers: np.ndarray  # int64 [sequences], start of each in the `.bin`, in bytes
    bounds: np.ndarray  # int64 [documents + 1], the document indices
    bin_bytes: int  # size of the `.bin`


def index_path(file: str) -> str:
    """Return the path of the `.idx` file of a `.bin` file."""
    return file.removesuffix(".bin") + ".idx"


def open_index(file: str) -> Index:
    """Read and check the header of the index of a `.bin` file.

    `InputError` if a file cannot be read, the `.idx` does not match its header, or the tokens are not integers.
    """
    path = index_path(file)
    try:
        bin_bytes, size = os.stat(file).st_size, os.stat(path).st_size
        with open(path, "rb") as stream:
            header = stream.read(HEADER.size)
    except OSError as error:
        raise InputError(f"The Megatron file {error.filename or path} cannot be read: {error.strerror}.") from error
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise InputError(f"The file {path} is not a Megatron index: it does not start with an MMIDIDX header.")
    _, version, code, sequences, indices = HEADER.unpack(header)
    if version != 1:
        raise InputError(f"The Megatron index {path} has version {version}, but only version 1 is supported.")
    integers = {code: np.dtype(name) for code, name in _DTYPES.items() if "f" not in name}
    if code not in integers:
        allowed = ", ".join(f"{code} ({dtype.name})" for code, dtype in integers.items())
        raise InputError(f"The Megatron index {path} has the dtype code {code} for its tokens; allowed are {allowed}.")
    expected = HEADER.size + 12 * sequences + 8 * indices
    if size != expected or not indices:
        raise InputError(
            f"The Megatron index {path} has {size} bytes, but its header lists {sequences} sequences and "
            f"{indices} document indices, which take {expected}; the index is damaged."
        )
    mapped = np.memmap(path, np.uint8, "r", HEADER.size)
    lengths, pointers, bounds = np.split(mapped, [4 * sequences, 12 * sequences])
    index = Index(path, integers[code], lengths.view("<i4"), pointers.view("<i8"), bounds.view("<i8"), bin_bytes)
    ends = [int(index.bounds[0]), int(index.bounds[-1])]
    if ends != [0, sequences]:
        actual = f"are sequences {ends[0]} to {ends[1]}, but must be 0 to {sequences} (all of them)"
        raise InputError(f"The documents of the Megatron index {path} {actual}.")
    return index


def read_megatron(unit: Unit, field: str = "") -> Iterator[Document | BadDocument]:
    """Yield the token ids of each document, with its sequences concatenated, as a new array of the file's dtype.

    Ids are returned as stored: with the end-of-document token if it was written, and unchecked against a vocabulary.
    `InputError` as in `open_index`, or if the index points outside the `.bin`, or lost documents.
    """
    del field
    [file] = unit.files
    index = open_index(file)
    require_pieces(unit, index.file, len(index.bounds) - 1, "document")
    bounds, sequences = np.array(index.bounds[unit.start : unit.stop + 1]), len(index.lengths)
    if np.any(bounds < 0) or np.any(bounds > sequences) or np.any(np.diff(bounds) < 0):
        problem = f"its document indices must rise from 0 to {sequences}"
        raise InputError(f"The Megatron index {index.file} is damaged: {problem}.")
    begin, end = int(bounds[0]), int(bounds[-1])
    lengths, pointers = np.array(index.lengths[begin:end]), np.array(index.pointers[begin:end])
    room = (index.bin_bytes - pointers) // index.dtype.itemsize  # tokens behind each pointer
    outside = (lengths < 0) | (pointers < 0) | (room < lengths)
    if outside.any():
        i = int(outside.argmax())
        raise InputError(
            f"The Megatron index {index.file} puts sequence {begin + i} at byte {pointers[i]} with "
            f"{lengths[i]} tokens, but its .bin has {index.bin_bytes} bytes; one of the two is damaged."
        )
    tokens = np.asarray(np.memmap(file, np.uint8, mode="r")) if index.bin_bytes else np.empty(0, np.uint8)
    first = FirstLine(unit.start + 1)
    sizes = lengths.astype(np.int64) * index.dtype.itemsize
    for number, (low, high) in enumerate(itertools.pairwise((bounds - begin).tolist())):
        size, line = int(sizes[low:high].sum()), first.number + number
        if not size:
            yield BadDocument(file, line, "empty", f"document {line} has no tokens")
        elif size > LONGEST:  # the index can list the same sequence many times
            problem = f"document {line} has {size:,} bytes, but at most {LONGEST:,} are one document"
            yield BadDocument(file, line, "too large", problem)
        else:
            places = zip(pointers[low:high].tolist(), sizes[low:high].tolist(), strict=True)
            ids = np.concatenate([tokens[place : place + length] for place, length in places]).view(index.dtype)
            yield Document(ids, file, size, number, first)


_cut = partial(cut_evenly, lambda path: len(open_index(path).bounds) - 1)
FORMAT = Format(_cut, read_megatron, lambda path: (index_path(path),))
