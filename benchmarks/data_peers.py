"""The other sides of the data benchmark: Grain's packing, and `datasets` with the `tokenizers` library."""

import functools
import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.data.prepare.preparation import open_manifest
from zaya_jax.lab.measure.timing import elapsed, time_calls

_READ_AHEAD = 500  # documents that reading threads buffer, Grain's default


class GrainSettings(NamedTuple):
    """Settings of Grain's pipeline."""

    threads: int = 0  # threads that read documents ahead; 0 to read on demand
    workers: int = 0  # processes that make batches
    buffer: int = 16  # batches that each worker buffers


def grain_packing(
    folder: Path, context: int, batch: int, settings: GrainSettings, skipped: int, batches: int
) -> Callable[[], float]:
    """Make a function that makes batches with `ConcatThenSplitIterDataset`, and returns the seconds they took.

    It reads the shards of a prepared folder. `skipped` batches come before timing, so that processes have started and
    buffers are full.
    """
    import grain
    from absl import flags
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from grain import experimental

    shards = sorted(str(path) for path in folder.glob("train-*.arrayrecord"))
    source: Any = ArrayRecordDataSource(shards)  # Any: a parameter is named differently in Grain
    decode_record = functools.partial(decode, open_manifest(folder).dtype)

    def step() -> float:
        read = grain.ReadOptions(settings.threads, _READ_AHEAD if settings.threads else 0)
        documents = grain.MapDataset.source(source).seed(0).shuffle().repeat().map(decode_record)
        rows = experimental.ConcatThenSplitIterDataset(
            documents.to_iter_dataset(read), length_struct={"tokens": context}
        )
        dataset: Any = rows.batch(batch)
        if settings.workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # Grain's workers read one of absl's, which fails before parsing
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(settings.workers, settings.buffer))
        iterator = iter(dataset)
        try:
            return time_batches(iterator, skipped, batches)
        finally:
            iterator.close()

    return step


def decode(dtype: str, record: bytes) -> dict[str, np.ndarray]:
    """Return the `tokens` of a record, int32 [n]."""
    return {"tokens": np.frombuffer(record, dtype).astype(np.int32)}


def time_batches(iterator: Any, skipped: int, batches: int) -> float:
    """Return the seconds that `batches` batches take, after `skipped` others."""
    return sum(time_calls(lambda: next(iterator), batches, skipped).seconds)


def datasets_preparing(lines: Path, tokenizer: Path, workers: int, fast: bool, scratch: Path) -> Callable[[], float]:
    """Make a function that loads JSONL, maps a tokenizer over it, and returns the seconds of the map only.

    It uses `encode_batch_fast`, without offsets, if it is `fast`; each call has new caches in the folder `scratch`.
    """
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    datasets: Any = importlib.import_module("datasets")  # an optional dependency, unknown to the type checker
    tokenizers: Any = importlib.import_module("tokenizers")
    datasets.disable_progress_bars()
    loaded = tokenizers.Tokenizer.from_file(str(tokenizer))
    encode = loaded.encode_batch_fast if fast else loaded.encode_batch

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [encoding.ids for encoding in encode(rows["text"], add_special_tokens=False)]}

    def step() -> float:
        with tempfile.TemporaryDirectory(dir=scratch) as cache:
            dataset = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=cache)
            settings = {"num_proc": workers, "remove_columns": dataset.column_names}
            return elapsed(lambda: dataset.map(tokenize, batched=True, **settings))

    return step
