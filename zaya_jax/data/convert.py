"""Units of input to shards, on all cores: each unit's shards appear whole, and a unit that is done stays done.

A unit's output depends on the unit alone, never on the number of processes, and a note written last says what it
holds. So work can be killed at any moment, shared among tasks, and started again: what is noted is passed over.
"""

import dataclasses
import functools
import io
import json
import multiprocessing
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from zaya_jax.data.corpus import SPLITS, Split
from zaya_jax.data.manifest import FileEntry, ShardEntry, describe_file
from zaya_jax.data.progress import WorkProgress
from zaya_jax.data.shards import ShardWriter
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.run.files import partial_name, write_atomically
from zaya_jax.run.signals import interrupts_kept_from_children

EXAMPLES = 20  # of what was left out, kept for the manifest

_TOLD_EVERY = 1 << 20  # bytes of input between two words on progress
_PARENT_LOOK = 0.2  # seconds


class Record(NamedTuple):
    """A document that becomes a record."""

    split: Split
    data: bytes
    tokens: int
    text_bytes: int
    read: int = 0  # bytes of input, for progress
    outcome: str | None = None  # counted


class Skipped(NamedTuple):
    """A document that cannot be used."""

    where: str  # file and line
    reason: str  # counted
    detail: str


class _Job(NamedTuple):
    """A unit to do."""

    folder: Path
    number: int
    unit: Any
    size: int  # bytes, for progress


class Work(Protocol):
    """What is done with a unit; picklable."""

    def __call__(self, unit: Any, /) -> Iterable[Record | Skipped]:
        """The unit's records, in order."""
        ...


@dataclass(frozen=True)
class UnitNote:
    """What a finished unit left."""

    shards: dict[Split, ShardEntry]  # without those that would be empty
    lengths: dict[Split, FileEntry]  # .npy, int64 [documents], tokens of each; of the same splits
    text_bytes: dict[Split, int]
    skipped: dict[str, int]  # documents that cannot be used, by reason
    outcomes: dict[str, int]  # of the others, by what was done to them
    examples: list[str]


class Survey(NamedTuple):
    """What was found in a unit that was read and not converted."""

    skipped: dict[str, int]
    examples: list[str]


_Do = Callable[[_Job, Callable[[int], None]], UnitNote | Survey]  # the second argument adds bytes to the progress


def survey(folder: Path, units: Sequence[Any], numbers: Sequence[int], check: Callable[[Any], Iterable[int | Skipped]],
           *, sizes: Sequence[int], workers: int, limit: int, advice: str, label: str) -> None:  # fmt: skip
    """Read units without writing anything, and refuse them where too many documents cannot be used.

    Args:
      folder: the notes in it say what units that are done have left out.
      units: as for `convert`, like all that follows but `check`.
      numbers: of those to read.
      check: gives for each document of a unit its bytes, or why it cannot be used.
      sizes: bytes of each unit.
      workers: processes.
      limit: documents that may be left out.
      advice: what to do where there are more.
      label: what the progress bar says.

    Raises:
      InputError: more documents cannot be used than `limit`; all are counted.
      RunStopped: a process was killed.
    """
    _run(folder, units, numbers, functools.partial(_survey, check), sizes=sizes, workers=workers, limit=limit,
         advice=advice, label=label)  # fmt: skip


def convert(folder: Path, units: Sequence[Any], numbers: Sequence[int], work: Work, *, sizes: Sequence[int],
            workers: int, limit: int, advice: str, label: str) -> None:  # fmt: skip
    """Turn units into shards of `folder`.

    Args:
      folder: gets for unit i `train-i.arrayrecord`, `heldout-i.arrayrecord` and the note `unit-i.json`.
      units: all there are, in order.
      numbers: of those to do now; the ones that have a note are passed over.
      work: what is done with each.
      sizes: bytes of each unit, for progress.
      workers: processes; with one the work is done in this one.
      limit: documents that may be left out, over `numbers`.
      advice: what to do where there are more, a sentence in which `{count}` stands for how many there are.
      label: what the progress bar says.

    Raises:
      InputError: more documents cannot be used than `limit` once all units are done, or one of the work's own.
      RunStopped: a process was killed, or a shard cannot be written.
    """
    _run(folder, units, numbers, functools.partial(_do, work), sizes=sizes, workers=workers, limit=limit,
         advice=advice, label=label)  # fmt: skip


def _run(folder: Path, units: Sequence[Any], numbers: Sequence[int], do: _Do, *, sizes: Sequence[int], workers: int,
         limit: int, advice: str, label: str) -> None:  # fmt: skip
    refuse_in_worker()
    results: dict[int, UnitNote | Survey] = {}
    results.update((number, note) for number in numbers if (note := read_note(folder, number)) is not None)
    todo = [number for number in numbers if number not in results]
    with WorkProgress(label, sum(sizes[number] for number in todo)) as progress:
        jobs = [_Job(folder, number, units[number], sizes[number]) for number in todo]
        results.update(_each(jobs, do, min(workers, len(todo)), progress))
    skipped, examples = Counter[str](), []
    for _, result in sorted(results.items()):
        skipped.update(result.skipped)
        examples += result.examples
    if skipped.total() > limit:
        raise InputError(_refusal(skipped, examples, limit, advice))


