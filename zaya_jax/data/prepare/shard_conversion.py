"""Convert units of input to shards on all cores, resumably.

The output of a unit depends only on the unit, not on the number of processes. A note that describes the output is
written last, so interrupted work resumes by skipping units that have a note.
"""

import functools
import io
import itertools
import json
import multiprocessing
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from zaya_jax.config.checks import counted, list_counts
from zaya_jax.data.prepare.manifest import SPLITS, FileEntry, ShardEntry, Split, describe_file
from zaya_jax.data.prepare.shards import ShardWriter
from zaya_jax.data.prepare.workers import Job, Worker, end_workers, run_in_workers
from zaya_jax.data.readers.documents import BadDocument
from zaya_jax.errors import InputError
from zaya_jax.run.files import read_file, write_atomically
from zaya_jax.run.progress import WorkProgress
from zaya_jax.run.writing import PARTIAL, remove

_MOST_EXAMPLES = 20  # problems that messages and the manifest list, and further lines of each

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


T = TypeVar("T", Record, int)
Work = Callable[[Any], Iterable[Record | BadDocument]]  # unit → records in order; picklable
Check = Callable[[Any], Iterable[int | BadDocument]]  # unit → bytes of each usable document

_USABLE = "usable"  # outcome of a document that was checked


@dataclass(frozen=True)
class UnitNote:
    """The result of a finished unit."""

    shards: dict[Split, ShardEntry] = field(default_factory=dict)  # without empty ones
    lengths: dict[Split, FileEntry] = field(default_factory=dict)  # .npy, int64 [documents]: tokens of each
    text_bytes: Counter[Split] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)  # reason → number of unusable documents
    outcomes: Counter[str] = field(default_factory=Counter)  # outcome → number of other documents
    examples: list[str] = field(default_factory=list)  # the first document with each problem of a file
    alike: dict[str, list[int]] = field(default_factory=dict)  # example → number of others, lines of the first of them
    lost_bytes: Counter[Split] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)  # key that is not read → number of its uses


@dataclass(frozen=True)
class Conversion:
    """Units of input and how to process them."""

    folder: Path  # output: `train-i.arrayrecord`, `heldout-i.arrayrecord` and the note `unit-i.json` of unit i
    units: Sequence[Any]  # all, in order
    sizes: Sequence[int]  # bytes of each unit, for progress
    advice: str  # what to do if too many documents are unusable; `{count}` is replaced by their number
    numbers: Sequence[int] | None = None  # units to process now, except those with a note; None: all
    workers: int | None = 1  # processes; with 1, this process does the work unless `isolated`; None: one per core
    limit: int = 0  # maximum number of skipped documents over `numbers`
    isolated: bool = False  # whether to use a separate process even for a single worker
    idle: list[Worker] = field(default_factory=list)  # from `check` to `convert`

    def check(self, check: Check, label: str) -> int:
        """Return how many documents of all units can be used, without writing anything; see `convert`."""
        return _count_usable(self._run(functools.partial(_check_unit, check), label))

    def convert(self, work: Work, label: str) -> None:
        """Convert the units to shards in `folder`; `label` titles the progress bar.

        `InputError` if more than `limit` documents are unusable, after all units, or raised by `work`. `RunStopped` if
        worker processes end while they read, or a shard cannot be written.
        """
        self._run(functools.partial(_convert_unit, work), label)
        end_workers(self.idle)

    def _run(self, convert: Callable[[Job, Callable[[int], None]], UnitNote], label: str) -> list[UnitNote]:
        refuse_in_worker()
        numbers = range(len(self.units)) if self.numbers is None else self.numbers
        notes = {number: note for number in numbers if (note := read_note(self.folder, number)) is not None}
        jobs = [Job(self.folder, n, self.units[n], self.sizes[n]) for n in numbers if n not in notes]
        with WorkProgress(label, sum(job.size for job in jobs), log="data") as progress:
            if (count := min(self.workers or _cores(), len(jobs))) > 1 or self.isolated:
                notes.update(run_in_workers(jobs, convert, count, self.limit, progress, self.idle))
            else:
                notes.update((job.number, convert(job, progress.add)) for job in jobs)
        skipped, done = Counter[str](), [note for _, note in sorted(notes.items())]
        for note in done:
            skipped.update(note.skipped)
        if (count := skipped.total()) > self.limit:
            allowed = f", but at most {self.limit} may be skipped" if self.limit else ""
            shown = examples(done)
            lines = "".join(f"\n  {example}" for example in shown)
            lines += f"\n  and {rest} more" if (rest := count - sum(shown.values())) else ""
            # Skipping all documents would leave nothing; other tasks may have usable ones.
            is_all = len(numbers) == len(self.units) and not _count_usable(done) and "{count}" in self.advice
            advice = "Fix them: no document can be used." if is_all else self.advice.replace("{count}", str(count))
            problem = f"{counted(count, 'document')} cannot be used ({list_counts(skipped)}){allowed}"
            raise InputError(f"{problem}. {advice}{lines}")
        return done


