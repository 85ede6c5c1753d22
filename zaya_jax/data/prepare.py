"""Prepare a corpus once: tokenizer, token shards, compressor baselines, in a folder named by their content."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zaya_jax.config.schema import Config
from zaya_jax.data.baselines import compressor_baselines, end_of
from zaya_jax.data.corpus import SPLITS, Corpus, Split, find_corpus
from zaya_jax.data.manifest import FORMAT, Manifest, SplitEntry, describe_file, open_manifest, write_manifest
from zaya_jax.data.shards import Documents, open_documents, token_dtype, write_split
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from zaya_jax.errors import InputError

TOKENIZER = "tokenizer.json"
BASELINES = "baselines.json"


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus, every file of it checked."""

    folder: Path
    tokenizer: Tokenizer
    manifest: Manifest
    baselines: dict[str, float]  # bits per byte of the held-out text, see `compressor_baselines`

    @property
    def digest(self) -> str:
        """Names the content: equal where texts, split and tokenizer settings are equal."""
        return self.folder.name

    @property
    def train(self) -> SplitEntry:
        """Documents, tokens and text_bytes of the train split."""
        return self.manifest.train

    @property
    def heldout(self) -> SplitEntry:
        """Documents, tokens and text_bytes of the held-out split."""
        return self.manifest.heldout

    def open(self, split: Split) -> Documents:
        """The documents of one split."""
        return open_documents(self.folder, self.manifest, split)


def prepare(config: Config) -> Prepared:
    """Find the prepared data of `config`, or make it.

    The folder is `data.cache_dir/DIGEST`. It appears under that name whole or not at all. Of several processes
    on one file system one prepares and the others wait; what a killed one left behind is removed.

    Args:
      config: `data` and `model.vocab_size` are used.

    Raises:
      InputError: the corpus, the vocabulary or `data.cache_dir` cannot be used (the message says why), the corpus
        changed meanwhile, or a file of the folder is missing or damaged.
    """
    corpus = find_corpus(config.data)
    corpus_digest = corpus.digest()
    cache = Path(config.data.cache_dir).expanduser()
    folder = cache / _digest(config, corpus_digest)
    if not folder.exists():
        with _lock(folder.with_suffix(".lock")):
            if not folder.exists():  # another process may have made it while this one waited
                _prepare(config, corpus, corpus_digest, folder)
    return _open(folder, config.model.vocab_size)


def _digest(config: Config, corpus_digest: str) -> str:
    settings = [FORMAT, corpus_digest, sorted(config.data.suffixes), config.data.heldout_fraction,
                config.model.vocab_size]  # fmt: skip
    return hashlib.blake2b(json.dumps(settings).encode(), digest_size=12).hexdigest()


def _prepare(config: Config, corpus: Corpus, corpus_digest: str, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # a killed preparation's; the lock says that none is alive
    partial.mkdir()
    try:
        vocab_size = config.model.vocab_size
        with _stage(f"training a tokenizer of {vocab_size} tokens on {len(corpus.train)} files"):
            tokenizer = train_tokenizer(corpus.texts("train"), vocab_size)
            tokenizer.save(partial / TOKENIZER)
        entries = {}
        for split in SPLITS:
            with _stage(f"encoding the {split} split, {len(corpus.files(split))} files"):
                documents = tokenizer.encode_all(corpus.texts(split))
                entries[split] = write_split(
                    partial, split, documents, dtype=token_dtype(vocab_size), text_bytes=corpus.text_bytes(split)
                )
        with _stage("measuring gzip and xz on the held-out split"):
            train = end_of(map(corpus.read, reversed(corpus.train)))
            baselines = compressor_baselines(train, "".join(corpus.texts("heldout")).encode())
            (partial / BASELINES).write_text(json.dumps(baselines, indent=1) + "\n", encoding="utf-8")
        if corpus.digest() != corpus_digest:  # the texts were read several times
            raise InputError(f"A file in {corpus.root} changed while the corpus was prepared; start again.")
        manifest = Manifest(
            format=FORMAT,
            corpus_digest=corpus_digest,
            dtype=token_dtype(vocab_size).str,
            tokenizer=describe_file(partial / TOKENIZER),
            baselines=describe_file(partial / BASELINES),
            **entries,
        )
        write_manifest(partial, manifest)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _open(folder: Path, vocab_size: int) -> Prepared:
    manifest = open_manifest(folder)
    tokenizer = load_tokenizer(folder / manifest.tokenizer.file, vocab_size)
    baselines = json.loads((folder / manifest.baselines.file).read_text(encoding="utf-8"))
    return Prepared(folder, tokenizer, manifest, baselines)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the file's lock, which the system lets go of when the process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise InputError(f"The folder data.cache_dir ({path.parent}) cannot be written: {error.strerror}.") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _stage(what: str) -> Iterator[None]:
    """Say on stderr what happens now and, once it has, how long it took."""
    print(f"data: {what} ...", end=" ", file=sys.stderr, flush=True)
    started = time.perf_counter()
    outcome = "stopped after"
    try:
        yield
        outcome = "done in"
    finally:
        print(f"{outcome} {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
