"""Prepare documents once: text or conversations to shards, by any number of tasks, resumable after a kill."""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.data.chat import Conversation, find_special, parse_conversation
from zaya_jax.data.convert import (
    EXAMPLES,
    Record,
    Skipped,
    UnitNote,
    convert,
    default_workers,
    read_note,
    remove_notes,
    save_lengths,
)
from zaya_jax.data.corpus import SPLITS, Split
from zaya_jax.data.manifest import (
    FORMAT,
    MANIFEST,
    PLAN,
    FileEntry,
    Kind,
    Manifest,
    ShardEntry,
    SplitEntry,
    content_of,
    describe_file,
    digest_of,
    read_manifest,
    write_manifest,
)
from zaya_jax.data.readers.inputs import list_units
from zaya_jax.data.readers.megatron import index_path
from zaya_jax.data.readers.read import read_unit
from zaya_jax.data.readers.unit import Bad, Document, Unit
from zaya_jax.data.shards import token_dtype
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer
from zaya_jax.errors import InputError
from zaya_jax.files import locked, partial_name, write_atomically

TOKENIZER = "tokenizer.json"

_AT_ONCE, _CHARACTERS_AT_ONCE = 256, 2**20  # documents encoded together, and their size


@dataclass(frozen=True)
class PrepareSettings:
    """What the documents of a prepared folder depend on, beside the inputs."""

    kind: Kind = "tokens"  # or 'chat': the field holds conversations
    field: str = "text"  # key of JSON lines, column of Parquet and Arrow files
    suffixes: tuple[str, ...] = (".txt",)  # of files that are text, each one document
    eot: str | None = None  # token that ends a document; where None, the one the tokenizer is known to have
    heldout: float = 0.01  # part of the documents held out, by a hash of their content

    def check(self) -> None:
        """Raise `InputError` where the held-out part cannot be."""
        if not 0 <= self.heldout < 1:
            raise InputError(f"--heldout is {self.heldout}, but must be at least 0 and below 1.")


def prepare(
    inputs: list[str],
    tokenizer: Path,
    output: Path,
    settings: PrepareSettings,
    *,
    max_bad: int = 0,
    workers: int | None = None,
    task: int = 0,
    tasks: int = 1,
    unit_bytes: int | None = None,
) -> Manifest | None:
    """Do one task's share of a preparation; where there is one task alone, finish it.

    Args:
      inputs: files and folders, see `list_units`.
      tokenizer: a `tokenizer.json`.
      output: a folder, new or of an earlier call that was interrupted.
      settings: the same for all tasks.
      max_bad: documents that cannot be used and that this task may leave out.
      workers: processes; by default one for each core.
      task: of this call, from 0.
      tasks: calls that share the work, each on any machine that sees `output`.
      unit_bytes: of input to a shard, see `list_units`.

    Returns:
      The manifest, if the folder is complete and merged: always where `tasks` is 1.

    Raises:
      InputError: an input, the tokenizer or a setting cannot be used, the folder holds another preparation, or
        too many documents cannot be used. What is done stays done.
      RunStopped: a process was killed.
    """
    settings.check()
    if max_bad < 0:
        raise InputError(f"--max-bad is {max_bad}, but must be at least 0.")
    if not 0 <= task < tasks:
        raise InputError(f"--task is {task}, but must be at least 0 and below --of ({tasks}).")
    if workers is not None and workers < 1:
        raise InputError(f"--workers is {workers}, but must be at least 1.")
    try:
        there = os.path.lexists(output) and not stat.S_ISDIR(output.stat().st_mode)
    except (OSError, ValueError) as error:
        raise InputError(f"--output is {str(output)!r}, which can be no folder: {error}.") from error
    if there:
        raise InputError(f"--output is {str(output)!r}, which is a file, but must be a folder.")
    loaded = load_tokenizer(tokenizer, settings.eot)
    units = list_units(inputs, suffixes=settings.suffixes, unit_bytes=unit_bytes)
    plan = _plan(inputs, units, tokenizer, settings, tasks)
    _refuse_foreign(output)
    _finished(output, plan)  # raises, before a lock is left in a folder that holds something else
    with locked(output / f".task-{task}.lock", "--output", wait=False):
        if _claim(output, tokenizer, plan):
            return merge(output)
        work = PrepareWork(output / TOKENIZER, plan["tokenizer"], loaded.eot_text, settings)
        numbers = range(task, len(units), tasks)
        label = "preparing" if tasks == 1 else f"preparing task {task} of {tasks}"
        convert(output, units, numbers, work, sizes=[unit.bytes for unit in units],
                workers=workers or default_workers(), limit=max_bad, label=label,
                advice=f"--max-bad allows {max_bad}: mend them, or allow more to be left out")  # fmt: skip
        write_atomically(_done_path(output, task), json.dumps({"max_bad": max_bad}) + "\n")
    return merge(output) if tasks == 1 else None


