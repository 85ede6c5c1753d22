"""Batches for training and held-out evaluation."""

import bisect
import dataclasses
import errno
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from zaya_jax.config import Config
from zaya_jax.config.stages import first_step, rows_before, stage_at, step_rows, total_steps
from zaya_jax.data.loading.document_parts import Tally, Use
from zaya_jax.data.loading.packed_rows import DocumentPart, Row
from zaya_jax.data.loading.run_plan import RunPlan, heldout_phase, make_packer, plan_run, trimmed_documents
from zaya_jax.data.loading.source_rows import PackedEpoch
from zaya_jax.data.loading.sources import Prepared
from zaya_jax.data.prepare.shards import Documents, Text
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.errors import InputError, RunStopped, WorkerLost
from zaya_jax.run.signals import interrupts_kept_from_children

Batch = dict[str, np.ndarray]  # of `packed_rows.Windows.row`, each array [b, s]
ProcessShare = tuple[int, int]  # (i, n): part i of n equal parts of each batch

_THREADS = 2
_PREFETCHED = 4  # batches
# Reading data writes nothing to disks: what runs out is what worker processes share.
_OF_WORKERS = {
    errno.ENOSPC: "space in /dev/shm (in a container, --shm-size)",
    errno.EMFILE: "open files (ulimit -n)",
    errno.ENOMEM: "memory",
    errno.EAGAIN: "processes (ulimit -u)",
}


class TrainBatches(Iterator[Batch], AbstractContextManager["TrainBatches"]):
    """Iterates over training batches with Grain, prefetching in threads or processes.

    The state is the number of rows read or skipped, which does not depend on processes, workers or the batch size.
    Grain's own iterator state does: it assigns every n-th row to a process.
    """

    def __init__(self, config: Config, plan: RunPlan, shares: Sequence[ProcessShare] = ()) -> None:
        self.plan = plan
        self._config = config
        self._shares = shares or [(0, 1)] * len(plan.phases)
        self._step = first_step(config)  # the next one
        self._batches = self._start()

    def __next__(self) -> Batch:
        """Return this process's rows of the next batch.

        `InputError` if a document is damaged, `WorkerLost` if a data worker process was killed, `RunStopped` if
        /dev/shm, file descriptors or memory do not suffice for the worker processes.
        """
        workers = self._config.data.workers
        try:
            with nullcontext() if self._started else interrupts_kept_from_children():  # which Grain starts now
                self._started = True
                batch = next(self._batches)
        except OSError as error:
            if not workers or error.errno not in _OF_WORKERS:
                raise
            raise RunStopped(
                f"The {workers} worker processes of the data need more {_OF_WORKERS[error.errno]} than this process "
                "may use. Raise the limit, or lower data.workers (0 reads data in the training process)."
            ) from error
        except RuntimeError as error:
            if "Worker process was terminated" not in str(error):  # Grain has no exception class for this
                raise
            code = str(error).partition("exit code ")[2].partition(".")[0].replace("-", "signal ")
            raise WorkerLost(
                f"A data worker process was killed ({code}), probably because memory ran out. Lower data.workers "
                f"(now {workers}; 0 reads data in the training process), or give the run more memory."
            ) from error
        self._step += 1
        return batch

    def close(self) -> None:
        """Stop the threads and processes. No batch can be read afterwards."""
        self._batches.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_state(self) -> dict[str, Any]:
        """Return the position as JSON, for `set_state`."""
        return self._state(rows_before(self._config, self._step))

    def _state(self, sequences: int) -> dict[str, Any]:
        started = [phase.order for phase in self.plan.phases if phase.first_row < sequences]
        return {"sequences": sequences, "order": started}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume at the position of `get_state`, from any process; `InputError` if it belongs to other data."""
        sequences = int(state["sequences"])
        if state["order"] != self._state(sequences)["order"]:
            raise InputError(
                "The saved position belongs to other data. Since the checkpoint, one of these has changed: a source or "
                "the corpus, a key of data or of a phase that has started, model.vocab_size, seed, or the version of "
                "zaya_jax. Restore the old values, or start a new run_dir."
            )
        # Over all possible steps, because the run may end before the position.
        step = bisect.bisect_left(range(2**31), sequences, key=lambda step: rows_before(self._config, step))
        if rows_before(self._config, step) != sequences:
            why = "the batch size of a phase that has started was changed. Restore it, or start a new run_dir."
            raise InputError(f"The saved position, after {sequences} rows, is not a whole number of steps: {why}")
        self._batches.close()
        self._step = step
        self._batches = self._start()

    def _start(self) -> Any:
        workers = self._config.data.workers
        self._started = not workers
        import grain  # here, because it imports jax, which data preparation must not

        batches = grain.MapDataset.source(_Batches(self._config, self.plan, self._step, self._shares))
        threads = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_PREFETCHED)
        dataset = batches.to_iter_dataset(threads)
        if workers:
            # Each worker builds every n-th batch, so their number does not change the batches.
            from absl import flags

            if not flags.FLAGS.is_parsed():  # Grain's workers read one, which fails otherwise
                flags.FLAGS.mark_as_parsed()
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(workers, _PREFETCHED))
        return iter(dataset)


class _Batches:
    """Item i: one process's rows of the i-th batch from the step `first` on."""

    def __init__(self, config: Config, plan: RunPlan, first: int, shares: Sequence[ProcessShare]) -> None:
        self._config, self._plan, self._first, self._shares = config, plan, first, shares

    def __len__(self) -> int:
        return max(0, total_steps(self._config) - self._first)

    def __getitem__(self, index: int) -> Batch:
        step = self._first + index
        rows = step_rows(self._config, step)
        share, count = self._shares[stage_at(self._config, step).phase]
        size = len(rows) // count
        return _stack([self._plan[row] for row in rows[share * size : (share + 1) * size]])


