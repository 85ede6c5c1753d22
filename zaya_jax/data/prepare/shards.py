"""Write documents to ArrayRecord files, one record per document, and read them by random access."""

import bisect
import functools
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from zaya_jax.data.prepare.manifest import Manifest, ShardEntry, Split, describe_file
from zaya_jax.errors import InputError, RunStopped, as_sentence
from zaya_jax.run.plain_path import plain_path
from zaya_jax.run.writing import new_file

_WRITER_OPTIONS = "group_size:1,zstd:3"  # one record per chunk, so that a random read decodes only that record
_MAX_OPEN = 16384  # shards
_CACHED_DOCUMENTS = 128  # successive windows of a lane (`packed_rows.LANES`) often read the same document


class Text(NamedTuple):
    """A document as token ids."""

    tokens: np.ndarray  # unsigned integers [n], read-only
    loss_mask: np.ndarray | None  # bool [n]: whether the loss covers the token; None if it covers all


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest little-endian unsigned integer dtype that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1).newbyteorder("<")


def pack_text(tokens: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """Serialize a document of kind 'masked' as a record."""
    return tokens.tobytes() + np.packbits(loss_mask).tobytes()


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Writes one shard atomically; a context manager."""

    def __init__(self, path: Path) -> None:
        self._path, self._new = path, new_file(path)
        self._file: IO[bytes] | None = None
        self._writer: ArrayRecordWriter | None = None
        self.documents = 0

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(RuntimeError):  # the file is deleted anyway
                if self._writer is not None:
                    self._writer.close()
        finally:
            if self._file is not None:  # unfinished, so `new_file` removes it
                self._new.__exit__(RuntimeError, RuntimeError(), None)

    def write(self, record: bytes) -> None:
        """Append a record; `RunStopped` if it cannot be written."""
        with self._writing():
            self._file = self._file or self._new.__enter__()
            # By its descriptor, since another user may have replaced a file with this name.
            path = f"/proc/self/fd/{self._file.fileno()}"
            writer = self._writer = self._writer or ArrayRecordWriter(path, _WRITER_OPTIONS)
            writer.write(record)
        self.documents += 1

    def finish(self) -> ShardEntry | None:
        """Finish the file and move it to its final name; `RunStopped` if that fails. Without records, write no file."""
        if self._writer is None or self._file is None:
            return None
        with self._writing():
            self._writer.close()
            self._writer = None
            entry = describe_file(Path(f"/proc/self/fd/{self._file.fileno()}"))
            self._file = None
            self._new.__exit__(None, None, None)
            return ShardEntry(self._path.name, entry.bytes, entry.digest, documents=self.documents)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # the latter raised by the library's C++ code
            reason = " ".join(str(error).split())[:300]
            advice = "Is the disk full? Rerun the command to resume."
            raise RunStopped(f"The shard {self._path} cannot be written: {reason}. {advice}") from error


class Records:
    """Random access to the records of shards. Picklable and thread-safe."""

    def __init__(self, folder: Path, shards: tuple[ShardEntry, ...]) -> None:
        self._folder, self._shards = folder, shards
        self._ends = np.cumsum([shard.documents for shard in shards]).tolist()
        # Keep shards open, but leave file descriptors for the rest of the process.
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        kept = _MAX_OPEN if allowed == resource.RLIM_INFINITY else min(_MAX_OPEN, max(16, allowed // 4))
        self._open = functools.lru_cache(maxsize=kept)(self._source)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        """Return one record; `InputError` if its file cannot be read, or is damaged, which its digest tells."""
        if not 0 <= index < len(self):
            raise IndexError(f"Document {index} is not among the {len(self)} documents.")
        shard = bisect.bisect_right(self._ends, index)
        path = self._folder / self._shards[shard].file
        try:
            return self._open(shard)[index - (self._ends[shard - 1] if shard else 0)]
        except Exception as error:  # the library's C++ code raises several kinds
            try:
                if describe_file(path).digest == self._shards[shard].digest:
                    raise InputError(f"The intact data file {path} cannot be read: {as_sentence(error)}") from error
            except OSError as unreadable:
                raise InputError(f"The data file {path} cannot be read: {unreadable.strerror}.") from error
            raise self.damaged(index) from error

    def _source(self, shard: int) -> ArrayRecordDataSource:
        entry, folder = self._shards[shard], plain_path(self._folder)
        sizes = {"skip": 0, "take": entry.documents, "examples_in_shard": entry.documents}
        lazily: Any = SimpleNamespace(filename=str(folder / entry.file), **sizes)  # the library sets these names
        return ArrayRecordDataSource([lazily])

    def damaged(self, index: int) -> InputError:
        """Return the error for a damaged record."""
        shard = self._folder / self._shards[bisect.bisect_right(self._ends, index)].file
        problem, advice = "is damaged: it cannot be decoded", "Prepare the data again, or restore the file."
        return InputError(f"Document {index} in the data file {shard} {problem}. {advice}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without open files."""
        return Records, (self._folder, self._shards)


class Documents:
    """Random access to the documents of one split. Picklable and thread-safe."""

    def __init__(self, records: Records, lengths: np.ndarray, dtype: np.dtype, masked: bool) -> None:
        self.lengths = lengths  # int64 [documents], tokens per document
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
    """Open the documents of one split of a prepared folder of kind 'tokens' or 'masked'."""
    entry = manifest.split(split)
    lengths = np.load(folder / entry.lengths.file, allow_pickle=False)
    return Documents(Records(folder, entry.shards), lengths, np.dtype(manifest.dtype), manifest.kind == "masked")