def merge(output: Path) -> Manifest:
    """Finish a folder whose tasks are all done: write its manifest.

    Raises:
      InputError: `output` holds no preparation, or tasks are missing (the message names them).
    """
    if not output.is_dir():
        raise InputError(f"{output} is no folder; give the --output of prepare.")
    if not (output / PLAN).exists() and not (output / MANIFEST).exists():
        _read_plan(output)  # raises, before a lock is left in somebody else's folder
    with locked(output / ".merge.lock", "The prepared folder"):
        if not (output / MANIFEST).exists():
            missing = missing_tasks(output)
            plan = _read_plan(output)
            if missing:
                raise InputError(_incomplete(output, missing, plan["tasks"]))
            notes = [note for number in range(plan["units"]) if (note := read_note(output, number)) is not None]
            write_merged(output, notes, kind=plan["kind"], inputs=plan["digest"], eot=plan["eot"],
                         tokenizer=describe_file(output / TOKENIZER))  # fmt: skip
        manifest = read_manifest(output, remedy(output))
        # A kill may have come after the manifest, so this is done whoever wrote it.
        remove_notes(output)
        for leftover in (*output.glob("task-*.json"), output / PLAN, *output.glob(".task-*.lock"),
                         output / ".merge.lock"):  # fmt: skip
            leftover.unlink(missing_ok=True)
    return manifest


def write_merged(folder: Path, notes: list[UnitNote], *, kind: Kind, inputs: str, eot: str,
                 tokenizer: FileEntry) -> Manifest:  # fmt: skip
    """Write the lengths and the manifest of a folder whose shards are all there, from their notes in order."""
    splits: dict[Split, SplitEntry] = {split: _merge_split(folder, split, notes) for split in SPLITS}
    counts = Counter[str]()
    for note in notes:
        counts.update(note.skipped)
        counts.update(note.outcomes)
    examples = tuple(islice((example for note in notes for example in note.examples), EXAMPLES))
    dtype = token_dtype(load_tokenizer(folder / tokenizer.file, eot).vocab_size).str
    content = content_of(kind, dtype, eot, tokenizer, splits.values())
    manifest = Manifest(FORMAT, kind, inputs, content, dtype, tokenizer, eot, splits["train"], splits["heldout"],
                        dict(counts), examples)  # fmt: skip
    write_manifest(folder, manifest)
    return manifest


def missing_tasks(output: Path) -> list[int]:
    """The tasks of a preparation that is not merged which have units to do, or never came to their end.

    One that left out more documents than it may has no unit to do, and yet must not be merged.

    Raises:
      InputError: `output` holds no preparation.
    """
    plan = _read_plan(output)
    undone = {task for task in range(plan["tasks"]) if not _done_path(output, task).exists()}
    return sorted(undone | {n % plan["tasks"] for n in range(plan["units"]) if read_note(output, n) is None})


