"""The commands of `python -m zaya_jax.checkpoint` on one run: verify, inspect, diff, prune, rollback."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from zaya_jax.checkpoint.reader import CheckpointReader, open_checkpoint, saved_slices, verify_checkpoint
from zaya_jax.config import CheckpointConfig, flatten_keys
from zaya_jax.config.bounds import check_bounds
from zaya_jax.config.checks import shown
from zaya_jax.errors import InputError
from zaya_jax.run import checkpoints
from zaya_jax.run.checkpoints import CHECKPOINTS, checkpoint_folder, steps_to_keep
from zaya_jax.run.digests import read_slice
from zaya_jax.run.files import expanded
from zaya_jax.run.folder import lock_folder
from zaya_jax.run.manifest import Unreadable, read_manifest
from zaya_jax.run.run import open_run
from zaya_jax.run.table import size_text


def verify(path: str, every: bool) -> tuple[list[str], bool]:
    """Verify a checkpoint, or every checkpoint of a run; return a report of lines and whether all are intact."""
    of_run = expanded(path) / CHECKPOINTS
    if every:
        folders = [open_run(path).folder / CHECKPOINTS / str(each.step) for each in open_run(path).checkpoints]
    elif listed := [each for each in checkpoints.list_checkpoints(of_run, check_files=False) if not each.is_superseded]:
        folders = [of_run / str(listed[-1].step)]  # also if it is damaged, so that others would be used
    else:
        folders = [checkpoint_folder(path, "CHECKPOINT")]
    lines, intact = [], True
    for folder in folders:
        try:
            damage = verify_checkpoint(folder)
        except Unreadable as error:
            damage = [str(error)]
        if damage:
            lines, intact = lines + damage, False
            continue
        manifest = read_manifest(folder)
        checked = "all checksums match" if manifest.digests else "file sizes match (saved without checksums)"
        content = f"{len(manifest.leaves)} arrays, {size_text(sum(manifest.files.values()))}"
        lines.append(f"{folder}: OK, {checked} ({content})")
    return lines or [f"{path} has no checkpoint."], intact


def inspect(path: str) -> Iterator[str]:
    """Yield lines with a checkpoint's metadata, then one line per array."""
    folder = checkpoint_folder(path, "CHECKPOINT")
    manifest, reader = open_checkpoint(folder)
    metadata = manifest.metadata
    phase, tokens = metadata.get("phase", "-"), metadata.get("tokens_seen", 0)
    yield f"{folder}: step {manifest.step}, phase {phase}, {tokens:,} tokens"
    for key in ("environment", "versions"):
        yield f"{key}: {', '.join(f'{name} {value}' for name, value in metadata.get(key, {}).items())}"
    width = 2 + max(map(len, manifest.leaves), default=0)
    yield f"{'array':<{width}}{'dtype':<10}{'shape':<24}{'norm':>13}{'max abs':>13}"
    for name, slices in sorted(saved_slices(folder, manifest).items()):
        squares, largest, finite = 0.0, 0.0, True
        for span in slices:
            x = _float64(reader.read(name, read_slice(span)))
            squares += float(np.vdot(x, x))
            largest = max(largest, float(np.abs(x).max(initial=0.0)))
            finite = finite and bool(np.isfinite(x).all())
        leaf, odd = manifest.leaves[name], "" if finite else "  not finite"
        shape = "×".join(map(str, leaf["shape"])) or "scalar"
        yield f"{name:<{width}}{leaf['dtype']:<10}{shape:<24}{math.sqrt(squares):>13.6g}{largest:>13.6g}{odd}"


def diff(first: str, second: str) -> Iterator[str]:
    """Yield one line per configuration key and per array that differ between two checkpoints."""
    folders = [checkpoint_folder(path, "CHECKPOINT") for path in (first, second)]
    (old, old_reader), (new, new_reader) = map(open_checkpoint, folders)
    before, after = (dict(flatten_keys(manifest.metadata.get("config", {}))) for manifest in (old, new))
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            yield f"{key}: {shown(before.get(key))} vs {shown(after.get(key))}"
    slices = saved_slices(folders[0], old)
    for name in sorted({*old.leaves, *new.leaves}):
        left, right = old.leaves.get(name), new.leaves.get(name)
        if left is None or right is None:
            yield f"{name}: only in the {'second' if left is None else 'first'}"
        elif (left["dtype"], left["shape"]) != (right["dtype"], right["shape"]):
            yield f"{name}: {left['dtype']} {left['shape']} and {right['dtype']} {right['shape']}"
        elif left.get("digest") is None or left.get("digest") != right.get("digest"):
            distance = _distance(name, old_reader, new_reader, slices[name])
            yield from [f"{name}: {distance}"] if distance else ()