def train_batches(config: Config, prepared: Prepared, *, shares: Sequence[ProcessShare] = ()) -> TrainBatches:
    """Return the batches of a run, one per step: arrays [sequences per step / n, s], see `packed_rows.Windows.row`.

    `shares` has (i, n) for each phase: this process reads the i-th of n contiguous parts of each batch; empty means
    all. `PhaseSpec.batch_shape` checks that the sequences of a step are a multiple of n. Raises like `plan_run`.
    """
    return TrainBatches(config, plan_run(config, prepared), shares)


@dataclasses.dataclass(frozen=True)
class HeldoutText:
    """The part of a source's held-out text that the held-out loss covers."""

    tokenizer: Tokenizer
    documents: Documents
    packed: PackedEpoch
    batches: list[range]  # of rows
    batch_size: int  # rows of a batch, of which the last one may have fewer
    all_bytes: int  # UTF-8 bytes of all documents
    trimmed: int  # number of conversations

    def read(self) -> Iterator[Batch]:
        """Yield the batches [evaluation.batch_size, s], of which the last is filled with padding rows."""
        for indices in self.batches:
            batch = [self.packed.rows.row(0, row) for row in indices]
            padding = {key: np.zeros_like(array) for key, array in batch[0].items()}
            yield _stack(batch + [padding] * (self.batch_size - len(batch)))

    @functools.cached_property
    def loaded(self) -> list[Batch]:
        """The batches, in memory."""
        return list(self.read())

    @functools.cached_property
    def parts(self) -> list[DocumentPart]:
        """The parts of documents in the rows of all batches."""
        return [part for indices in self.batches for row in indices for part in self.packed.rows.parts(0, row)]

    @functools.cached_property
    def text_bytes(self) -> int:
        """UTF-8 bytes covered by the loss."""
        return sum(_part_bytes(self.tokenizer, self.documents[part.document], part) for part in self.parts)

    @functools.cached_property
    def use(self) -> Use:
        """The use of the documents."""
        lengths, parts = self.documents.lengths, self.parts
        covered = {part.document for part in parts if part.stop - part.start > 1}
        tally = Tally(len(lengths))
        tally.add(lengths, self.packed.left_out, np.array(sorted(covered), np.int64), self.trimmed)
        predicted = sum(part.stop - part.start - 1 for part in parts)
        return tally.use(predicted / max(int(np.maximum(lengths - 1, 0).sum()), 1))


def heldout_text(
    config: Config, prepared: Prepared, name: str, limit: int | None = None, phase: int | None = None
) -> HeldoutText | None:
    """Open a source's held-out split, in its natural order and each document once; None if no phase reads the source.

    `limit`, if any, is the maximum number of batches, evenly spaced over the split; `phase` is the index of the trained
    phase, or None (last).
    """
    source = prepared.sources[name]
    settings = heldout_phase(config, source, len(config.phases) - 1 if phase is None else phase)
    if settings is None:
        return None
    documents, manifest = prepared.open(name, "heldout", settings, config.context_for(settings))
    packed = make_packer(config, prepared, settings, None).pack(documents)
    size, rows = config.evaluation.batch_size, range(packed.rows.per_epoch)
    batches = [rows[start : start + size] for start in rows[::size]]
    count = len(batches) if limit is None else min(limit, len(batches))
    chosen = [batches[index * len(batches) // count] for index in range(count)]
    counts = manifest.counts if source.manifest.kind == "chat" else {}
    trimmed = trimmed_documents(packed.counts, counts)
    return HeldoutText(prepared.tokenizer, documents, packed, chosen, size, manifest.heldout.text_bytes, trimmed)


def _part_bytes(tokenizer: Tokenizer, text: Text, part: DocumentPart) -> int:
    """Count the UTF-8 bytes of a part's tokens that the loss covers."""
    tokens = text.tokens[part.start : part.stop].tolist()
    if text.loss_mask is not None:
        covered = itertools.compress(tokens[1:], text.loss_mask[part.start + 1 : part.stop])
        return len(tokenizer.decode(list(covered)).encode())
    # Decode after the preceding token, because some tokenizers drop a leading space.
    before = tokens[:1] if part.start or not tokenizer.prefix else []
    inside = before + tokens[1 : -1 if tokens[-1] == tokenizer.eot else None]
    return len(tokenizer.decode(inside).encode()) - len(tokenizer.decode(before).encode())


def _stack(rows: list[Row]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
