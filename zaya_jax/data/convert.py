"""Convert units of input to shards on all cores, resumably.

The output of a unit depends only on the unit, not on the number of processes. A note that describes the output is
written last, so interrupted work resumes by skipping units that have a note.
"""

import dataclasses
import functools
import io
import json
import multiprocessing
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from zaya_jax.config.checks import list_counts
from zaya_jax.data.corpus import SPLITS, Split
from zaya_jax.data.manifest import FileEntry, ShardEntry, describe_file
from zaya_jax.data.shards import ShardWriter
from zaya_jax.data.workers import Job, Worker, end_workers, run_in_workers
from zaya_jax.errors import InputError
from zaya_jax.run.files import read_file, write_atomically
from zaya_jax.run.progress import WorkProgress
from zaya_jax.run.writing import PARTIAL, remove

EXAMPLES = 20  # maximum number of skipped documents that the manifest lists

_REPORT_EVERY = 1 << 20  # bytes of input between progress reports


class Record(NamedTuple):
    """A document, serialized as a record."""

    split: Split
    data: bytes
    tokens: int
    text_bytes: int
    read: int = 0  # bytes of input, for progress
    outcome: str | None = None  # category to count
    lost: int = 0  # bytes of text that the tokens do not decode to
    unread: Sequence[str] = ()  # keys of the input that are not read, see `conversation.unread_keys`


class Skipped(NamedTuple):
    """A document that cannot be used."""

    where: str  # file and line
    reason: str  # category to count
    detail: str


T = TypeVar("T", Record, int)
Work = Callable[[Any], Iterable[Record | Skipped]]  # unit → records in order; picklable
Check = Callable[[Any], Iterable[int | Skipped]]  # unit → bytes of each usable document


_USABLE = "usable"  # outcome of a document that was checked


@dataclass(frozen=True)
class UnitNote:
    """The result of a finished unit."""

    shards: dict[Split, ShardEntry]  # without empty ones
    lengths: dict[Split, FileEntry]  # .npy, int64 [documents]: tokens of each; same splits
    text_bytes: dict[Split, int]
    skipped: dict[str, int]  # reason → number of unusable documents
    outcomes: dict[str, int]  # outcome → number of other documents
    examples: list[str]
    lost_bytes: dict[Split, int] = dataclasses.field(default_factory=dict)
    unread: dict[str, int] = dataclasses.field(default_factory=dict)  # key that is not read → number of its uses


@dataclass(frozen=True)
class Conversion:
    """Units of input and how to process them."""

    folder: Path  # output: `train-i.arrayrecord`, `heldout-i.arrayrecord` and the note `unit-i.json` of unit i
    units: Sequence[Any]  # all, in order
    sizes: Sequence[int]  # bytes of each unit, for progress
    advice: str  # what to do if too many documents are unusable; `{count}` is replaced by their number
    numbers: Sequence[int] | None = None  # units to process now, except those with a note; None: all
    workers: int = 1  # processes; with 1, this process does the work unless `isolated`
    limit: int = 0  # maximum number of skipped documents over `numbers`
    isolated: bool = False  # whether to use a separate process even for a single worker
    idle: list[Worker] = dataclasses.field(default_factory=list)  # from `check` to `convert`

    def check(self, check: Check, label: str) -> int:
        """Check the documents of all units without writing anything; `label` titles the progress bar.

        Returns:
          The number of documents that can be used.

        Raises:
          InputError: more than `limit` documents are unusable.
          RunStopped: worker processes end while they read.
        """
        notes = self._run(functools.partial(_check_unit, check), label)
        return sum(
            note.outcomes.get(_USABLE, 0) + sum(shard.documents for shard in note.shards.values()) for note in notes
        )

    def convert(self, work: Work, label: str) -> None:
        """Convert the units to shards in `folder`; `label` titles the progress bar.

        Raises:
          InputError: more than `limit` documents are unusable (raised after all units), or raised by `work`.
          RunStopped: worker processes end while they read, or a shard cannot be written.
        """
        self._run(functools.partial(_convert_unit, work), label)
        end_workers(self.idle)

    def _run(self, convert: Callable[[Job, Callable[[int], None]], UnitNote], label: str) -> list[UnitNote]:
        refuse_in_worker()
        numbers = range(len(self.units)) if self.numbers is None else self.numbers
        notes = {number: note for number in numbers if (note := read_note(self.folder, number)) is not None}
        jobs = [Job(self.folder, n, self.units[n], self.sizes[n]) for n in numbers if n not in notes]
        with WorkProgress(label, sum(job.size for job in jobs), log="data") as progress:
            if (count := min(self.workers, len(jobs))) > 1 or self.isolated:
                notes.update(run_in_workers(jobs, convert, count, self.limit, progress, self.idle))
            else:
                notes.update((job.number, convert(job, progress.add)) for job in jobs)
        skipped, examples = Counter[str](), []
        for _, note in sorted(notes.items()):
            skipped.update(note.skipped)
            examples += note.examples
        if skipped.total() > self.limit:
            raise InputError(_refusal(skipped, examples, self.limit, self.advice))
        return list(notes.values())


