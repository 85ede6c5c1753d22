"""Batches for training and for the held-out loss."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from zaya_jax.config.schema import Config
from zaya_jax.data.prepare import Prepared, prepare
from zaya_jax.data.windows import Windows
from zaya_jax.errors import InputError

__all__ = ["Batch", "Prepared", "TrainBatches", "heldout_batches", "prepare", "train_batches"]

Batch = dict[str, np.ndarray]  # of `Windows.__getitem__`, each array [b, s]

_STATE_FILE = "data.json"
_THREADS = 2
_PREFETCHED = 4  # batches


class _Folder(Protocol):
    """A folder that Orbax is making, in the background."""

    async def await_creation(self) -> Path: ...


class TrainBatches(Iterator[Batch]):
    """The training batches, by a Grain iterator that reads ahead in threads.

    Resumable: its state is how many sequences the run has been given, which no number of processes, threads or
    batch size changes. It is a `StatefulCheckpointable` of Orbax v1. Grain's own iterators (elastic or not) are
    not used as such, since they give each process every n-th row, so that a batch's rows would move with the
    number of processes, and save a file named after that number, which another number cannot restore.
    """

    def __init__(
        self, windows: Windows, global_batch: int, order: str, *, process_index: int = 0, process_count: int = 1
    ) -> None:
        """Start at the first window; see `train_batches`. `order` names what the windows' order depends on."""
        self._windows = windows
        self._global_batch = global_batch
        self._order = order
        share = global_batch // process_count
        self._part = range(process_index * share, (process_index + 1) * share)  # of each batch's rows
        self._writes_state = process_index == 0  # it is the same in every process
        self._refused: InputError | None = None
        self._sequences = 0  # given so far, by all processes together
        self._batches = self._start()

    def __next__(self) -> Batch:
        """The next batch: this process's rows of it.

        Raises:
          InputError: the state that Orbax loaded is of another corpus, seed or context.
        """
        self.check()
        batch = next(self._batches)
        self._sequences += self._global_batch
        return batch

    def check(self) -> None:
        """Raise the `InputError` of a state that Orbax loaded and that is of other data."""
        if self._refused is not None:
            raise self._refused

    def __enter__(self) -> Self:
        """Close at the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the threads."""
        self.close()

    def close(self) -> None:
        """Stop the threads; no batch follows."""
        self._batches.close()

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs to go on from here; JSON can hold it."""
        return {"sequences": self._sequences, "order": self._order}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `get_state` was called, in this process or another.

        Raises:
          InputError: the state is of another corpus, seed or context.
        """
        if state["order"] != self._order:
            raise InputError(
                "The saved position is in other data: the corpus, data.suffixes, data.heldout_fraction, data.context, "
                "model.vocab_size or seed has changed since. Restore the old values, or start a new run_dir."
            )
        self._batches.close()
        self._refused = None
        self._sequences = int(state["sequences"])
        self._batches = self._start()

    async def save(self, directory: _Folder) -> Awaitable[None]:
        """Orbax: take the state now, and return what writes it into `directory` in the background."""
        text = json.dumps(self.get_state())

        async def write() -> None:
            folder = await directory.await_creation()
            if self._writes_state:
                await asyncio.to_thread((folder / _STATE_FILE).write_text, text)

        return write()

    async def load(self, directory: Path) -> Awaitable[None]:
        """Orbax: return what reads the state from `directory` and sets it, in the background.

        A state of other data is refused by the next `__next__`.
        """

        async def read() -> None:
            state = json.loads(await asyncio.to_thread((directory / _STATE_FILE).read_text))
            try:
                self.set_state(state)
            except InputError as error:  # from here Orbax would make it an error about a missing handler
                self._refused = error

        return read()

    def _start(self) -> Any:
        import grain  # here, since it imports jax, which preparing data must not

        rows = _Rows(self._windows, self._sequences, self._global_batch, self._part)
        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_PREFETCHED)
        return iter(grain.MapDataset.source(rows).to_iter_dataset(options))


class _Rows:
    """Item i: the rows `part` of the i-th batch from the window `start` on."""

    def __init__(self, windows: Windows, start: int, global_batch: int, part: range) -> None:
        self._windows, self._start, self._global_batch, self._part = windows, start, global_batch, part

    def __len__(self) -> int:
        return max(0, (len(self._windows) - self._start) // self._global_batch)

    def __getitem__(self, index: int) -> Batch:
        start = self._start + index * self._global_batch
        return _stack([self._windows[start + row] for row in self._part])


def train_batches(
    config: Config, prepared: Prepared, *, process_index: int = 0, process_count: int = 1
) -> TrainBatches:
    """The batches of a run, `train.steps` of them.

    Args:
      config: `train.steps`, `train.global_batch`, `data.context` and `seed` are used.
      prepared: the corpus.
      process_index: of this process among those that share each batch.
      process_count: of those processes; the i-th gets the i-th contiguous part of the rows.

    Returns:
      An iterator over dicts of arrays [train.global_batch / process_count, s]; see `Windows.__getitem__`.

    Raises:
      InputError: `train.global_batch` is not a multiple of `process_count`.
    """
    global_batch = config.train.global_batch
    if global_batch % process_count:
        raise InputError(f"train.global_batch is {global_batch}, but must be a multiple of the {process_count} "
                         "processes that share it.")  # fmt: skip
    windows = Windows(
        prepared.open("train"), config.data.context, seed=config.seed, count=config.train.steps * global_batch
    )
    settings = json.dumps([prepared.digest, config.data.context, config.seed])
    order = hashlib.blake2b(settings.encode(), digest_size=12).hexdigest()
    return TrainBatches(windows, global_batch, order, process_index=process_index, process_count=process_count)


def heldout_batches(config: Config, prepared: Prepared, limit: int | None = None) -> Iterator[Batch]:
    """The held-out split in its natural order, each of its bytes once.

    Args:
      config: `evaluation.batch` and `data.context` are used.
      prepared: the corpus.
      limit: the most batches given; by default all.

    Yields:
      Dicts of arrays [evaluation.batch, s], the last one filled up with rows that are all padding.
    """
    windows = Windows(prepared.open("heldout"), config.data.context, seed=None)
    starts = range(0, len(windows), config.evaluation.batch)
    for start in starts[:limit]:
        rows = [windows[row] for row in range(start, min(start + config.evaluation.batch, len(windows)))]
        padding = {name: np.zeros_like(array) for name, array in rows[0].items()}
        yield _stack(rows + [padding] * (config.evaluation.batch - len(rows)))


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
