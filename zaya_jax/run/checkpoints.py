"""The folder `checkpoints/` of a run.

Names in it:
- `100`: the finished checkpoint of step 100
- `100.g3`: unfinished, being saved by the holder of fencing token 3
- `100.g3.orbax-checkpoint-tmp…`: unfinished, being written by Orbax
- `100.corrupt-…`: quarantined because it was damaged
- `100.stale-…`: quarantined because a superseded process saved it, or the run was rolled back to an older one
- `100.deleted`: being removed

A file `PINNED` in a checkpoint protects it from removal. A file `VERIFIED` records that all its checksums matched.
"""

import math
import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import InputError, did_you_mean
from zaya_jax.run import writing
from zaya_jax.run.fencing import is_current, read_token
from zaya_jax.run.files import expanded, read_json, require_existing
from zaya_jax.run.manifest import Damaged, Manifest, has_manifest, list_names, read_manifest, try_read
from zaya_jax.run.signals import warn

CHECKPOINTS = "checkpoints"  # folder in a run folder
PHASES = "phases.json"  # file in a run folder: step of the last checkpoint of each finished phase
PINNED = "PINNED"
VERIFIED = "VERIFIED"
_LEFT_OVER = re.compile(r"\d+(\.g\d+(\..*tmp.*)?|\.deleted|\.partial)|GENERATION\..*\.partial")


class Checkpoint(NamedTuple):
    """A checkpoint's metadata, read without its arrays."""

    step: int
    heldout_loss: float | None = None  # nats/token; None if this step was not evaluated
    is_pinned: bool = False  # never removed
    is_verified: bool = False  # all checksums matched when it was last read
    is_superseded: bool = False  # saved by a process that another had already replaced; never restored
    phase: str = "-"
    tokens: int = 0  # seen by the run so far
    size: int = 0  # bytes of all files
    problem: str = ""  # begins with "damaged: " or "unreadable: "; empty if it is neither
    manifest: Manifest | None = None  # None if there is a problem

    @property
    def is_usable(self) -> bool:
        """True if it can be restored, as far as its metadata shows."""
        return not self.problem and not self.is_superseded


def list_checkpoints(folder: Path, *, check_files: bool = True) -> list[Checkpoint]:
    """List the checkpoints by step, damaged ones included; `check_files` compares the sizes of their files."""
    token = read_token(folder)

    def describe(step: int) -> Checkpoint:
        path = folder / str(step)
        try:
            manifest = read_manifest(path, check_files=check_files)
        except InputError as error:
            return Checkpoint(step, problem=f"{'damaged' if isinstance(error, Damaged) else 'unreadable'}: {error}")
        metadata, pinned = manifest.metadata, (path / PINNED).exists()
        verified = manifest.read_back or (path / VERIFIED).exists()
        superseded = token is not None and not token.accepts(step, manifest.fencing_token)
        loss, phase, tokens = map(metadata.get, ("heldout_loss", "phase", "tokens_seen"), (None, "-", 0))
        size = sum(manifest.files.values())
        return Checkpoint(step, loss, pinned, verified, superseded, phase, tokens, size, manifest=manifest)

    return [describe(step) for step in named_steps(folder)]


def usable_checkpoints(folder: Path) -> list[Checkpoint]:
    """List the checkpoints that can be restored according to their manifests; retention removes only these."""
    return [checkpoint for checkpoint in list_checkpoints(folder, check_files=False) if checkpoint.is_usable]


def suggest_older(folder: Path) -> str:
    """Return ' Try an older one: …' for the newest usable checkpoint that is older than `folder`, if there is one."""
    older = [each.step for each in usable_checkpoints(folder.parent) if each.step < int(folder.name)]
    return f" Try an older one: {folder.with_name(str(older[-1]))}." if older else ""


def has_checkpoint(folder: Path) -> bool:
    """Return whether `folder` contains a checkpoint, intact or quarantined as corrupt."""
    return any(name.isdecimal() or ".corrupt-" in name for name in list_names(folder))


def saved_steps(folder: Path) -> list[int]:
    """List the steps of finished checkpoints, intact or not."""
    return [step for step in named_steps(folder) if has_manifest(folder / str(step))]


def named_steps(folder: Path) -> list[int]:
    """List the steps of folders with a checkpoint's final name."""
    return sorted(int(name) for name in list_names(folder) if name.isdecimal())


def clean(folder: Path) -> list[Path]:
    """Remove leftovers of unfinished saves, and return those that stay; no save may be in progress."""
    left = [folder / name for name in list_names(folder) if _LEFT_OVER.fullmatch(name)]
    for path in left:
        writing.remove(path, ignore_errors=True)
    return [path for path in sorted(left) if os.path.lexists(path)]


def remove(folder: Path, step: int) -> None:
    """Remove a checkpoint; a rename hides it before its files are deleted."""
    gone = folder / f"{step}.deleted"
    writing.remove(gone, ignore_errors=True)
    writing.rename(folder / str(step), gone)
    writing.remove(gone, ignore_errors=True)


