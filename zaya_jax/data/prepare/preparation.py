"""Tokenize documents and write them as shards, in one or several tasks. A killed task resumes where it stopped."""

import dataclasses
import json
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.config.checks import counted, require, require_path, shown
from zaya_jax.data.prepare.document_encoder import PrepareSettings, PrepareWork
from zaya_jax.data.prepare.manifest import (
    FORMAT,
    MANIFEST,
    SPLITS,
    Kind,
    Manifest,
    Split,
    SplitEntry,
    describe_file,
    json_digest,
    read_manifest,
)
from zaya_jax.data.prepare.shard_conversion import Conversion, UnitNote, examples, read_note, remove_notes, save_lengths
from zaya_jax.data.prepare.shards import token_dtype
from zaya_jax.data.readers.documents import Unit
from zaya_jax.data.readers.inputs import list_units, load_format
from zaya_jax.data.special_tokens import TOKENIZER_FILES, SpecialTokens, find_special_tokens
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.errors import InputError, printable
from zaya_jax.run.files import locked, nearest_path, read_file, write_atomically
from zaya_jax.run.writing import remove

TOKENIZER = "tokenizer.json"
PLAN = "plan.json"  # settings of a preparation in progress
# Key of the plan → what the user sets or knows it by.
_OPTIONS = {"units": "number of input units", "kind": "--chat", "inputs": "--input", "tasks": "--of"}
_OPTIONS |= {"eos": "eos_token in tokenizer_config.json"}


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
    isolated: bool = False,
) -> Manifest | None:
    """Prepare this task's share of the inputs; the arguments are those of `python -m zaya_jax.data prepare`.

    `inputs` and `unit_bytes` are as in `list_units`. `isolated` uses a separate process even for a single worker, so
    that a crash does not end this one. Return the manifest, or None if there are several tasks, which are not merged.

    `InputError` if an input, the tokenizer or a setting cannot be used, the folder contains another preparation, or
    more than `max_bad` documents are unusable. `RunStopped` if worker processes end while they read.
    """
    require(0 <= settings.heldout <= 1, "--heldout", settings.heldout, "between 0 and 1")  # also rejects NaN
    require(max_bad >= 0, "--max-bad", max_bad, "at least 0")
    require(0 <= task < tasks, "--task", task, f"at least 0 and below --of ({tasks})")
    require(workers is None or workers >= 1, "--workers", workers, "at least 1")
    require_path("--output", str(output))
    require(os.path.isdir(output) or not os.path.lexists(output), "--output", str(output), "a folder, or a new path")
    special = find_special_tokens(tokenizer, chat=settings.kind == "chat", eot=settings.eot, bos=settings.bos)
    unread = Counter[str]()
    units = list_units(inputs, suffixes=settings.suffixes, unit_bytes=unit_bytes, unread=unread)
    plan = _plan(inputs, units, tokenizer, settings, special, tasks)
    _refuse_foreign(output)
    sizes, advice = [unit.bytes for unit in units], "Fix them, or skip up to {count} with --max-bad {count}."
    conversion = Conversion(output, units, sizes, advice, range(task, len(units), tasks), workers, max_bad, isolated)
    of_task = "" if tasks == 1 else f" task {task} of {tasks}"
    # Check everything before the first file is written, so that a rejected input leaves nothing behind.
    if not _finished(output, plan):
        _check_plan(output, plan)
        check = PrepareWork(tokenizer, plan["tokenizer"], special, settings).check
        if not conversion.check(check, f"checking{of_task}") and tasks == 1:
            raise InputError(f"The inputs contain no document that can be used: {', '.join(map(str, inputs))}.")
    with locked(output / f".task-{task}.lock", "--output", wait=False):
        if _claim(output, tokenizer, plan, unread):
            return merge(output)
        work = PrepareWork(output / TOKENIZER, plan["tokenizer"], special, settings)
        conversion.convert(work, f"preparing{of_task}")
        write_atomically(_done_path(output, task), json.dumps({"max_bad": max_bad}) + "\n")
    return merge(output) if tasks == 1 else None


