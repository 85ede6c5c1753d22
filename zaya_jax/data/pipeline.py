"""Batches for training and for the held-out loss."""

import asyncio
import json
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from zaya_jax.config import Config
from zaya_jax.data.plan import RunPlan, heldout_phase, packer_of, plan_run
from zaya_jax.data.rows import Row
from zaya_jax.data.sources import Prepared
from zaya_jax.data.stream import Position
from zaya_jax.errors import InputError

Batch = dict[str, np.ndarray]  # of `rows.Packing.row`, each array [b, s]

_STATE_FILE = "data.json"
_THREADS = 2
_PREFETCHED = 4  # batches


class _Folder(Protocol):
    """A folder that Orbax is making, in the background."""

    async def await_creation(self) -> Path: ...


class TrainBatches(Iterator[Batch]):
    """The training batches, by a Grain iterator that reads ahead in threads or in processes.

    Resumable: its state is how many rows the run has been given, which no number of processes, workers or threads
    and no batch size changes. It is a `StatefulCheckpointable` of Orbax v1. Grain's own iterators (elastic or not)
    are not used as such, since they give each process every n-th row, so that a batch's rows would move with the
    number of processes, and save a file named after that number, which another number cannot restore.
    """

    def __init__(
        self, plan: RunPlan, global_batch: int, *, workers: int = 0, process_index: int = 0, process_count: int = 1
    ) -> None:
        """Start at the first row; see `train_batches`."""
        self.plan = plan
        self._global_batch, self._workers = global_batch, workers
        share = global_batch // process_count
        self._part = range(process_index * share, (process_index + 1) * share)  # of each batch's rows
        self._writes_state = process_index == 0  # it is the same in every process
        self._refused: InputError | None = None
        self._sequences = 0  # given so far, by all processes together
        self._batches = self._start()

    def __next__(self) -> Batch:
        """The next batch: this process's rows of it.

        Raises:
          InputError: the state that Orbax loaded is of other data, or a document is damaged.
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
        """Stop the threads and processes."""
        self.close()

    def close(self) -> None:
        """Stop the threads and processes; no batch follows."""
        self._batches.close()

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs to go on from here; JSON can hold it."""
        return {"sequences": self._sequences, "order": self.plan.order}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `get_state` was called, in this process or another.

        Raises:
          InputError: the state is of other data.
        """
        if state["order"] != self.plan.order:
            raise InputError(
                "The saved position is in other data: the content of a source or of the corpus, a key of data, "
                "model.vocab_size, seed or (with several phases) train.global_batch has changed since. Restore the "
                "old values, or start a new run_dir."
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

        batches = grain.MapDataset.source(_Batches(self.plan, self._sequences, self._global_batch, self._part))
        threads = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_PREFETCHED)
        dataset = batches.to_iter_dataset(threads)
        if self._workers:
            # Each worker makes every n-th batch whole, and they are taken in turn: their number changes nothing.
            _parse_absl_flags()
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(self._workers, _PREFETCHED))
        return iter(dataset)


class _Batches:
    """Item i: the rows `part` of the i-th batch from the row `start` on."""

    def __init__(self, plan: RunPlan, start: int, global_batch: int, part: range) -> None:
        self._plan, self._start, self._global_batch, self._part = plan, start, global_batch, part

    def __len__(self) -> int:
        return max(0, (len(self._plan) - self._start) // self._global_batch)

    def __getitem__(self, index: int) -> Batch:
        start = self._start + index * self._global_batch
        return _stack([self._plan[start + row] for row in self._part])


def train_batches(
    config: Config, prepared: Prepared, *, process_index: int = 0, process_count: int = 1
) -> TrainBatches:
    """The batches of a run, `train.steps` of them.

    Args:
      config: `data`, `train.steps`, `train.global_batch` and `seed` are used.
      prepared: the sources.
      process_index: of this process among those that share each batch.
      process_count: of those processes; the i-th gets the i-th contiguous part of the rows.

    Returns:
      An iterator over dicts of arrays [train.global_batch / process_count, s]; see `rows.Packing.row`.

    Raises:
      InputError: `train.global_batch` is not a multiple of `process_count`, or as `plan_run`.
    """
    global_batch = config.train.global_batch
    if global_batch % process_count:
        raise InputError(f"train.global_batch is {global_batch}, but must be a multiple of the {process_count} "
                         "processes that share it.")  # fmt: skip
    return TrainBatches(plan_run(config, prepared), global_batch, workers=config.data.workers,
                        process_index=process_index, process_count=process_count)  # fmt: skip


def heldout_batches(config: Config, prepared: Prepared, name: str, limit: int | None = None) -> Iterator[Batch]:
    """The held-out split of a source in its natural order, each document once.

    Args:
      config: `evaluation.batch` and `data.context` are used, and of the last phase that reads the source its
        packing and template.
      prepared: the sources.
      name: of the source.
      limit: the most batches given; by default all.

    Yields:
      Dicts of arrays [evaluation.batch, s], the last one filled up with rows that are all padding.
    """
    phase = heldout_phase(config, prepared.sources[name])
    if phase is None:
        return
    documents, manifest = prepared.open(name, "heldout", phase, config.data.context)
    if documents.lengths.max(initial=0) < 2:
        return
    packer = packer_of(config, prepared, phase, None)
    rows = packer.stage(documents, manifest.content, Position(), f"data.sources.{name}").first.rows
    for start in range(0, rows.per_epoch, config.evaluation.batch)[:limit]:
        batch = [rows.row(0, row) for row in range(start, min(start + config.evaluation.batch, rows.per_epoch))]
        padding = {key: np.zeros_like(array) for key, array in batch[0].items()}
        yield _stack(batch + [padding] * (config.evaluation.batch - len(batch)))


def heldout_bytes(config: Config, prepared: Prepared, name: str) -> tuple[int, int]:
    """Documents that `heldout_batches` reads of a source, and the UTF-8 bytes of the text whose loss they count."""
    phase = heldout_phase(config, prepared.sources[name])
    if phase is None:
        return 0, 0
    _, manifest = prepared.open(name, "heldout", phase, config.data.context)
    return manifest.heldout.documents - manifest.counts.get("dropped", 0), manifest.heldout.text_bytes


def _stack(rows: list[Row]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _parse_absl_flags() -> None:
    """Grain's workers read a flag of absl's, which refuses unless a main program has parsed the flags."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