def read_note(folder: Path, number: int) -> UnitNote | None:
    """The note of a unit that is done and whose shards are there; otherwise None."""
    try:
        tree = json.loads(_note_path(folder, number).read_text(encoding="utf-8"))
        shards = {split: ShardEntry(**entry) for split, entry in tree.pop("shards").items()}
        lengths = {split: FileEntry(**entry) for split, entry in tree.pop("lengths").items()}
        files = [*shards.values(), *lengths.values()]
        whole = all((folder / file.file).stat().st_size == file.bytes for file in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return UnitNote(shards=shards, lengths=lengths, **tree) if whole else None


def remove_notes(folder: Path) -> None:
    """Remove notes and lengths of units, once the manifest says what they said, and what killed processes left."""
    for pattern in ("unit-*.json", "unit-*.npy", "*.partial"):
        for leftover in folder.glob(pattern):
            leftover.unlink(missing_ok=True)


def refuse_in_worker() -> None:
    """Raise `InputError` in a process that was started for such work, by a script that begins it unguarded."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError("Work in several processes was begun while a script is imported by one of them; put what the "
                         "script does under `if __name__ == '__main__':`.")  # fmt: skip


def _note_path(folder: Path, number: int) -> Path:
    return folder / f"unit-{number:06d}.json"


def _refusal(skipped: Counter[str], examples: Sequence[str], limit: int, advice: str) -> str:
    count = skipped.total()
    reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(skipped.items()))
    allowed = f", {limit} may be skipped" if limit else ""
    listed = "".join(f"\n  {example}" for example in examples[:EXAMPLES])
    more = f"\n  and {count - EXAMPLES} more" if count > EXAMPLES else ""
    return (f"{count} document{'s' if count > 1 else ''} cannot be used ({reasons}){allowed}. "
            f"{advice.replace('{count}', str(count))}{listed}{more}")  # fmt: skip


def _each(jobs: list[_Job], do: _Do, workers: int, progress: WorkProgress) -> Iterator[tuple[int, UnitNote | Survey]]:
    if workers <= 1:
        for job in jobs:
            yield job.number, do(job, progress.add)
        return
    # Not forked: this process may hold threads, as that of a training run does.
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(workers, context, _begin, (do, done, stop, os.getpid()))
    try:
        with interrupts_kept_from_children():
            futures = {pool.submit(_do_here, job): job.number for job in jobs}
        with progress.follow(lambda: done.value):
            for future in as_completed(futures):
                yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise RunStopped("A process that prepared data ended: it was killed, perhaps for want of memory, or a script "
                         "begins the work without `if __name__ == '__main__':`. The same command goes on from what is "
                         "done.") from error  # fmt: skip
    finally:
        stop.set()  # where this ends before its time, what is begun need not be finished
        pool.shutdown(cancel_futures=True)


_here: dict[str, Any] = {}  # what `_begin` gives to the `_do_here` of the same process


def _begin(do: _Do, done: Any, stop: Any, parent: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
    _here.update(do=do, done=done, stop=stop)
    end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """End this process soon after `parent`, the process that started it, is gone: nobody waits for its work then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_LOOK)
        os._exit(1)  # a successor of the parent may begin the work again

    threading.Thread(target=watch, daemon=True).start()


def _do_here(job: _Job) -> UnitNote | Survey:
    def add(count: int) -> None:
        if _here["stop"].is_set():
            raise RunStopped("The work was stopped.")
        with _here["done"].get_lock():
            _here["done"].value += count

    return _here["do"](job, add)


def _survey(check: Callable[[Any], Iterable[int | Skipped]], job: _Job, add: Callable[[int], None]) -> Survey:
    skipped, examples, read = Counter[str](), [], 0
    for found in check(job.unit):
        if isinstance(found, Skipped):
            _count(found, skipped, examples)
            continue
        read += found
        if read >= _TOLD_EVERY:
            add(read)
            read = 0
    add(read)
    return Survey(dict(skipped), examples)


def _count(found: Skipped, skipped: Counter[str], examples: list[str]) -> None:
    skipped[found.reason] += 1
    if len(examples) < EXAMPLES:
        examples.append(f"{found.where}: {found.reason}: {found.detail}")


def _do(work: Work, job: _Job, add: Callable[[int], None]) -> UnitNote:
    lengths = {split: array("q") for split in SPLITS}
    text_bytes: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    skipped, outcomes, examples, read, told = Counter[str](), Counter[str](), [], 0, 0
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(job.folder / f"{split}-{job.number:06d}.arrayrecord"))
            for split in SPLITS
        }
        for found in work(job.unit):
            if isinstance(found, Skipped):
                _count(found, skipped, examples)
                continue
            writers[found.split].write(found.data)
            lengths[found.split].append(found.tokens)
            text_bytes[found.split] += found.text_bytes
            if found.outcome is not None:
                outcomes[found.outcome] += 1
            read += found.read
            if read - told >= _TOLD_EVERY:
                add(read - told)
                told = read
        finished: dict[Split, ShardEntry | None] = {split: writers[split].finish() for split in SPLITS}
    shards: dict[Split, ShardEntry] = {split: entry for split, entry in finished.items() if entry is not None}
    saved: dict[Split, FileEntry] = {
        split: save_lengths(job.folder / f"unit-{job.number:06d}-{split}.npy", lengths[split]) for split in shards
    }
    note = UnitNote(shards, saved, text_bytes, dict(skipped), dict(outcomes), examples)
    write_atomically(_note_path(job.folder, job.number), json.dumps(dataclasses.asdict(note)))
    add(job.size - told)
    return note


def save_lengths(path: Path, lengths: array | np.ndarray) -> FileEntry:
    """Write int64 [documents] as `.npy`; it appears whole."""
    part, content = partial_name(path), io.BytesIO()
    np.save(content, np.asarray(lengths, np.int64), allow_pickle=False)  # whose error for a full disk has no errno
    try:
        with part.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return describe_file(path)


def default_workers() -> int:
    """The cores this process may use, by its affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such container, or no quota
        return cores
