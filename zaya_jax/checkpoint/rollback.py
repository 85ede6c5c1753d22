"""Roll a run back to one of its checkpoints."""

from pathlib import Path

from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS, named_steps, quarantine, usable_checkpoints
from zaya_jax.run.folder import lock_folder
from zaya_jax.run.run import open_run


def rollback(path: Path, step: int) -> str:
    """Quarantine the checkpoints after `step`, so that the run resumes from that step; nothing is removed.

    Args:
      path: folder of the run; no process may be training it.
      step: of an intact checkpoint, which is read and verified first.

    Returns:
      A sentence that says what was quarantined.

    Raises:
      InputError: the run is being trained, or has no intact checkpoint of that step.
    """
    folder = open_run(path).folder / CHECKPOINTS
    with lock_folder(folder.parent):
        usable = [checkpoint.step for checkpoint in usable_checkpoints(folder)]
        if step not in usable:
            raise InputError(f"STEP is {step}, but must be one of the checkpoints of {path}: "
                             f"{', '.join(map(str, usable)) or 'there is none'}.")  # fmt: skip
        if damage := verify_checkpoint(folder / str(step)):
            raise InputError(f"{damage[0]} Choose another checkpoint; nothing was changed.")
        # From the newest down: if this is interrupted, the run resumes from the newest one left.
        later = [number for number in reversed(named_steps(folder)) if number > step]
        names = [quarantine(folder, number, "stale").name for number in later]
    return f"The run resumes from step {step}. Quarantined: {', '.join(names) or 'nothing'}."
