"""List the text files of a corpus and split them into training and held-out files; texts are read on iteration."""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from zaya_jax.config import DataConfig
from zaya_jax.config.checks import counted
from zaya_jax.data.readers.inputs import list_folder, refuse_lines, suffix_kind
from zaya_jax.data.readers.unit import reading
from zaya_jax.errors import InputError
from zaya_jax.run.files import expanded, require_regular

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)

# Installed packages differ between machines, and some test data is deliberately not UTF-8.
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """Files of each split, as sorted posix paths relative to `root`."""

    root: Path
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    hashes: dict[str, int] = field(repr=False)  # file → `content_hash`
    unread: dict[str, int] = field(default_factory=dict)  # kind → number of items of the folder that are not read

    def files(self, split: Split) -> tuple[str, ...]:
        """Return the files of a split."""
        return self.train if split == "train" else self.heldout

    def read(self, file: str) -> str:
        """Read one file unchanged, including a byte order mark and carriage returns.

        Raises:
          InputError: the file cannot be read or is not UTF-8.
        """
        return _read(self.root / file)

    def texts(self, split: Split) -> Iterator[str]:
        """Yield the texts of a split, in the order of `files`."""
        return map(self.read, self.files(split))

    def digest(self) -> str:
        """Return a digest of all paths, contents and splits."""
        digest = hashlib.blake2b(digest_size=16)
        for split in SPLITS:
            for file in self.files(split):
                for part in (split.encode(), os.fsencode(file), self.hashes[file].to_bytes(8, "little")):
                    digest.update(len(part).to_bytes(8, "little"))  # makes the encoding unambiguous
                    digest.update(part)
        return digest.hexdigest()


def content_hash(content: bytes) -> int:
    """Hash a document to 64 bits; the hash decides whether it is held out, so copies share a split."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def find_corpus(config: DataConfig) -> Corpus:
    """List the files of the corpus and split them.

    The split depends on a hash of each file's content, so copies share a split and adding a file moves no other. Each
    split gets at least one text. Empty files and hidden items are skipped, and links to folders are not followed.

    Args:
      config: uses `corpus` ('stdlib' means the standard library without tests and installed packages), `suffixes` and
        `heldout_fraction`.

    Raises:
      InputError: the folder is missing or cannot be listed, a file cannot be read or is not UTF-8, or there are fewer
        than two distinct texts.
    """
    is_stdlib = config.corpus == "stdlib"
    root = Path(sysconfig.get_path("stdlib")) if is_stdlib else expanded(config.corpus)
    excluded = STDLIB_EXCLUDED if is_stdlib else frozenset[str]()
    if not root.is_dir():
        raise InputError(f"data.corpus is {config.corpus!r}, but {root} is not a folder; give a folder or 'stdlib'.")
    unread = Counter[str]()
    listed = sorted(path.relative_to(root).as_posix() for path in _files(root, config.suffixes, excluded, unread))
    hashes = {file: content_hash(text.encode()) for file in listed if (text := _read(root / file)).strip()}
    unread.update("empty" for file in listed if file not in hashes)
    files, suffixes = list(hashes), ", ".join(config.suffixes)
    if not files:
        raise InputError(
            f"data.corpus is {config.corpus!r}, but {root} contains no non-empty file that ends in "
            f"{suffixes}; change data.corpus or data.suffixes."
        )
    ordered = sorted(set(hashes.values()))
    if len(ordered) == 1:
        raise InputError(
            f"data.corpus is {config.corpus!r}, but {root} contains only one distinct text ({files[0]}; "
            f"{counted(len(files), 'file')} in {suffixes}), and one must be held out from training; add a "
            "file, or split this one."
        )
    below = sum(value < config.heldout_fraction * 2**64 for value in ordered)
    last = ordered[min(max(below, 1), len(ordered) - 1) - 1]
    train, heldout = (tuple(f for f in files if (hashes[f] <= last) == held) for held in (False, True))
    # Of the standard library, only sources are meant.
    return Corpus(root, train, heldout, hashes, {} if is_stdlib else dict(unread))


def _read(path: Path) -> str:
    require_regular(path)
    refuse_lines(path)
    try:
        with reading(f"The corpus file {path}"):
            return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"The corpus file {path} is not UTF-8: the byte at offset {error.start} cannot be decoded. "
            "Convert the file, or leave it out through data.suffixes."
        ) from error


def _files(folder: Path, suffixes: tuple[str, ...], excluded: frozenset[str], unread: Counter[str]) -> Iterator[Path]:
    """Yield the files to read, and count others in `unread`; folders with `excluded` names are not part of a corpus."""
    for entry in list_folder(folder, unread):
        if entry.is_dir(follow_symlinks=False):
            yield from () if entry.name in excluded else _files(Path(entry.path), suffixes, excluded, unread)
        elif entry.name.endswith(suffixes):
            yield Path(entry.path)
        else:
            unread[suffix_kind(entry.name)] += 1
