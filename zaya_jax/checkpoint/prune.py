"""Remove checkpoints of a run on command."""

from pathlib import Path

from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import InputError
from zaya_jax.run import writing
from zaya_jax.run.checkpoints import CHECKPOINTS, remove, steps_to_keep, usable_checkpoints
from zaya_jax.run.folder import lock_folder
from zaya_jax.run.run import open_run
from zaya_jax.run.table import size_text


def prune(path: Path, config: CheckpointConfig, quarantined: bool = False, dry_run: bool = False) -> str:
    """Remove all checkpoints of a run except those to keep.

    The last checkpoint of each phase is always kept. Checkpoints are verified from the newest down until one is intact,
    which is never removed. Damaged checkpoints newer than it stay and do not count towards `config.keep`.

    Args:
      path: folder of the run; no process may be training it.
      config: the retention policy.
      quarantined: also remove quarantined checkpoints.
      dry_run: only report what would be removed.

    Returns:
      A sentence that says what was removed.

    Raises:
      InputError: a number is out of range, the run is being trained, or no checkpoint is intact.
    """
    config.check()
    run = open_run(path)
    folder = run.folder / CHECKPOINTS
    with lock_folder(run.folder):
        usable = usable_checkpoints(folder)
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
        gone += run.quarantined if quarantined else []
        size = sum(file.stat().st_size for path in gone for file in path.rglob("*") if file.is_file())
        for target in gone if not dry_run else ():
            if target.name.isdecimal():
                remove(folder, int(target.name))
            else:
                writing.remove(target)
    names = ", ".join(target.name for target in gone) or "nothing"
    left = f" Damaged checkpoints were kept: {', '.join(map(str, sorted(damaged)))}." if damaged else ""
    return f"{'Would remove' if dry_run else 'Removed'} {names} ({size_text(size)}).{left}"