def read_note(folder: Path, number: int) -> UnitNote | None:
    """Read the note of a finished unit; None if it is unfinished or its files are missing."""
    try:
        tree = json.loads(read_file(_note_path(folder, number)))
        shards = {split: ShardEntry(**entry) for split, entry in tree.pop("shards").items()}
        lengths = {split: FileEntry(**entry) for split, entry in tree.pop("lengths").items()}
        files = [*shards.values(), *lengths.values()]
        whole = all((folder / file.file).stat().st_size == file.bytes for file in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return UnitNote(shards=shards, lengths=lengths, **tree) if whole else None


def remove_notes(folder: Path) -> None:
    """Remove the notes and lengths of units, which the manifest now contains, and files of killed processes."""
    for name in os.listdir(folder):
        if PARTIAL.fullmatch(name) or (name.startswith("unit-") and name.endswith((".json", ".npy"))):
            remove(folder / name)


def refuse_in_worker() -> None:
    """Raise `InputError` in a worker process that re-imports a script without a `__main__` guard."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(
            "A worker process tried to start workers while importing the main script; put the script's "
            "work under `if __name__ == '__main__':`."
        )


def _note_path(folder: Path, number: int) -> Path:
    return folder / f"unit-{number:06d}.json"


def _refusal(skipped: Counter[str], examples: Sequence[str], limit: int, advice: str) -> str:
    count = skipped.total()
    allowed = f", but at most {limit} may be skipped" if limit else ""
    listed = "".join(f"\n  {example}" for example in examples[:EXAMPLES])
    more = f"\n  and {count - EXAMPLES} more" if count > EXAMPLES else ""
    return (
        f"{count} document{'s' if count > 1 else ''} cannot be used ({list_counts(skipped)}){allowed}. "
        f"{advice.replace('{count}', str(count))}{listed}{more}"
    )


def _usable(
    results: Iterable[T | Skipped], job: Job, add: Callable[[int], None], skipped: Counter[str], examples: list[str]
) -> Iterator[T]:
    """Yield the results of a unit that are not skipped; count the others and report progress."""
    read = reported = 0
    for result in results:
        if isinstance(result, Skipped):
            skipped[result.reason] += 1
            if len(examples) < EXAMPLES:
                examples.append(f"{result.where}: {result.reason}: {result.detail}")
            continue
        yield result
        read += result.read if isinstance(result, Record) else result
        if read - reported >= _REPORT_EVERY:
            add(read - reported)
            reported = read
    add(job.size - reported)


def _check_unit(check: Check, job: Job, add: Callable[[int], None]) -> UnitNote:
    skipped, examples = Counter[str](), []
    usable = sum(1 for _ in _usable(check(job.unit), job, add, skipped, examples))
    return UnitNote({}, {}, {}, dict(skipped), {_USABLE: usable}, examples)


def _convert_unit(work: Work, job: Job, add: Callable[[int], None]) -> UnitNote:
    lengths = {split: array("q") for split in SPLITS}
    text_bytes, lost_bytes = (dict[Split, int].fromkeys(SPLITS, 0) for _ in range(2))
    skipped, outcomes, unread, examples = Counter[str](), Counter[str](), Counter[str](), []
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(job.folder / f"{split}-{job.number:06d}.arrayrecord"))
            for split in SPLITS
        }
        for record in _usable(work(job.unit), job, add, skipped, examples):
            writers[record.split].write(record.data)
            lengths[record.split].append(record.tokens)
            text_bytes[record.split] += record.text_bytes
            lost_bytes[record.split] += record.lost
            if record.unread:  # seldom, and an update takes a microsecond
                unread.update(record.unread)
            if record.outcome is not None:
                outcomes[record.outcome] += 1
        finished: dict[Split, ShardEntry | None] = {split: writers[split].finish() for split in SPLITS}
    shards: dict[Split, ShardEntry] = {split: entry for split, entry in finished.items() if entry is not None}
    saved: dict[Split, FileEntry] = {
        split: save_lengths(job.folder / f"unit-{job.number:06d}-{split}.npy", lengths[split]) for split in shards
    }
    note = UnitNote(shards, saved, text_bytes, dict(skipped), dict(outcomes), examples, lost_bytes, dict(unread))
    write_atomically(_note_path(job.folder, job.number), json.dumps(dataclasses.asdict(note)))
    return note


def save_lengths(path: Path, lengths: array | np.ndarray) -> FileEntry:
    """Write int64 [documents] as `.npy`, atomically."""
    content = io.BytesIO()
    np.save(content, np.asarray(lengths, np.int64), allow_pickle=False)  # to memory: its disk-full error has no errno
    write_atomically(path, content.getvalue())
    return describe_file(path)


def default_workers() -> int:
    """Return the number of cores that CPU affinity and the container's quota allow."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or no quota
        return cores
