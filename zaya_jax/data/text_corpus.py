"""Prepare a folder of text files as a source, and cache its tokenizer, token shards and compressor baselines."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from zaya_jax.config import Config
from zaya_jax.config.checks import counted
from zaya_jax.data.baselines import compressor_baselines, last_window
from zaya_jax.data.convert import Conversion, remove_notes
from zaya_jax.data.corpus import Corpus, find_corpus
from zaya_jax.data.encoding import PrepareSettings, PrepareWork
from zaya_jax.data.manifest import FORMAT, Manifest, describe_file, json_digest, read_manifest
from zaya_jax.data.prepare import TOKENIZER, write_merged
from zaya_jax.data.readers.text import cut_texts
from zaya_jax.data.readers.unit import InputFile
from zaya_jax.data.special_tokens import SpecialTokens
from zaya_jax.data.tokenizer import train_tokenizer
from zaya_jax.errors import InputError
from zaya_jax.run.files import expanded, locked, read_file, write_atomically
from zaya_jax.run.writing import new_folder, require_trusted

BASELINES = "baselines.json"

_UNIT_BYTES = 64 * 2**20  # bytes of text in a shard; parallel file systems are slow with many small files


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
    _create_once(folder, folder, lambda: _prepare(config, corpus, content, folder))
    # Files that are not read can change without a new preparation.
    return folder, dataclasses.replace(read_manifest(folder, cache_remedy(folder)), unread_files=corpus.unread)


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
        _create_once(path, folder, lambda: _measure_baselines(config, folder.name, path))
        return json.loads(read_file(path)) if path.exists() else {}
    except (InputError, OSError, ValueError) as error:
        print(f"data: gzip and xz were not measured: {error}", file=sys.stderr)
        return {}


def _create_once(path: Path, folder: Path, create: Callable[[], None]) -> None:
    """Create a path in the cache unless it exists; the lock of `folder` lets one process create it."""
    if not path.exists():
        with locked(folder.with_suffix(".lock"), "The folder data.cache_dir"):
            if not path.exists():  # another process may have created it while this one waited
                create()
    require_trusted(path)


def _measure_baselines(config: Config, content: str, path: Path) -> None:
    corpus = find_corpus(config.data)
    if _content(config, corpus) != content:
        return
    print("data: measuring gzip and xz on the held-out split", file=sys.stderr, flush=True)
    train = last_window(map(corpus.read, reversed(corpus.train)))
    baselines = compressor_baselines(train, "".join(corpus.texts("heldout")).encode())
    write_atomically(path, json.dumps(baselines, indent=1) + "\n")


def _content(config: Config, corpus: Corpus) -> str:
    """Return the digest of all that a prepared corpus depends on, the name of its folder."""
    return json_digest(
        FORMAT, corpus.digest(), sorted(config.data.suffixes), config.data.heldout_fraction, config.model.vocab_size
    )


def _prepare(config: Config, corpus: Corpus, content: str, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    with new_folder(folder, partial):  # a partial one is a killed process's, since the lock excludes a running one
        vocab_size, files = config.model.vocab_size, [str(corpus.root / file) for file in corpus.hashes]
        units = list(cut_texts([InputFile("text", file, os.path.getsize(file)) for file in files], _UNIT_BYTES))
        print(
            f"data: training a tokenizer of {vocab_size} tokens on {counted(len(corpus.train), 'file')}",
            file=sys.stderr,
            flush=True,
        )
        tokenizer = train_tokenizer(corpus.texts("train"), vocab_size)
        tokenizer.save(partial / TOKENIZER)
        special = SpecialTokens(*[tokenizer.eot_text] * 3)
        heldout = Fraction(1 + max(corpus.hashes[file] for file in corpus.heldout), 2**64)
        digest = describe_file(partial / TOKENIZER).digest
        work = PrepareWork(partial / TOKENIZER, digest, special, PrepareSettings(heldout=heldout))
        conversion = Conversion(partial, units, [unit.bytes for unit in units], "Fix them.")
        conversion.convert(work, f"encoding {counted(len(files), 'file')}")
        if _content(config, find_corpus(config.data)) != content:  # the steps above read the texts separately
            raise InputError(f"A file in {corpus.root} changed while the corpus was prepared; rerun the command.")
        write_merged(partial, len(units), kind="tokens", inputs=content, special=special, content=content)
        remove_notes(partial)
