"""Prepare a folder of text files as a source, and cache its tokenizer, token shards and compressor baselines."""

import dataclasses
import functools
import gzip
import hashlib
import itertools
import json
import lzma
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from zaya_jax.config import Config, DataConfig
from zaya_jax.config.checks import counted
from zaya_jax.data.prepare.document_encoder import PrepareSettings, PrepareWork
from zaya_jax.data.prepare.manifest import FORMAT, SPLITS, Manifest, Split, content_hash, json_digest, read_manifest
from zaya_jax.data.prepare.preparation import TOKENIZER, write_merged
from zaya_jax.data.prepare.shard_conversion import Conversion, remove_notes
from zaya_jax.data.readers.documents import InputFile, reading
from zaya_jax.data.readers.inputs import list_folder, refuse_lines, suffix_kind
from zaya_jax.data.readers.text import cut_texts
from zaya_jax.data.special_tokens import SpecialTokens
from zaya_jax.data.tokenizer import train_tokenizer
from zaya_jax.errors import InputError
from zaya_jax.run.files import expanded, locked, read_file, require_regular, write_atomically
from zaya_jax.run.writing import new_folder, require_trusted

BASELINES = "baselines.json"
# A compressor cannot use text beyond its window: 64 MiB in `xz -9`, 32 KiB in `gzip -9`. Dropping earlier text gives
# the same figures and bounds the time.
WINDOW_BYTES = 64 * 2**20
# Installed packages differ between machines, and some test data is deliberately not UTF-8.
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

_UNIT_BYTES = 64 * 2**20  # bytes of text in a shard; parallel file systems are slow with many small files
_COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "xz": functools.partial(lzma.compress, preset=9),
    "gzip": functools.partial(gzip.compress, compresslevel=9, mtime=0),
}


@dataclass(frozen=True)
class Corpus:
    """Files of each split, as sorted posix paths relative to `root`; texts are read on iteration."""

    root: Path
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    hashes: dict[str, int] = field(repr=False)  # file → `content_hash`
    unread: dict[str, int] = field(default_factory=dict)  # kind → number of items of the folder that are not read

    def files(self, split: Split) -> tuple[str, ...]:
        """Return the files of a split."""
        return self.train if split == "train" else self.heldout

    def texts(self, split: Split) -> Iterator[str]:
        """Yield the texts of a split, in the order of `files`; `InputError` if one is not UTF-8."""
        return (_read(self.root / file) for file in self.files(split))

    def digest(self) -> str:
        """Return a digest of all paths, contents and splits."""
        digest = hashlib.blake2b(digest_size=16)
        for split in SPLITS:
            for file in self.files(split):
                for part in (split.encode(), os.fsencode(file), self.hashes[file].to_bytes(8, "little")):
                    digest.update(len(part).to_bytes(8, "little"))  # makes the encoding unambiguous
                    digest.update(part)
        return digest.hexdigest()


def find_corpus(config: DataConfig) -> Corpus:
    """List the files of the corpus and split them; `InputError` if that is impossible.

    The split depends on a hash of each file's content, so copies share a split and adding a file moves no other. Each
    split gets at least one text. 'stdlib' means the standard library without tests and installed packages.
    """
    is_stdlib = config.corpus == "stdlib"
    root = Path(sysconfig.get_path("stdlib")) if is_stdlib else expanded(config.corpus)
    excluded = STDLIB_EXCLUDED if is_stdlib else frozenset[str]()
    named = f"data.corpus is {config.corpus!r}, but {root}"
    if not root.is_dir():
        raise InputError(f"{named} is not a folder; give a folder or 'stdlib'.")
    unread = Counter[str]()
    listed = sorted(path.relative_to(root).as_posix() for path in _files(root, config.suffixes, excluded, unread))
    hashes = {file: content_hash(text.encode()) for file in listed if (text := _read(root / file)).strip()}
    unread.update("empty" for file in listed if file not in hashes)
    files, suffixes = list(hashes), ", ".join(config.suffixes)
    if not files:
        advice = "change data.corpus or data.suffixes"
        raise InputError(f"{named} contains no non-empty file that ends in {suffixes}; {advice}.")
    ordered = sorted(set(hashes.values()))
    if len(ordered) == 1:
        raise InputError(
            f"{named} contains only one distinct text ({files[0]}; {counted(len(files), 'file')} in {suffixes}), and "
            "one must be held out from training; add a file, or split this one."
        )
    below = sum(value < config.heldout_fraction * 2**64 for value in ordered)
    last = ordered[min(max(below, 1), len(ordered) - 1) - 1]
    train, heldout = (tuple(f for f in files if (hashes[f] <= last) == held) for held in (False, True))
    # Of the standard library, only sources are meant.
    return Corpus(root, train, heldout, hashes, {} if is_stdlib else dict(unread))


def _read(path: Path) -> str:
    """Read a text unchanged, with byte order mark and carriage returns."""
    require_regular(path)
    refuse_lines(path)
    try:
        with reading(f"The corpus file {path}"):
            return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"The corpus file {path} is not UTF-8: the byte at offset {error.start} cannot be decoded. Convert the "
            "file, or leave it out through data.suffixes."
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


