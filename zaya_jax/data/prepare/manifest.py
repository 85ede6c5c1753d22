"""The manifest of a prepared folder: its files, their sizes and digests, and counts. It is written last."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from zaya_jax.data.special_tokens import SpecialTokens
from zaya_jax.errors import InputError
from zaya_jax.run.files import locked, read_file, write_atomically

MANIFEST = "manifest.json"
FORMAT = 2  # of the folder; incremented on incompatible changes

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)
# Content of a record: 'tokens' has the tokens of a document; 'masked' also has a loss-mask bit per token; 'chat' has a
# conversation as JSON.
Kind = Literal["tokens", "masked", "chat"]
_DTYPES = ("|u1", "<u2", "<u4", "<u8")
_BATCH_FILES = 64  # files that are verified at a time


@dataclass(frozen=True)
class FileEntry:
    """A file of a prepared folder."""

    file: str  # name
    bytes: int
    digest: str  # blake2b of the content, 16 bytes in hexadecimal


@dataclass(frozen=True)
class ShardEntry(FileEntry):
    """An ArrayRecord file."""

    documents: int


@dataclass(frozen=True)
class SplitEntry:
    """A split, whose documents are those of its shards in order."""

    shards: tuple[ShardEntry, ...]
    lengths: FileEntry  # .npy, int64 [documents]: tokens of each document, begin and end tokens included
    documents: int
    tokens: int  # the sum of lengths
    text_bytes: int  # UTF-8 bytes of the texts
    lost_bytes: int = 0  # of these, that the tokens do not decode to


@dataclass(frozen=True)
class Manifest:
    """The manifest of a prepared folder."""

    format: int
    kind: Kind
    inputs: str  # digest of the inputs and settings
    content: str  # digest of the documents
    dtype: str  # numpy dtype of a token in a record
    tokenizer: FileEntry
    eot: str  # the token that ends a document
    train: SplitEntry
    heldout: SplitEntry
    counts: dict[str, int]  # reason → number of skipped or altered documents
    examples: tuple[str, ...]  # location and reason of some skipped documents
    extras: tuple[FileEntry, ...] = ()
    bos: str | None = None  # token that begins a document, and `bos_token` of templates; None if there is none
    eos: str | None = None  # `eos_token` of templates
    unread_files: dict[str, int] = field(default_factory=dict)  # kind → number of items that are not read
    unread_keys: dict[str, int] = field(default_factory=dict)  # key in or beside messages → its uses

    @property
    def special(self) -> SpecialTokens:
        """The special tokens as text."""
        return SpecialTokens(self.eot, self.bos, self.eos)

    def split(self, split: Split) -> SplitEntry:
        """Return the entry of a split."""
        return self.train if split == "train" else self.heldout

    def files(self) -> list[FileEntry]:
        """List every file of the folder except the manifest."""
        entries = [self.tokenizer, *self.extras]
        for split in map(self.split, SPLITS):
            entries += [*split.shards, split.lengths]
        return entries


def json_digest(*values: object) -> str:
    """Return a digest of values that JSON can represent."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=12).hexdigest()


def content_hash(content: bytes) -> int:
    """Hash a document to 64 bits; the hash decides whether it is held out, so copies share a split."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def describe_file(path: Path) -> FileEntry:
    """Return the entry of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return FileEntry(path.name, path.stat().st_size, digest)


def read_manifest(folder: Path, remedy: str) -> Manifest:
    """Read a prepared folder's manifest, and check its files' sizes; `InputError` ends with the sentence `remedy`."""
    path = folder / MANIFEST
    try:
        tree = json.loads(read_file(path))
        version = tree["format"]
        manifest = _parse(tree) if version == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        advice = f" {remedy}" if not isinstance(error, OSError) or isinstance(error, FileNotFoundError) else ""
        raise InputError(f"The manifest {path} cannot be read ({error}).{advice}") from error
    if manifest is None:  # another format can have other fields
        raise InputError(f"The manifest {path} has format {version}, but this version reads format {FORMAT}. {remedy}")
    for entry in manifest.files():
        if not isinstance(entry.file, str) or Path(entry.file).name != entry.file:
            raise InputError(f"The manifest {path} lists {entry.file!r}, not a file name. {remedy}")
        file = folder / entry.file
        if not file.is_file():
            raise InputError(f"The data file {file} is missing. {remedy}")
        size = file.stat().st_size
        if size != entry.bytes:
            raise InputError(f"The data file {file} has {size} bytes, but must have {entry.bytes}. {remedy}")
    return manifest


def _parse(tree: dict[str, Any]) -> Manifest:
    tree["tokenizer"] = FileEntry(**tree["tokenizer"])
    tree["extras"] = tuple(FileEntry(**entry) for entry in tree["extras"])
    tree["examples"] = tuple(map(str, tree["examples"]))
    for split in SPLITS:
        entry = tree[split]
        entry["shards"] = tuple(ShardEntry(**shard) for shard in entry["shards"])
        tree[split] = SplitEntry(**entry | {"lengths": FileEntry(**entry["lengths"])})
    # Older manifests have none of the latter two: `eot` served as both.
    manifest = Manifest(**{"bos": tree["eot"], "eos": tree["eot"]} | tree)
    for name, value, allowed in (("kind", manifest.kind, get_args(Kind)), ("dtype", manifest.dtype, _DTYPES)):
        if value not in allowed:
            raise ValueError(f"its {name} is {value!r}, but must be one of {', '.join(allowed)}")
    counts = [n for each in (manifest.counts, manifest.unread_files, manifest.unread_keys) for n in each.values()]
    if not all(isinstance(count, int) for count in counts) or not isinstance(manifest.content, str):
        raise ValueError("its counts or content have the wrong type")
    return manifest


def verify_files(folder: Path, manifest: Manifest, cache: Path, remedy: str) -> None:
    """Verify the digest of every file of a prepared folder; `InputError`, which ends with `remedy`, if one was altered.

    The folder `cache` records the size and modification time of verified files, and a file is read again only if these
    differ, since reading terabytes takes hours. Reading a damaged record detects a change that keeps both.
    """
    notes = cache / f"verified-{json_digest(str(folder.resolve()))}.json"
    verified = _verified(notes)
    if all(verified.get(entry.file) == _stamp(folder, entry) for entry in manifest.files()):
        return
    with locked(notes.with_suffix(".lock"), "The folder data.cache_dir"):  # only one process reads the files
        verified = _verified(notes)
        unverified = [entry for entry in manifest.files() if verified.get(entry.file) != _stamp(folder, entry)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # hashing and reading release the GIL
            for start in range(0, len(unverified), _BATCH_FILES):
                batch = unverified[start : start + _BATCH_FILES]
                actual = threads.map(lambda entry: describe_file(folder / entry.file).digest, batch)
                for entry, digest in zip(batch, actual, strict=True):
                    if digest != entry.digest:
                        path = folder / entry.file
                        raise InputError(f"The data file {path} was altered: its checksum does not match. {remedy}")
                    verified[entry.file] = _stamp(folder, entry)
                write_atomically(notes, json.dumps(verified))


def _stamp(folder: Path, entry: FileEntry) -> list[object]:
    stat = (folder / entry.file).stat()
    return [entry.digest, stat.st_size, stat.st_mtime_ns]


def _verified(path: Path) -> dict[str, list[object]]:
    try:
        notes = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}
