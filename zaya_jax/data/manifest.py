"""What a folder of prepared data holds: the files, their sizes and digests, and the sizes of the splits."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zaya_jax.data.corpus import SPLITS, Split
from zaya_jax.errors import InputError

MANIFEST = "manifest.json"
FORMAT = 1  # of the folder; raised when an older reader or writer would not do


@dataclass(frozen=True)
class FileEntry:
    """One file of the folder."""

    file: str  # name within the folder
    bytes: int
    digest: str  # blake2b of the content, 16 bytes in hexadecimal


@dataclass(frozen=True)
class ShardEntry(FileEntry):
    """One ArrayRecord file."""

    documents: int


@dataclass(frozen=True)
class SplitEntry:
    """One split: its documents are those of its shards in order."""

    shards: tuple[ShardEntry, ...]
    lengths: FileEntry  # .npy, int64 [documents]: tokens of each document, both EOT included
    documents: int
    tokens: int  # both EOT of each document included
    text_bytes: int  # UTF-8 bytes of the texts


@dataclass(frozen=True)
class Manifest:
    """The whole folder."""

    format: int
    corpus_digest: str
    dtype: str  # of a token in a shard, as numpy spells it
    tokenizer: FileEntry
    baselines: FileEntry
    train: SplitEntry
    heldout: SplitEntry

    def split(self, split: Split) -> SplitEntry:
        """The entry of one split."""
        return self.train if split == "train" else self.heldout

    def files(self) -> list[FileEntry]:
        """Every file of the folder but the manifest."""
        entries = [self.tokenizer, self.baselines]
        for split in map(self.split, SPLITS):
            entries += [*split.shards, split.lengths]
        return entries


def describe_file(path: Path) -> FileEntry:
    """The entry of a file that was just written."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return FileEntry(path.name, path.stat().st_size, digest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest` into `folder`; the last file of a preparation."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def open_manifest(folder: Path) -> Manifest:
    """Read the manifest and check every file it names.

    Raises:
      InputError: the manifest cannot be read, or a file is missing, has another size or was altered.
    """
    try:
        manifest = _parse(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"The manifest {folder / MANIFEST} cannot be read ({error}). {_remedy(folder)}") from error
    if manifest.format != FORMAT:
        raise InputError(
            f"The manifest {folder / MANIFEST} is of format {manifest.format}, not {FORMAT}. {_remedy(folder)}"
        )
    for entry in manifest.files():
        _verify(folder, entry)
    return manifest


def _verify(folder: Path, entry: FileEntry) -> None:
    path = folder / entry.file
    if not path.is_file():
        raise InputError(f"The data file {path} is missing. {_remedy(folder)}")
    size = path.stat().st_size
    if size != entry.bytes:  # told apart from the digest, since it is what an interrupted copy leaves
        raise InputError(f"The data file {path} has {size} bytes instead of {entry.bytes}. {_remedy(folder)}")
    if describe_file(path).digest != entry.digest:
        raise InputError(f"The data file {path} was altered: its digest does not fit. {_remedy(folder)}")


def _remedy(folder: Path) -> str:
    return f"Delete the folder {folder}, so that the next run prepares it anew."


def _parse(tree: dict[str, Any]) -> Manifest:
    files = {name: FileEntry(**tree.pop(name)) for name in ("tokenizer", "baselines")}
    splits = {split: _parse_split(tree.pop(split)) for split in SPLITS}
    return Manifest(**files, **splits, **tree)


def _parse_split(tree: dict[str, Any]) -> SplitEntry:
    shards = tuple(ShardEntry(**shard) for shard in tree.pop("shards"))
    return SplitEntry(shards=shards, lengths=FileEntry(**tree.pop("lengths")), **tree)