def merge(output: Path) -> Manifest:
    """Write and return the manifest of a prepared folder; `InputError` if it is none, or tasks are missing."""
    if not output.is_dir():
        raise InputError(f"{output} is not a folder; pass the --output folder of prepare.")
    if not (output / PLAN).exists() and not (output / MANIFEST).exists():
        _read_plan(output)  # raises before a lock file is written to an unrelated folder
    with locked(output / ".merge.lock", "The prepared folder"):
        if not (output / MANIFEST).exists():
            if missing_tasks(output):
                raise InputError(_incomplete(output))
            plan = _read_plan(output)
            if not any(note and note.shards for note in (read_note(output, n) for n in range(plan["units"]))):
                raise InputError(f"The inputs of {output} contain no document that can be used.")
            special, unread = SpecialTokens(plan["eot"], plan["bos"], plan["eos"]), plan.get("unread_files")
            write_merged(
                output, plan["units"], kind=plan["kind"], inputs=plan["digest"], special=special, unread=unread
            )
        manifest = read_manifest(output, remedy(output))
        # Also remove what a process left that was killed after it had written the manifest.
        remove_notes(output)
        leftovers = [*output.glob("task-*.json"), output / PLAN, *output.glob(".task-*.lock"), output / ".merge.lock"]
        for leftover in leftovers:
            remove(leftover)
    return manifest


