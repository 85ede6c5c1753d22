"""Documents as token arrays in ArrayRecord files, one record a document, read by random access."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from zaya_jax.data.corpus import Split
from zaya_jax.data.manifest import Manifest, ShardEntry, SplitEntry, describe_file
from zaya_jax.data.tokenizer import EOT

SHARD_BYTES = 64 * 2**20  # of records; large files, since parallel file systems dislike many small ones

_WRITER_OPTIONS = "group_size:1,zstd:3"  # one record a chunk: a random read decodes nothing but that record
_DECODED_DOCUMENTS = 64  # kept in memory: neighbouring windows lie in the same document


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned integer that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1).newbyteorder("<")


def write_split(
    folder: Path,
    split: Split,
    documents: Iterable[Sequence[int]],
    *,
    dtype: np.dtype,
    text_bytes: int,
    shard_bytes: int = SHARD_BYTES,
) -> SplitEntry:
    """Write each document as EOT, its tokens, EOT.

    Args:
      folder: an existing folder; gets the shards and the lengths of the split.
      split: what their names begin with.
      documents: token ids of each, without EOT.
      dtype: of a token, see `token_dtype`.
      text_bytes: UTF-8 bytes of the split's texts, for the entry.
      shard_bytes: bytes of records that fill a shard.

    Returns:
      The split's entry in the manifest.
    """
    shards, lengths = [], []
    records = (np.array([EOT, *document, EOT], dtype).tobytes() for document in documents)
    for first in records:  # of a shard; `_write_shard` takes the rest of it from the same iterator
        path = folder / f"{split}-{len(shards):05d}.arrayrecord"
        sizes = _write_shard(path, itertools.chain([first], records), shard_bytes)
        lengths += [size // dtype.itemsize for size in sizes]
        entry = describe_file(path)
        shards.append(ShardEntry(entry.file, entry.bytes, entry.digest, documents=len(sizes)))
    path = folder / f"{split}-lengths.npy"
    np.save(path, np.array(lengths, np.int64), allow_pickle=False)
    return SplitEntry(tuple(shards), describe_file(path), len(lengths), sum(lengths), text_bytes)


def _write_shard(path: Path, records: Iterable[bytes], shard_bytes: int) -> list[int]:
    """Write records until the shard is full; returns their sizes in bytes."""
    writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
    sizes, filled = [], 0
    for record in records:
        writer.write(record)
        sizes.append(len(record))
        filled += len(record)
        if filled >= shard_bytes:
            break
    writer.close()
    return sizes


class Documents:
    """The documents of one split, by index. Safe to read from several threads; picklable."""

    def __init__(self, paths: tuple[str, ...], lengths: np.ndarray, dtype: np.dtype) -> None:
        """Open the shards at `paths`; see `open_documents`."""
        self.lengths = lengths  # int64 [documents], tokens of each, both EOT included
        self._paths = paths
        self._dtype = dtype
        self._source = ArrayRecordDataSource(paths)
        self._read = functools.lru_cache(maxsize=_DECODED_DOCUMENTS)(self._decode)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of one document, both EOT included: unsigned [tokens], read-only.

        Raises:
          IndexError: `index` is not in [0, len).
        """
        if not 0 <= index < len(self):
            raise IndexError(f"Document {index} is not among the {len(self)} documents.")
        return self._read(int(index))

    def __reduce__(self) -> tuple[object, ...]:
        """Neither the open files nor the decoded documents travel to another process."""
        return Documents, (self._paths, self.lengths, self._dtype)

    def _decode(self, index: int) -> np.ndarray:
        return np.frombuffer(self._source[index], self._dtype)


def open_documents(folder: Path, manifest: Manifest, split: Split) -> Documents:
    """The documents of one split of a prepared folder whose files `open_manifest` has checked."""
    entry = manifest.split(split)
    lengths = np.load(folder / entry.lengths.file, allow_pickle=False)
    return Documents(tuple(str(folder / shard.file) for shard in entry.shards), lengths, np.dtype(manifest.dtype))