def quarantine(folder: Path, step: int, reason: str) -> Path:
    """Rename a checkpoint that must not be restored, and return its new path; `reason` is 'corrupt' or 'stale'."""
    base = f"{step}.{reason}-{time.strftime('%Y%m%dT%H%M%S')}"
    paths = (folder / f"{base}{'' if n == 0 else f'-{n}'}" for n in range(1000))
    target = next(path for path in paths if not path.exists())
    writing.rename(folder / str(step), target)
    return target


def current_tokens(folder: Path, newest: int | None, say: Callable[[str], object]) -> dict[int, int]:
    """Return step → fencing token of the current checkpoints up to `newest`; quarantine the others as stale."""
    tokens, previous = {}, read_token(folder)
    for step in saved_steps(folder):
        try:
            manifest = try_read(folder / str(step))
        except InputError:  # it stays what it was, since it may be intact
            tokens[step] = 0 if previous is None else previous.accepted.get(step, previous.number)
            continue
        if manifest is None:
            continue  # restoring reports it
        if is_current(folder, step, manifest.fencing_token) and (newest is None or step <= newest):
            tokens[step] = manifest.fencing_token
        else:
            try:
                target = quarantine(folder, step, "stale")
            except FileNotFoundError:  # a superseded process has removed it meanwhile
                continue
            superseded = f"The checkpoint of step {step} was saved by superseded processes"
            say(f"{superseded}; it was quarantined as {target.name}.")
    return tokens


def quarantined(folder: Path) -> list[Path]:
    """List the quarantined checkpoints."""
    return sorted(folder / name for name in list_names(folder) if re.search(r"\.(corrupt|stale)-", name))


def phase_ends(run: Path) -> dict[str, int]:
    """Return the last step of each finished phase by name; InputError if `phases.json` is damaged."""
    path = run / PHASES
    ends = read_json(path) if path.exists() else {}
    if not isinstance(ends, dict) or not all(type(step) is int for step in ends.values()):
        raise InputError(f"{path} must be a JSON object from phase names to steps.")
    return ends


def checkpoint_folder(path: str, key: str = "init_from") -> Path:
    """Resolve a path to the folder of one checkpoint; `InputError` about the key or argument `key` if there is none.

    The path is RUN_DIR for the newest checkpoint of a run, RUN_DIR@PHASE for the last one of a phase, or the checkpoint
    itself, RUN_DIR/checkpoints/STEP.
    """
    run, at, phase = path.rpartition("@") if not os.path.exists(expanded(path)) else (path, "", "")
    named = expanded(run if at else path)
    require_existing(named, f"{key} is {path!r}, but {named}" if at else f"{key} is {path!r}, which")
    folder = named.resolve()
    if at:
        ends = phase_ends(folder)
        if phase not in ends:
            finished = f"{', '.join(ends) or 'none'}.{did_you_mean(phase, ends, f'{run}@')}"
            problem = f"{key} is {path!r}, but the finished phases of {folder} are: {finished}"
            raise InputError(f"{problem} Without @{phase} it is the newest checkpoint, also of an unfinished phase.")
        folder = folder / CHECKPOINTS / str(ends[phase])
    elif listed := list_checkpoints(folder / CHECKPOINTS, check_files=False):
        usable = next((each.step for each in reversed(listed) if each.is_usable), None)
        if usable is not None:
            if (newest := listed[-1]).problem:
                warn(f"Warning: the newest checkpoint is not used, {newest.problem} Step {usable} is used.")
            return folder / CHECKPOINTS / str(usable)
    if folder.parent.name == CHECKPOINTS and folder.name.isdecimal() and has_manifest(folder):
        return folder
    allowed = f"one checkpoint (RUN_DIR/{CHECKPOINTS}/100) or the last one of a phase (RUN_DIR@PHASE)"
    allowed += ", or a transformers folder (hf:FOLDER)" if key == "init_from" else ""
    raise InputError(f"{key} is {path!r}, but must be a run folder with a checkpoint (RUN_DIR), {allowed}.")


def steps_to_keep(
    checkpoints: Collection[Checkpoint], config: CheckpointConfig, verified: Collection[int] = ()
) -> set[int]:
    """Return the steps of the checkpoints to keep.

    These are the newest `config.keep`, multiples of `config.keep_every` steps, the `config.keep_best` with the lowest
    held-out loss, all pinned ones, and always the newest one that is marked as verified, or in `verified`.
    """
    steps = sorted(x.step for x in checkpoints)
    kept = set(steps[-config.keep :]) | {x.step for x in checkpoints if x.is_pinned}
    if config.keep_every is not None:
        kept |= {step for step in steps if step % config.keep_every == 0}
    if config.keep_best:
        losses = [(math.nan if x.heldout_loss is None else x.heldout_loss, -x.step) for x in checkpoints]
        best = sorted((loss, step) for loss, step in losses if not math.isnan(loss))
        kept |= {-step for _, step in best[: config.keep_best]}
    intact = sorted(x.step for x in checkpoints if x.is_verified or x.step in verified)
    return kept | set(intact[-1:])
