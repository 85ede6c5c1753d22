"""The peers of the data benchmark: Grain's own packing, and `datasets` with the `tokenizers` library."""

import importlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.data.prepare import open_manifest
from zaya_jax.errors import InputError

_READ_AHEAD = 500  # documents that reading threads hold; Grain's own default


class GrainSettings(NamedTuple):
    """What can be chosen for Grain's pipeline."""

    threads: int = 0  # that read documents; with 0 they are read when packing asks for them
    workers: int = 0  # processes that make batches
    buffer: int = 16  # batches that each of them holds


def grain_packing(
    folder: Path, context: int, batch: int, settings: GrainSettings, skipped: int, batches: int
) -> Callable[[], float]:
    """A function that makes batches with `ConcatThenSplitIterDataset` and returns the seconds they took.

    Args:
      folder: a prepared one, whose shards are read.
      context: tokens a row.
      batch: rows.
      settings: of the pipeline.
      skipped: batches before the clock starts, so that processes have started and buffers are full.
      batches: that are timed.
    """
    import grain
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from grain import experimental

    shards = sorted(str(path) for path in folder.glob("train-*.arrayrecord"))
    source: Any = ArrayRecordDataSource(shards)  # which Grain takes, though it names an argument otherwise
    decode = Decode(open_manifest(folder).dtype)

    def step() -> float:
        read = grain.ReadOptions(settings.threads, _READ_AHEAD if settings.threads else 0)
        documents = grain.MapDataset.source(source).seed(0).shuffle().repeat().map(decode)
        rows = experimental.ConcatThenSplitIterDataset(
            documents.to_iter_dataset(read), length_struct={"tokens": context}
        )
        dataset: Any = rows.batch(batch)
        if settings.workers:
            _parse_absl_flags()
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(settings.workers, settings.buffer))
        iterator = iter(dataset)
        try:
            return time_batches(iterator, skipped, batches)
        finally:
            iterator.close()

    return step


class Decode(NamedTuple):
    """A record as what Grain packs."""

    dtype: str

    def __call__(self, record: bytes) -> dict[str, np.ndarray]:
        """The record's tokens, int32 [n]."""
        return {"tokens": np.frombuffer(record, self.dtype).astype(np.int32)}


def time_batches(iterator: Any, skipped: int, batches: int) -> float:
    """Seconds of `batches` batches, after `skipped` ones."""
    for _ in range(skipped):
        next(iterator)
    start = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return time.perf_counter() - start


def _parse_absl_flags() -> None:
    """Grain's workers read a flag of absl's, which refuses unless a main program has parsed the flags."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def check_datasets() -> None:
    """Raise `InputError` where `datasets` is not installed."""
    if importlib.util.find_spec("datasets") is None:
        raise InputError("The comparison needs datasets: pip install -e '.[bench]'.")


def datasets_preparing(lines: Path, tokenizer: Path, workers: int, fast: bool, scratch: Path) -> Callable[[], float]:
    """A function that loads JSONL and maps a tokenizer over it, and returns the seconds of the map alone.

    Args:
      lines: JSONL.
      tokenizer: a `tokenizer.json`.
      workers: processes of the map.
      fast: encode with `encode_batch_fast`, which leaves the offsets out, in place of `encode_batch`.
      scratch: an existing folder for caches, of which each call gets one of its own.
    """
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    datasets: Any = importlib.import_module("datasets")  # by name, since no part of the package may need it
    tokenizers: Any = importlib.import_module("tokenizers")
    datasets.disable_progress_bars()
    loaded = tokenizers.Tokenizer.from_file(str(tokenizer))
    encode = loaded.encode_batch_fast if fast else loaded.encode_batch

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [encoding.ids for encoding in encode(rows["text"], add_special_tokens=False)]}

    def step() -> float:
        with tempfile.TemporaryDirectory(dir=scratch) as cache:
            dataset = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=cache)
            start = time.perf_counter()
            dataset.map(tokenize, batched=True, num_proc=workers, remove_columns=dataset.column_names)
            return time.perf_counter() - start

    return step