def open_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder, whose files are there and as long as it says.

    Raises:
      InputError: there is none (the message names missing tasks), or a file is missing or has another size.
    """
    if not (folder / MANIFEST).is_file() and (folder / PLAN).is_file():
        raise InputError(_incomplete(folder, missing_tasks(folder), _read_plan(folder)["tasks"]))
    if not folder.is_dir():
        raise InputError(f"The folder {folder} of prepared data is not there; make it with "
                         "python -m zaya_jax.data prepare.")  # fmt: skip
    return read_manifest(folder, remedy(folder))


def remedy(folder: Path) -> str:
    """What to do about a damaged prepared folder."""
    return f"Bring the file back, or prepare the data anew in another folder than {folder}."


@dataclass(frozen=True)
class PrepareWork:
    """A unit of input to records."""

    tokenizer: Path
    digest: str  # of the tokenizer's file
    eot: str
    settings: PrepareSettings

    def __call__(self, unit: Unit) -> Iterator[Record | Skipped]:
        """The unit's records, in the order of its documents."""
        tokenizer = _tokenizer(self.tokenizer, self.digest, self.eot)
        make = self._conversations if self.settings.kind == "chat" else self._texts
        for some in _some_at_once(read_unit(unit, field=self.settings.field)):
            yield from make(tokenizer, some)

    def _texts(self, tokenizer: Tokenizer, found: list[Document | Bad]) -> Iterator[Record | Skipped]:
        """Each document as the token that ends one, its tokens, and that token again."""
        dtype = token_dtype(tokenizer.vocab_size)
        encoded = tokenizer.encode_all(one.value for one in found if isinstance(one, Document)
                                       and isinstance(one.value, str))  # fmt: skip
        for one in found:
            if isinstance(one, Bad):
                yield _skipped(one, one.reason, one.detail)
            elif isinstance(one.value, str):
                tokens, text = next(encoded), one.value.encode()
                if tokenizer.eot in tokens:  # of a tokenizer that does not mark it as special
                    yield _skipped(one, "end inside", f"its text makes the token {tokenizer.eot_text!r}")
                    continue
                yield self._record(one, text, np.array([tokenizer.eot, *tokens, tokenizer.eot], dtype), len(text))
            elif isinstance(one.value, np.ndarray):
                ids = one.value[:-1] if one.value[-1] == tokenizer.eot else one.value
                if len(ids) == 0 or not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
                    yield _skipped(one, "wrong tokens", "a document needs tokens, each at least 0 and below "
                                   f"{tokenizer.vocab_size}, which is where the tokenizer ends")  # fmt: skip
                    continue
                if (ids == tokenizer.eot).any():
                    yield _skipped(one, "end inside", f"it holds the token {tokenizer.eot_text!r} before its end")
                    continue
                tokens = np.array([tokenizer.eot, *ids.tolist(), tokenizer.eot], dtype)
                yield self._record(one, ids.tobytes(), tokens, len(tokenizer.decode(ids.tolist()).encode()))
            else:
                yield _skipped(one, "wrong type", f"the field {self.settings.field!r} holds no text; --chat reads "
                               "conversations")  # fmt: skip

    def _record(self, one: Document, content: bytes, tokens: np.ndarray, text_bytes: int) -> Record:
        return Record(self._split(content), tokens.tobytes(), len(tokens), text_bytes, one.bytes)

    def _conversations(self, tokenizer: Tokenizer, found: list[Document | Bad]) -> Iterator[Record | Skipped]:
        """Each conversation as JSON; its tokens are those of what was said, since a template adds its own later."""
        for one in found:
            if isinstance(one, Bad):
                yield _skipped(one, one.reason, one.detail)
                continue
            try:
                conversation = parse_conversation(one.value)
            except ValueError as error:
                yield _skipped(one, "no conversation", str(error))
                continue
            special = find_special(conversation, tokenizer.specials)
            if special is not None:
                yield _skipped(one, "special token", f"it holds the text {special!r}, which would end a turn")
                continue
            said = spoken(conversation)
            try:
                data = json.dumps(conversation, ensure_ascii=False, sort_keys=True, allow_nan=False).encode()
            except (TypeError, ValueError) as error:  # a date of a table, half of a surrogate pair
                yield _skipped(one, "no conversation", f"it holds what JSON cannot: {error}")
                continue
            tokens = sum(map(len, tokenizer.encode_all(said)))
            yield Record(self._split(data), data, tokens, sum(len(text.encode()) for text in said), one.bytes)

    def _split(self, content: bytes) -> Split:
        """By content, so that two copies of a document are on the same side."""
        digest = hashlib.blake2b(content, digest_size=8).digest()
        return "heldout" if int.from_bytes(digest, "little") < self.settings.heldout * 2**64 else "train"


def spoken(conversation: Conversation) -> list[str]:
    """The texts of a conversation: contents and reasoning."""
    return [text for message in conversation for text in (message.get("reasoning", ""), message["content"]) if text]


def _skipped(one: Document | Bad, reason: str, detail: str) -> Skipped:
    return Skipped(f"{one.file}:{one.line}", reason, detail)


def _some_at_once(found: Iterable[Document | Bad]) -> Iterator[list[Document | Bad]]:
    """The documents in groups that are worth encoding together and are not too much for memory."""
    some, size = [], 0
    for one in found:
        some.append(one)
        size += len(one.value) if isinstance(one, Document) and isinstance(one.value, str) else 1
        if len(some) == _AT_ONCE or size >= _CHARACTERS_AT_ONCE:
            yield some
            some, size = [], 0
    yield some


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, digest: str, eot: str) -> Tokenizer:
    del digest  # another file may come to lie at the path
    return load_tokenizer(path, eot)


def _plan(inputs: list[str], units: list[Unit], tokenizer: Path, settings: PrepareSettings,
          tasks: int) -> dict[str, Any]:  # fmt: skip
    """What two calls must agree on to work in the same folder."""
    stats = [[file, Path(file).stat().st_size, Path(file).stat().st_mtime_ns]
             for file in dict.fromkeys(file for unit in units for file in _files(unit))]  # fmt: skip
    chosen = dataclasses.asdict(settings) | {"suffixes": list(settings.suffixes)}
    entry, eot = describe_file(tokenizer), load_tokenizer(tokenizer, settings.eot).eot_text
    return {
        "format": FORMAT,
        **chosen,
        "eot": eot,
        "tokenizer": entry.digest,
        "inputs": list(map(str, inputs)),
        "files": digest_of(stats),
        "units": len(units),
        "tasks": tasks,
        "digest": digest_of(chosen, eot, entry.digest, [list(unit) for unit in units], stats),
    }


