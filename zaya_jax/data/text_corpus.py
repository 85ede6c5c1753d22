"""Prepare a folder of text files as a source, and cache its tokenizer, token shards and compressor baselines."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from zaya_jax.config import Config
from zaya_jax.config.checks import counted
from zaya_jax.data.baselines import compressor_baselines, last_window
from zaya_jax.data.convert import save_lengths
from zaya_jax.data.corpus import SPLITS, Corpus, Split, find_corpus
from zaya_jax.data.manifest import (
    FORMAT,
    Manifest,
    ShardEntry,
    SplitEntry,
    describe_file,
    json_digest,
    read_manifest,
    write_manifest,
)
from zaya_jax.data.prepare import TOKENIZER
from zaya_jax.data.shards import ShardWriter, token_dtype
from zaya_jax.data.tokenizer import Tokenizer, train_tokenizer
from zaya_jax.errors import InputError, printable
from zaya_jax.run.files import expanded, locked, write_atomically

BASELINES = "baselines.json"

_SHARD_BYTES = 64 * 2**20  # bytes of records; parallel file systems are slow with many small files


def open_corpus(config: Config) -> tuple[Path, Manifest]:
    """Prepare the corpus of `config`, or open the cached preparation.

    The folder is `data.cache_dir/DIGEST`, which is created atomically. If several processes share a file system, one
    prepares and the others wait. What a killed process left behind is removed.

    Args:
      config: uses `data` and `model.vocab_size`.

    Returns:
      The folder and its manifest.

    Raises:
      InputError: the corpus, the vocabulary size or `data.cache_dir` cannot be used, the corpus changed during the
        preparation, or a file of the folder is missing or has another size.
    """
    corpus = find_corpus(config.data)
    content = _content(config, corpus)
    folder = expanded(config.data.cache_dir) / content
    if not folder.exists():
        with locked(folder.with_suffix(".lock"), "The folder data.cache_dir"):
            if not folder.exists():  # another process may have created it while this one waited
                _prepare(config, corpus, content, folder)
    return folder, read_manifest(folder, cache_remedy(folder))


def cache_remedy(folder: Path) -> str:
    """Return the advice for a damaged folder of the cache."""
    return f"Delete the folder {folder}; the next run prepares it again."


def corpus_baselines(config: Config, folder: Path) -> dict[str, float]:
    """Return the bits per byte of compressors on the held-out text, see `compressor_baselines`.

    The first call measures them, and keeps them in the prepared `folder`: they are not needed before the first
    evaluation. {} if the corpus has changed since it was prepared, or cannot be measured.
    """
    path = folder / BASELINES
    try:
        if not path.exists():
            with locked(folder.with_suffix(".lock"), "The folder data.cache_dir"):
                if not path.exists():  # another process may have measured while this one waited
                    _measure_baselines(config, folder.name, path)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (InputError, OSError, ValueError) as error:
        print(f"data: gzip and xz were not measured: {error}", file=sys.stderr)
        return {}


def _measure_baselines(config: Config, content: str, path: Path) -> None:
    corpus = find_corpus(config.data)
    if _content(config, corpus) != content:
        return
    with timed_step("measuring gzip and xz on the held-out split"):
        train = last_window(map(corpus.read, reversed(corpus.train)))
        baselines = compressor_baselines(train, "".join(corpus.texts("heldout")).encode())
    write_atomically(path, json.dumps(baselines, indent=1) + "\n")


def _content(config: Config, corpus: Corpus) -> str:
    """Return the digest of all that a prepared corpus depends on, the name of its folder."""
    return json_digest(FORMAT, corpus.digest(), sorted(config.data.suffixes), config.data.heldout_fraction,
                       config.model.vocab_size)  # fmt: skip


def _prepare(config: Config, corpus: Corpus, content: str, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process; the lock excludes a running one
    partial.mkdir()
    try:
        vocab_size = config.model.vocab_size
        if corpus.unread and config.data.corpus != "stdlib":
            print(f"data: {counted(corpus.unread, 'file')} in {printable(str(corpus.root))} not read: empty, or not in "
                  f"data.suffixes ({', '.join(config.data.suffixes)}).", file=sys.stderr)  # fmt: skip
        with timed_step(f"training a tokenizer of {vocab_size} tokens on {len(corpus.train)} files"):
            tokenizer = train_tokenizer(corpus.texts("train"), vocab_size)
            tokenizer.save(partial / TOKENIZER)
        entries = {}
        for split in SPLITS:
            with timed_step(f"encoding the {split} split, {len(corpus.files(split))} files"):
                documents = tokenizer.encode_all(corpus.texts(split))
                entries[split] = write_split(partial, split, documents, tokenizer, corpus.text_bytes(split))
        if _content(config, find_corpus(config.data)) != content:  # the steps above read the texts separately
            raise InputError(f"A file in {corpus.root} changed while the corpus was prepared; rerun the command.")
        manifest = Manifest(
            format=FORMAT,
            kind="tokens",
            inputs=content,
            content=content,
            dtype=token_dtype(tokenizer.vocab_size).str,
            tokenizer=describe_file(partial / TOKENIZER),
            eot=tokenizer.eot_text,
            bos=tokenizer.eot_text,
            eos=tokenizer.eot_text,
            counts={},
            examples=(),
            extras=(),
            **entries,
        )
        write_manifest(partial, manifest)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_split(folder: Path, split: Split, documents: Iterable[Sequence[int]], tokenizer: Tokenizer,
                text_bytes: int) -> SplitEntry:  # fmt: skip
    """Write the shards and lengths of a split, and add to each document its begin token, if any, and its end token."""
    dtype, shards, lengths = token_dtype(tokenizer.vocab_size), [], []
    records = (np.array([*tokenizer.prefix, *document, tokenizer.eot], dtype) for document in documents)
    while entry := _write_shard(folder / f"{split}-{len(shards):06d}.arrayrecord", records, lengths):
        shards.append(entry)
    written = save_lengths(folder / f"{split}-lengths.npy", np.array(lengths, np.int64))
    return SplitEntry(tuple(shards), written, len(lengths), sum(lengths), text_bytes)


def _write_shard(path: Path, records: Iterator[np.ndarray], lengths: list[int]) -> ShardEntry | None:
    """Write records until the shard is full, and append to `lengths`; None if no record was left."""
    with ShardWriter(path) as writer:
        filled = 0
        for record in records:
            writer.write(record.tobytes())
            lengths.append(len(record))
            filled += record.nbytes
            if filled >= _SHARD_BYTES:
                break
        return writer.finish()


@contextmanager
def timed_step(label: str) -> Iterator[None]:
    """Print a label to stderr and, at the end of the block, its duration."""
    print(f"data: {label} ...", end=" ", file=sys.stderr, flush=True)
    started = time.perf_counter()
    outcome = "stopped after"
    try:
        yield
        outcome = "done in"
    finally:
        print(f"{outcome} {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