def open_corpus(config: Config) -> tuple[Path, Manifest]:
    """Prepare the corpus of `config`, or open the cached preparation; return the folder and its manifest.

    The folder `data.cache_dir/DIGEST` is created atomically. If several processes share a file system, one prepares and
    the others wait. `InputError` if the corpus, the vocabulary size, the folder or `data.cache_dir` cannot be used, or
    the corpus changed during the preparation.
    """
    corpus = find_corpus(config.data)
    content = _content(config, corpus)
    folder = expanded(config.data.cache_dir) / content
    _create_once(folder, folder, lambda: _prepare(config, corpus, content, folder))
    # Files that are not read can change without a new preparation.
    return folder, dataclasses.replace(read_manifest(folder, cache_remedy(folder)), unread_files=corpus.unread)


def cache_remedy(folder: Path) -> str:
    """Return the advice for a damaged folder of the cache."""
    return f"Delete the folder {folder}; the next run prepares it again."


def _create_once(path: Path, folder: Path, create: Callable[[], None]) -> None:
    """Create a path in the cache unless it exists; the lock of `folder` lets one process create it."""
    if not path.exists():
        with locked(folder.with_suffix(".lock"), "The folder data.cache_dir"):
            if not path.exists():  # another process may have created it while this one waited
                create()
    require_trusted(path)


def _content(config: Config, corpus: Corpus) -> str:
    """Return the digest of all that a prepared corpus depends on, the name of its folder."""
    data = config.data
    return json_digest(FORMAT, corpus.digest(), sorted(data.suffixes), data.heldout_fraction, config.model.vocab_size)


def _prepare(config: Config, corpus: Corpus, content: str, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    with new_folder(folder, partial):  # a partial one is a killed process's, since the lock excludes a running one
        vocab_size, files = config.model.vocab_size, [str(corpus.root / file) for file in corpus.hashes]
        units = list(cut_texts([InputFile("text", file, os.path.getsize(file)) for file in files], _UNIT_BYTES))
        trained = f"a tokenizer of {vocab_size} tokens on {counted(len(corpus.train), 'file')}"
        print(f"data: training {trained}", file=sys.stderr, flush=True)
        tokenizer = train_tokenizer(corpus.texts("train"), vocab_size)
        tokenizer.save(partial / TOKENIZER)
        special = SpecialTokens(*[tokenizer.eot_text] * 3)
        heldout = Fraction(1 + max(corpus.hashes[file] for file in corpus.heldout), 2**64)
        work = PrepareWork(partial / TOKENIZER, content, special, PrepareSettings(heldout=heldout))
        conversion = Conversion(partial, units, [unit.bytes for unit in units], "Fix them.")
        conversion.convert(work, f"encoding {counted(len(files), 'file')}")
        if _content(config, find_corpus(config.data)) != content:  # the steps above read the texts separately
            raise InputError(f"A file in {corpus.root} changed while the corpus was prepared; rerun the command.")
        write_merged(partial, len(units), kind="tokens", inputs=content, special=special, content=content)
        remove_notes(partial)


def corpus_baselines(config: Config, folder: Path) -> dict[str, float]:
    """Return the bits per byte of compressors on the held-out text, see `compressor_baselines`.

    The first call keeps them in the prepared `folder`. {} if the corpus has changed since, or cannot be measured.
    """
    path = folder / BASELINES

    def measure() -> None:
        corpus = find_corpus(config.data)
        if _content(config, corpus) == folder.name:
            print("data: measuring gzip and xz on the held-out split", file=sys.stderr, flush=True)
            train = last_window(_read(corpus.root / file) for file in reversed(corpus.train))
            baselines = compressor_baselines(train, "".join(corpus.texts("heldout")).encode())
            write_atomically(path, json.dumps(baselines, indent=1) + "\n")

    try:
        _create_once(path, folder, measure)
        return json.loads(read_file(path)) if path.exists() else {}
    except (InputError, OSError, ValueError) as error:
        print(f"data: gzip and xz were not measured: {error}", file=sys.stderr)
        return {}


def compressor_baselines(train: bytes, heldout: bytes) -> dict[str, float]:
    """Compress the held-out text, alone and as the continuation of the training text; return bits per byte of it.

    `gzip` and `xz` compress it alone. `gzip_given_train` and `xz_given_train` count only the bits that it adds to the
    training text, of which only the part within the largest window matters.
    """
    texts = {"both": train[-WINDOW_BYTES:] + heldout, "train": train[-WINDOW_BYTES:], "heldout": heldout}
    jobs = list(itertools.product(texts, _COMPRESSORS))  # longest first
    with ThreadPoolExecutor(max_workers=2) as threads:  # both release the GIL; `xz -9` takes 0.7 GB a thread
        sizes = dict(zip(jobs, threads.map(lambda job: len(_COMPRESSORS[job[1]](texts[job[0]])), jobs), strict=True))
    bits_per_byte = {}
    for name in _COMPRESSORS:
        given_train = sizes["both", name] - sizes["train", name]
        bits_per_byte[name] = 8 * sizes["heldout", name] / len(heldout)
        bits_per_byte[f"{name}_given_train"] = 8 * given_train / len(heldout)
    return bits_per_byte


def last_window(texts: Iterable[str]) -> bytes:
    """Return the end of the concatenated texts that fits a compressor's window, in UTF-8; the last text comes first."""
    parts, size = [], 0
    for text in texts:
        parts.append(text.encode())
        size += len(parts[-1])
        if size >= WINDOW_BYTES:
            break
    return b"".join(reversed(parts))[-WINDOW_BYTES:]
