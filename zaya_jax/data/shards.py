"""Documents in ArrayRecord files, one record a document, read by random access."""

import bisect
import functools
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from zaya_jax.data.corpus import Split
from zaya_jax.data.manifest import Manifest, ShardEntry, describe_file
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.run.files import partial_name

_WRITER_OPTIONS = "group_size:1,zstd:3"  # one record a chunk: a random read decodes nothing but that record
_MAX_OPEN = 16384  # shards
_CACHED_DOCUMENTS = 128  # kept in memory: each lane of windows (`rows.LANES`) often goes on in the same document


class Text(NamedTuple):
    """A document as token ids."""

    tokens: np.ndarray  # unsigned [n], read-only
    loss_mask: np.ndarray | None  # bool [n], true where the loss counts a token; None where it counts all


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned integer that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1).newbyteorder("<")


def pack_text(tokens: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """The record of a 'masked' document."""
    return tokens.tobytes() + np.packbits(loss_mask).tobytes()


class ShardWriter:
    """One shard, which appears under its name whole or not at all; a context manager."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, partial_name(path)
        self._writer: ArrayRecordWriter | None = None
        self.documents = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except RuntimeError:  # it is not wanted any more
            pass
        finally:
            self._part.unlink(missing_ok=True)

    def write(self, record: bytes) -> None:
        """Add a record.

        Raises:
          RunStopped: it cannot be written.
        """
        try:
            writer = self._writer or ArrayRecordWriter(str(self._part), _WRITER_OPTIONS)
            self._writer = writer
            writer.write(record)
        except RuntimeError as error:  # of the library's C++
            raise self._failed(error) from error
        self.documents += 1

    def finish(self) -> ShardEntry | None:
        """Write the shard to disk under its name; None, and no file, where it has no record.

        Raises:
          RunStopped: it cannot be written.
        """
        if self._writer is None:
            return None
        try:
            self._writer.close()
            self._writer = None
            with self._part.open("rb") as file:
                os.fsync(file.fileno())
            entry = describe_file(self._part)
            self._part.replace(self._path)
        except (OSError, RuntimeError) as error:
            raise self._failed(error) from error
        return ShardEntry(self._path.name, entry.bytes, entry.digest, documents=self.documents)

    def _failed(self, error: Exception) -> RunStopped:
        why = " ".join(str(error).split())[:300]
        return RunStopped(f"The shard {self._path} cannot be written: {why}. Is the disk full? Rerun the command to "
                          "resume.")  # fmt: skip


@dataclass
class _ShardSpec:
    """A shard as the data source wants it described so as to open it when it is read; the field names are its own."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


class Records:
    """The records of shards, by index. Safe to read from several threads; picklable."""

    def __init__(self, folder: Path, shards: tuple[ShardEntry, ...]) -> None:
        self._folder, self._shards = folder, shards
        self._ends = np.cumsum([shard.documents for shard in shards]).tolist()
        # Open shards are kept, but leave room for what else the process opens.
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        kept = _MAX_OPEN if allowed == resource.RLIM_INFINITY else min(_MAX_OPEN, max(16, allowed // 4))
        self._open = functools.lru_cache(maxsize=kept)(self._source)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        """One record.

        Raises:
          IndexError: `index` is not in [0, len).
          InputError: its bytes were altered since the shard was written.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"Document {index} is not among the {len(self)} documents.")
        shard = bisect.bisect_right(self._ends, index)
        path = self._folder / self._shards[shard].file
        try:
            return self._open(shard)[index - (self._ends[shard - 1] if shard else 0)]
        except Exception as error:  # whatever the reader's C++ raises
            try:
                path.open("rb").close()
            except OSError as unreadable:
                raise InputError(f"The data file {path} cannot be opened: {unreadable.strerror}.") from error
            raise self.damaged(index) from error

    def _source(self, shard: int) -> ArrayRecordDataSource:
        entry = self._shards[shard]
        return ArrayRecordDataSource([_ShardSpec(str(self._folder / entry.file), 0, entry.documents, entry.documents)])

    def damaged(self, index: int) -> InputError:
        """The error for a record whose bytes were altered."""
        shard = self._folder / self._shards[bisect.bisect_right(self._ends, index)].file
        return InputError(f"Document {index} in the data file {shard} is damaged: it cannot be decoded. "
                          "Prepare the data again, or restore the file.")  # fmt: skip

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without open files."""
        return Records, (self._folder, self._shards)


class Documents:
    """The documents of one split, by index, see `Records`. Safe to read from several threads; picklable."""

    def __init__(self, records: Records, lengths: np.ndarray, dtype: np.dtype, masked: bool) -> None:
        """Wrap the records; see `open_documents`."""
        self.lengths = lengths  # int64 [documents], tokens of each
        self._records, self._dtype, self._masked = records, dtype, masked
        self._read = functools.lru_cache(maxsize=_CACHED_DOCUMENTS)(self._decode)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Text:
        return self._read(index)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without decoded documents."""
        return Documents, (self._records, self.lengths, self._dtype, self._masked)

    def _decode(self, index: int) -> Text:
        record, length = self._records[index], int(self.lengths[index])
        size = length * self._dtype.itemsize
        if len(record) != size + (-(-length // 8) if self._masked else 0):
            raise self._records.damaged(index)
        tokens = np.frombuffer(record, self._dtype, length)
        if not self._masked:
            return Text(tokens, None)
        bits = np.frombuffer(record, np.uint8, offset=size)
        return Text(tokens, np.unpackbits(bits, count=length).astype(bool))


def open_documents(folder: Path, manifest: Manifest, split: Split) -> Documents:
    """The documents of one split of a prepared folder, of the kind 'tokens' or 'masked'."""
    entry = manifest.split(split)
    lengths = np.load(folder / entry.lengths.file, allow_pickle=False)
    return Documents(Records(folder, entry.shards), lengths, np.dtype(manifest.dtype), manifest.kind == "masked")