def _files(unit: Unit) -> tuple[str, ...]:
    """All that a unit is read from."""
    return (*unit.files, *map(index_path, unit.files)) if unit.format == "megatron" else unit.files


def _finished(output: Path, plan: dict[str, Any]) -> bool:
    """Whether this preparation is finished already."""
    if not (output / MANIFEST).exists():
        return False
    if read_manifest(output, remedy(output)).inputs != plan["digest"]:
        raise InputError(f"The folder {output} holds data prepared of other inputs or settings; choose another "
                         "--output.")  # fmt: skip
    return True


def _claim(output: Path, tokenizer: Path, plan: dict[str, Any]) -> bool:
    """Make the folder this preparation's, or see that it is; whether it is finished already."""
    with locked(output / ".merge.lock", "--output"):
        if _finished(output, plan):
            return True
        if (output / PLAN).exists():
            there = _read_plan(output)
            for key, value in plan.items():
                if there.get(key) != value:
                    of_files = key in ("files", "digest")
                    how = "a name, a size or a time has changed" if of_files else f"{there.get(key)!r}, now {value!r}"
                    raise InputError(f"The folder {output} holds an unfinished preparation with other {key}: {how}. Go "
                                     "on with the same, or choose another --output.")  # fmt: skip
            return False
        part = partial_name(output / TOKENIZER)
        try:
            shutil.copyfile(tokenizer, part)
            part.replace(output / TOKENIZER)
        finally:
            part.unlink(missing_ok=True)
        write_atomically(output / PLAN, json.dumps(plan, indent=1) + "\n")
    return False


def _read_plan(output: Path) -> dict[str, Any]:
    try:
        plan = json.loads((output / PLAN).read_text(encoding="utf-8"))
        if plan["format"] != FORMAT:
            raise ValueError(f"it is of format {plan['format']}, but this version reads {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"The folder {output} holds no preparation: {output / PLAN} cannot be read ({error})."
        ) from error
    return plan


def _incomplete(folder: Path, missing: list[int], tasks: int) -> str:
    if not missing:
        return f"The prepared folder {folder} is not merged; run python -m zaya_jax.data merge {folder}."
    if tasks == 1:
        return f"The prepared folder {folder} is not complete; run the same prepare command again to finish it."
    return (f"The prepared folder {folder} is not complete: of its {tasks} tasks, {', '.join(map(str, missing))} "
            f"{'is' if len(missing) == 1 else 'are'} missing. Run them with --task, then merge.")  # fmt: skip


def _refuse_foreign(output: Path) -> None:
    """Raise `InputError` for a folder of something else, in which nothing may be overwritten."""
    if (output / PLAN).exists() or (output / MANIFEST).exists() or not output.is_dir():
        return
    ours = {TOKENIZER}  # written before the plan
    foreign = [
        path.name for path in output.iterdir() if path.name not in ours and path.suffix not in (".lock", ".partial")
    ]
    if foreign:
        raise InputError(f"The folder {output} holds other files, such as {min(foreign)!r}; choose a new or an empty "
                         "--output.")  # fmt: skip


def _done_path(output: Path, task: int) -> Path:
    return output / f"task-{task}.json"


def _merge_split(folder: Path, split: Split, notes: list[UnitNote]) -> SplitEntry:
    parts = [np.load(folder / note.lengths[split].file, allow_pickle=False) for note in notes if split in note.lengths]
    lengths = np.concatenate([np.zeros(0, np.int64), *parts])
    entry = save_lengths(folder / f"{split}-lengths.npy", lengths)
    shards: tuple[ShardEntry, ...] = tuple(note.shards[split] for note in notes if split in note.shards)
    text_bytes = sum(note.text_bytes[split] for note in notes)
    return SplitEntry(shards, entry, len(lengths), int(lengths.sum()), text_bytes)


def summary(folder: Path, manifest: Manifest) -> str:
    """A few lines to print about a prepared folder."""
    lines = [f"{folder} is complete."]
    for split in SPLITS:
        entry = manifest.split(split)
        lines.append(f"  {split}: {entry.documents:,} documents, {entry.tokens:,} tokens, {entry.text_bytes:,} bytes, "
                     f"{len(entry.shards)} shards")  # fmt: skip
    lines += [f"  left out, {reason}: {count:,}" for reason, count in manifest.counts.items()]
    lines += [f"    {example}" for example in manifest.examples]
    return "\n".join(lines)