def _distance(name: str, first: CheckpointReader, second: CheckpointReader, slices: list[str]) -> str:
    """Describe how an array differs between two checkpoints; empty if it is bitwise equal."""
    same, squares, norm, largest = True, 0.0, 0.0, 0.0
    for span in slices:
        a, b = (reader.read(name, read_slice(span)) for reader in (first, second))
        same = same and a.tobytes() == b.tobytes()
        x, y = _float64(a), _float64(b)
        squares, norm = squares + float(np.vdot(x - y, x - y)), norm + float(np.vdot(x, x))
        largest = max(largest, float(np.abs(x - y).max(initial=0.0)))
    relative = math.sqrt(squares / norm) if norm else math.inf if squares else 0.0
    return "" if same else f"max abs diff {largest:.6g}, relative norm {relative:.3g}"


def _float64(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64).reshape(-1)


def prune(path: Path, config: CheckpointConfig, dry_run: bool = False) -> str:
    """Remove all checkpoints of a run except those to keep; say what was removed. Quarantined ones stay.

    The last checkpoint of each phase is always kept. Checkpoints are verified from the newest down until one is intact,
    which is never removed. Damaged checkpoints newer than it stay and do not count towards `config.keep`.
    `InputError` if a number is out of range, the run is being trained, or no checkpoint is intact.
    """
    check_bounds(config)
    run = open_run(path)
    folder = run.folder / CHECKPOINTS
    with lock_folder(run.folder):
        usable = checkpoints.usable_checkpoints(folder)
        damaged = set()
        for checkpoint in reversed(usable):
            if not verify_checkpoint(folder / str(checkpoint.step)):
                break
            damaged.add(checkpoint.step)
        else:
            raise InputError(f"No checkpoint in {folder} is intact, so none was removed.")
        intact = [checkpoint for checkpoint in usable if checkpoint.step not in damaged]
        kept = steps_to_keep(intact, config, [intact[-1].step]) | damaged
        kept |= set(run.phases.values())
        gone = [folder / str(checkpoint.step) for checkpoint in usable if checkpoint.step not in kept]
        size = sum(file.stat().st_size for path in gone for file in path.rglob("*") if file.is_file())
        for target in gone if not dry_run else ():
            checkpoints.remove(folder, int(target.name))
    names = ", ".join(target.name for target in gone) or "nothing"
    left = f" Damaged checkpoints were kept: {', '.join(map(str, sorted(damaged)))}." if damaged else ""
    return f"{'Would remove' if dry_run else 'Removed'} {names} ({size_text(size)}).{left}"


def rollback(path: Path, step: int) -> str:
    """Quarantine the checkpoints after `step`, so that the run resumes from that step; say which.

    `InputError` if the run is being trained, or has no intact checkpoint of that step.
    """
    folder = open_run(path).folder / CHECKPOINTS
    with lock_folder(folder.parent):
        usable = [checkpoint.step for checkpoint in checkpoints.usable_checkpoints(folder)]
        if step not in usable:
            allowed = ", ".join(map(str, usable)) or "there is none"
            raise InputError(f"STEP is {step}, but must be one of the checkpoints of {path}: {allowed}.")
        if damage := verify_checkpoint(folder / str(step)):
            raise InputError(f"{damage[0]} Choose another checkpoint; nothing was changed.")
        # From the newest down: if this is interrupted, the run resumes from the newest one left.
        later = [number for number in reversed(checkpoints.named_steps(folder)) if number > step]
        names = [checkpoints.quarantine(folder, number, "stale").name for number in later]
    return f"The run resumes from step {step}. Quarantined: {', '.join(names) or 'nothing'}."