def examples(notes: Iterable[UnitNote]) -> dict[str, int]:
    """Return a sentence for each of the first problems → the number of documents that have it."""
    sentences = dict[str, int]()
    for example, (more, *lines) in ((each, note.alike.get(each, [0])) for note in notes for each in note.examples):
        rest = f" and {more - len(lines):,} more" if more > len(lines) else ""
        sentences[example + (f" (also at {', '.join(map(str, lines))}{rest})" if more else "")] = 1 + more
    return dict(itertools.islice(sentences.items(), _MOST_EXAMPLES))


def _count_usable(notes: list[UnitNote]) -> int:
    return sum(note.outcomes.get(_USABLE, 0) + sum(s.documents for s in note.shards.values()) for note in notes)


def read_note(folder: Path, number: int) -> UnitNote | None:
    """Read the note of a finished unit; None if it is unfinished or its files are missing."""
    try:
        tree = json.loads(read_file(_note_path(folder, number)))
        for key, entry in (("shards", ShardEntry), ("lengths", FileEntry)):
            tree[key] = {split: entry(**values) for split, values in tree[key].items()}
        note = UnitNote(**tree)
        files = [*note.shards.values(), *note.lengths.values()]
        return note if all((folder / file.file).stat().st_size == file.bytes for file in files) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def remove_notes(folder: Path) -> None:
    """Remove the notes and lengths of units, which the manifest now contains, and files of killed processes."""
    for name in os.listdir(folder):
        if PARTIAL.fullmatch(name) or (name.startswith("unit-") and name.endswith((".json", ".npy"))):
            remove(folder / name)


def refuse_in_worker() -> None:
    """Raise `InputError` in a worker process that re-imports a script without a `__main__` guard."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        advice = "put the script's work under `if __name__ == '__main__':`."
        raise InputError(f"A worker process tried to start workers while importing the main script; {advice}")


def _note_path(folder: Path, number: int) -> Path:
    return folder / f"unit-{number:06d}.json"


def _usable(results: Iterable[T | BadDocument], job: Job, add: Callable[[int], None], note: UnitNote) -> Iterator[T]:
    """Yield the usable results of a unit; note the others and report progress."""
    read, reported, first = 0, 0, dict[tuple[str, str], str]()
    for result in results:
        if isinstance(result, BadDocument):
            note.skipped[result.reason] += 1
            key = result.file, f"{result.reason}: {result.detail}"
            if key in first:
                more, *lines = note.alike.get(first[key], [0])
                note.alike[first[key]] = [more + 1, *[*lines, result.line][:_MOST_EXAMPLES]]
            elif len(note.examples) < _MOST_EXAMPLES:
                first[key] = f"{result.file}:{result.line}: {key[1]}"
                note.examples.append(first[key])
            continue
        yield result
        read += result.read if isinstance(result, Record) else result
        if read - reported >= _REPORT_EVERY:
            add(read - reported)
            reported = read
    add(job.size - reported)


def _check_unit(check: Check, job: Job, add: Callable[[int], None]) -> UnitNote:
    note = UnitNote()
    note.outcomes[_USABLE] = sum(1 for _ in _usable(check(job.unit), job, add, note))
    return note


def _convert_unit(work: Work, job: Job, add: Callable[[int], None]) -> UnitNote:
    note, lengths = UnitNote(), {split: array("q") for split in SPLITS}
    with ExitStack() as stack:
        paths = {split: job.folder / f"{split}-{job.number:06d}.arrayrecord" for split in SPLITS}
        writers = {split: stack.enter_context(ShardWriter(path)) for split, path in paths.items()}
        for record in _usable(work(job.unit), job, add, note):
            writers[record.split].write(record.data)
            lengths[record.split].append(record.tokens)
            note.text_bytes[record.split] += record.text_bytes
            note.lost_bytes[record.split] += record.lost
            if record.unread:  # seldom, and an update takes a microsecond
                note.unread.update(record.unread)
            if record.outcome is not None:
                note.outcomes[record.outcome] += 1
        note.shards.update((split, entry) for split in SPLITS if (entry := writers[split].finish()) is not None)
    for split in note.shards:
        note.lengths[split] = save_lengths(job.folder / f"unit-{job.number:06d}-{split}.npy", lengths[split])
    write_atomically(_note_path(job.folder, job.number), json.dumps(vars(note), default=vars))
    return note


def save_lengths(path: Path, lengths: array | np.ndarray) -> FileEntry:
    """Write int64 [documents] as `.npy`, atomically."""
    content = io.BytesIO()
    np.save(content, np.asarray(lengths, np.int64), allow_pickle=False)  # to memory: its disk-full error has no errno
    write_atomically(path, content.getvalue())
    return describe_file(path)


def _cores() -> int:
    """Return the number of cores that CPU affinity and the container's quota allow."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or no quota
        return cores