def write_merged(
    folder: Path,
    units: int,
    *,
    kind: Kind,
    inputs: str,
    special: SpecialTokens,
    content: str | None = None,
    unread: dict[str, int] | None = None,
) -> Manifest:
    """Write the lengths and the manifest of a folder after all of its `units` units are converted.

    `content`, the digest of the documents, is computed from the shards if it is None; for the others see `Manifest`.
    """
    notes = [note for number in range(units) if (note := read_note(folder, number)) is not None]
    files = (folder / name for name in (TOKENIZER, *TOKENIZER_FILES))
    tokenizer, *extras = (describe_file(path) for path in files if path.exists())
    splits: dict[Split, SplitEntry] = {split: _merge_split(folder, split, notes) for split in SPLITS}
    counts, keys = Counter[str](), Counter[str]()
    for note in notes:
        counts.update(note.skipped)
        counts.update(note.outcomes)
        keys.update(note.unread)
    dtype = token_dtype(load_tokenizer(folder / tokenizer.file, special.eot).vocab_size).str
    shards = [[*([e.digest, e.documents] for e in s.shards), [s.lengths.digest]] for s in splits.values()]
    content = content or json_digest(kind, dtype, list(special), tokenizer.digest, shards)
    shown = tuple(examples(notes))
    found: dict[str, Any] = {**splits, "counts": dict(counts), "examples": shown, "extras": tuple(extras)}
    found |= {**special._asdict(), "unread_files": unread or {}, "unread_keys": dict(keys.most_common())}
    manifest = Manifest(FORMAT, kind, inputs, content, dtype, tokenizer, **found)
    write_atomically(folder / MANIFEST, json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")
    return manifest


def missing_tasks(output: Path) -> list[int]:
    """Return the unfinished tasks, such as one that skipped too many documents; `InputError` without a preparation."""
    plan = _read_plan(output)
    undone = {task for task in range(plan["tasks"]) if not _done_path(output, task).exists()}
    return sorted(undone | {n % plan["tasks"] for n in range(plan["units"]) if read_note(output, n) is None})


def open_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared folder, see `read_manifest`; `InputError` names missing tasks."""
    if not (folder / MANIFEST).is_file() and (folder / PLAN).is_file():
        raise InputError(_incomplete(folder))
    if not folder.is_dir():
        prepare = "python -m zaya_jax.data prepare"
        problem = f"The prepared folder {folder} does not exist.{nearest_path(folder) or f' Create it with {prepare}.'}"
        if folder.exists():
            command = f"{prepare} --input {shlex.quote(str(folder))} --tokenizer TOKENIZER --output FOLDER"
            problem = f"{folder} is a file, not a prepared folder. Run {command}, and name that FOLDER."
        raise InputError(problem)
    return read_manifest(folder, remedy(folder))


def remedy(folder: Path) -> str:
    """The advice for a damaged prepared folder."""
    return f"Restore the file, or prepare the data again in a folder other than {folder}."


def _plan(
    inputs: list[str], units: list[Unit], tokenizer: Path, settings: PrepareSettings, special: SpecialTokens, tasks: int
) -> dict[str, Any]:
    """Return the settings and inputs, which must be the same in every call that writes to a folder."""
    paths: list[str] = []
    for unit in units:
        companions = load_format(unit.format).companions
        paths += [*unit.files, *(path for file in unit.files for path in companions(file))]
    stats = [[path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns] for path in dict.fromkeys(paths)]
    chosen = dataclasses.asdict(settings) | {"suffixes": list(settings.suffixes)}
    # The detected token counts, not the option; and only if it differs from `eot`, so that older digests still match.
    del chosen["bos"]
    entry, eot = describe_file(tokenizer), special.eot
    others = [] if special == (eot, eot, eot) else [special.bos, special.eos]
    digest = json_digest(chosen, eot, entry.digest, [list(unit) for unit in units], stats, *others)
    plan = {
        "format": FORMAT,
        **chosen,
        **special._asdict(),
        "tokenizer": entry.digest,
        "inputs": list(map(str, inputs)),
    }
    return plan | {"files": json_digest(stats), "units": len(units), "tasks": tasks, "digest": digest}


def _finished(output: Path, plan: dict[str, Any]) -> bool:
    """Return whether this preparation is finished. Raise `InputError` if the folder has another finished one."""
    if not (output / MANIFEST).exists():
        return False
    if read_manifest(output, remedy(output)).inputs == plan["digest"]:
        return True
    other = "data prepared from different inputs or settings, or by another version"
    raise InputError(f"The folder {output} contains {other}; choose another --output.")


def _claim(output: Path, tokenizer: Path, plan: dict[str, Any], unread: dict[str, int]) -> bool:
    """Claim the folder for this preparation, and return whether the preparation is already finished."""
    with locked(output / ".merge.lock", "--output"):
        if _finished(output, plan):
            return True
        if not _check_plan(output, plan):
            write_atomically(output / TOKENIZER, tokenizer.read_bytes())
            for path in map(tokenizer.with_name, TOKENIZER_FILES):
                if path.is_file():
                    write_atomically(output / path.name, path.read_bytes())
            write_atomically(output / PLAN, json.dumps(plan | {"unread_files": unread}, indent=1) + "\n")
    return False


def _check_plan(output: Path, plan: dict[str, Any]) -> bool:
    """Return whether the folder contains this preparation, unfinished. Raise `InputError` if it contains another."""
    if not (output / PLAN).exists():
        return False
    saved = _read_plan(output)
    if differing := [key for key, value in plan.items() if saved.get(key) != value]:
        key = differing[0]
        if key in ("files", "digest"):
            difference = "other input files, or of another version: a name, size, time or format has changed"
        else:
            option = _OPTIONS.get(key, f"--{key}")
            difference = f"a different {option}: {shown(saved.get(key))}, now {shown(plan[key])}"
        advice = "Rerun the original command, or choose another --output."
        raise InputError(f"The folder {output} contains an unfinished preparation with {difference}. {advice}")
    return True


def _read_plan(output: Path) -> dict[str, Any]:
    path = output / PLAN
    try:
        plan = json.loads(read_file(path))
        if plan["format"] != FORMAT:
            raise ValueError(f"it has format {plan['format']}, but this version reads format {FORMAT}")
        return {"bos": plan["eot"], "eos": plan["eot"]} | plan  # absent in older plans, where `eot` served as both
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"The folder {output} contains no preparation: {path} cannot be read ({error}).") from error


def _incomplete(folder: Path) -> str:
    missing, tasks = missing_tasks(folder), _read_plan(folder)["tasks"]
    if not missing:
        return f"The prepared folder {folder} is not merged; run python -m zaya_jax.data merge {folder}."
    if tasks == 1:
        return f"The prepared folder {folder} is incomplete; rerun the prepare command to finish it."
    return (
        f"The prepared folder {folder} is incomplete: {len(missing)} of {tasks} tasks missing: "
        f"{', '.join(map(str, missing))}. Run each of them with --task, then merge."
    )


def _refuse_foreign(output: Path) -> None:
    """Raise `InputError` if the folder contains unrelated files, so that none is overwritten."""
    if (output / PLAN).exists() or (output / MANIFEST).exists() or not output.is_dir():
        return
    ours = {TOKENIZER, *TOKENIZER_FILES}  # written before the plan
    foreign = [p.name for p in output.iterdir() if p.name not in ours and p.suffix not in (".lock", ".partial")]
    if foreign:
        named = f"other files, such as {min(foreign)!r}"
        raise InputError(f"The folder {output} contains {named}; choose a new or empty --output.")


def _done_path(output: Path, task: int) -> Path:
    return output / f"task-{task}.json"


def _merge_split(folder: Path, split: Split, notes: list[UnitNote]) -> SplitEntry:
    parts = [np.load(folder / note.lengths[split].file, allow_pickle=False) for note in notes if split in note.lengths]
    lengths = np.concatenate([np.zeros(0, np.int64), *parts])
    entry = save_lengths(folder / f"{split}-lengths.npy", lengths)
    shards = tuple(note.shards[split] for note in notes if split in note.shards)
    text_bytes = sum(note.text_bytes.get(split, 0) for note in notes)
    lost_bytes = sum(note.lost_bytes.get(split, 0) for note in notes)
    return SplitEntry(shards, entry, len(lengths), int(lengths.sum()), text_bytes, lost_bytes)


def summary(folder: Path, manifest: Manifest) -> str:
    """Describe a prepared folder in a few lines."""
    lines = [f"{folder} is complete."]
    for split in SPLITS:
        entry = manifest.split(split)
        size = f"{counted(entry.text_bytes, 'byte')}, {counted(len(entry.shards), 'shard')}"
        lines.append(f"  {split}: {counted(entry.documents, 'document')}, {counted(entry.tokens, 'token')}, {size}")
        if entry.lost_bytes:
            lines.append(
                f"  {split}: {counted(entry.lost_bytes, 'byte')} are lost, since the tokenizer has no token for them, "
                "or strips or changes them. Bits per byte do not count them; a byte-level tokenizer or one with byte "
                "fallback keeps all text."
            )
    if manifest.heldout.documents == 0 and (count := manifest.train.documents):
        fraction = min(0.5, 5 / count)  # none of 10 or more documents in less than 1 % of cases
        more = f"To hold out about {count * fraction:.0f}, prepare into another --output with --heldout {fraction:.1g}."
        advice = more if count > 1 else "Split the text: each file, or line of a .jsonl file, is one document."
        lines.append(f"  No document is held out for evaluation. {advice}")
    if manifest.train.documents == 0 and manifest.heldout.documents:
        advice = "prepare into another --output with a smaller --heldout, or from more documents."
        lines.append(f"  No document is left to train on. To train, {advice}")
    keys = ", ".join(f"{key!r} ({count:,})" for key, count in manifest.unread_keys.items())
    lines += [f"  keys not read: {keys:.2000}"] if keys else []
    lines += [f"  skipped, {reason}: {count:,}" for reason, count in manifest.counts.items()]
    lines += [f"    {example}" for example in manifest.examples]
    return "\n".join(map(printable, lines))
