"""The text files of a corpus, and which of them are held out.

Nothing is kept in memory: a corpus is two lists of paths, and its texts are read when they are iterated over.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from zaya_jax.config import DataConfig
from zaya_jax.errors import InputError

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)

# Installed packages differ between machines, and test data is partly not UTF-8 (by intent).
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """Files below `root`, as posix paths relative to it, each split sorted."""

    root: Path
    train: tuple[str, ...]
    heldout: tuple[str, ...]

    def files(self, split: Split) -> tuple[str, ...]:
        """Relative paths of the split's files, sorted."""
        return self.train if split == "train" else self.heldout

    def read(self, file: str) -> str:
        """The text of one file, byte for byte (a byte order mark and carriage returns stay).

        Raises:
          InputError: the file cannot be read or is not UTF-8.
        """
        try:
            return (self.root / file).read_bytes().decode("utf-8")
        except OSError as error:
            raise InputError(f"The corpus file {self.root / file} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise InputError(
                f"The corpus file {self.root / file} is not UTF-8: the byte at offset {error.start} cannot be decoded. "
                "Convert the file, or leave it out through data.suffixes."
            ) from error

    def texts(self, split: Split) -> Iterator[str]:
        """The split's texts, in the order of `files`."""
        return map(self.read, self.files(split))

    def text_bytes(self, split: Split) -> int:
        """UTF-8 bytes of the split's texts."""
        return sum((self.root / file).stat().st_size for file in self.files(split))

    def digest(self) -> str:
        """A digest of every path, every text and the split each is in.

        Raises:
          InputError: as `read`.
        """
        digest = hashlib.blake2b(digest_size=16)
        for split in SPLITS:
            for file in self.files(split):
                for part in (split.encode(), os.fsencode(file), self.read(file).encode()):
                    digest.update(len(part).to_bytes(8, "little"))  # so that no two corpora spell the same bytes
                    digest.update(part)
        return digest.hexdigest()


def find_corpus(config: DataConfig) -> Corpus:
    """List the files of the corpus and split them.

    Args:
      config: `corpus` is 'stdlib' (the source of the running Python's standard library, without its tests and
        without installed packages) or a folder; `suffixes` the endings of the names of the files taken;
        `heldout_fraction` the part of the files held out, chosen by a hash of each relative path, so that a
        file added later moves no other.

    Returns:
      The corpus; empty files are left out. Links to folders are not followed.

    Raises:
      InputError: the folder is missing or cannot be listed, it has no such file, or one of the splits would
        have none.
    """
    if config.corpus == "stdlib":
        root, excluded = Path(sysconfig.get_path("stdlib")), STDLIB_EXCLUDED
    else:
        root, excluded = Path(config.corpus).expanduser(), frozenset[str]()
    if not root.is_dir():
        raise InputError(f"data.corpus is {config.corpus!r}, but {root} is not a folder; give a folder or 'stdlib'.")
    files = sorted(_files(root, config.suffixes, excluded))
    suffixes = ", ".join(config.suffixes)
    if not files:
        raise InputError(
            f"data.corpus is {config.corpus!r}, but {root} holds no file that ends in {suffixes} and is not empty; "
            "change data.corpus or data.suffixes."
        )
    heldout = {file for file in files if _is_heldout(file, config.heldout_fraction)}
    corpus = Corpus(root, tuple(f for f in files if f not in heldout), tuple(f for f in files if f in heldout))
    for split in SPLITS:
        if not corpus.files(split):
            raise InputError(
                f"The {split} split is empty: of the {len(files)} files that end in {suffixes} in {root}, "
                f"data.heldout_fraction ({config.heldout_fraction}) holds out {len(heldout)}; "
                "change the fraction or add files."
            )
    return corpus


def _files(root: Path, suffixes: tuple[str, ...], excluded: frozenset[str]) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise InputError(f"The folder {error.filename} of the corpus cannot be listed: {error.strerror}.") from error

    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if name not in excluded]
        for name in names:
            path = Path(folder, name)
            if name.endswith(suffixes) and not _is_empty(path):
                yield path.relative_to(root).as_posix()


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError as error:
        raise InputError(f"The corpus file {path} cannot be read: {error.strerror}.") from error


def _is_heldout(file: str, fraction: float) -> bool:
    digest = hashlib.blake2b(os.fsencode(file), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64
