"""Removing checkpoints by hand."""

import shutil
from pathlib import Path

from zaya_jax.checkpoint.commands import checkpoints_of, quarantine, size_text
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import describe_saved, ends_of_phases, remove
from zaya_jax.run.files import locked
from zaya_jax.run.retention import steps_to_keep


def prune(run: Path, config: CheckpointConfig, quarantined: bool = False, dry_run: bool = False) -> str:
    """Remove the checkpoints of a run that need not be kept, and say which.

    The ends of phases stay. Checkpoints are read, from the newest down, until one is what was saved: that one stays
    whatever is asked for, and those above it, which are not, do not count as kept.

    Args:
      run: the run's folder, in which no process may be training.
      config: which are kept.
      quarantined: remove quarantined checkpoints as well.
      dry_run: only say it.

    Raises:
      InputError: a number is out of range, a process trains in the run, or no checkpoint is what was saved.
    """
    config.check()
    checkpoints_of(run)
    with locked(run.expanduser() / ".lock", "The run", wait=False):
        return _prune(run, config, quarantined, dry_run)


def _prune(run: Path, config: CheckpointConfig, quarantined: bool, dry_run: bool) -> str:
    folder = checkpoints_of(run)
    saved = describe_saved(folder)
    damaged = []
    for one in reversed(saved):
        if not verify_checkpoint(folder / str(one.step)):
            break
        damaged.append(one.step)
    else:
        raise InputError(f"None of the {len(saved)} checkpoints in {folder} is what was saved: none is removed.")
    whole = [one for one in saved if one.step not in damaged]
    kept = steps_to_keep(whole, config, [whole[-1].step]) | set(damaged) | ends_of_phases(folder.parent)
    gone = [folder / str(one.step) for one in saved if one.step not in kept] + (
        quarantine(folder) if quarantined else []
    )
    size = sum(path.stat().st_size for one in gone for path in one.rglob("*") if path.is_file())
    for path in gone if not dry_run else ():
        if path.name.isdecimal():
            remove(folder, int(path.name))
        else:
            shutil.rmtree(path)
    names = ", ".join(path.name for path in gone) or "nothing"
    wrong = (
        f" Not what was saved, and left for you to look at: {', '.join(map(str, sorted(damaged)))}." if damaged else ""
    )
    return f"{'Would remove' if dry_run else 'Removed'} {names} ({size_text(size)}).{wrong}"
