"""The folder `checkpoints/` of a run: what lies in it, by name.

`100` is the checkpoint of step 100. `100.g3` is one that generation 3 has not finished, `100.g3.orbax-checkpoint-tmp…`
one that Orbax has not; `100.corrupt-…` is one that was not what had been saved, `100.stale-…` one that processes given
up for dead have saved; `100.deleted` is about to be gone. A file `PINNED` in a checkpoint keeps it from being removed,
a file `VERIFIED` says that it was read and found whole.
"""

import re
import shutil
import time
from pathlib import Path

from zaya_jax.errors import InputError
from zaya_jax.run.fencing import read_fence
from zaya_jax.run.files import read_json
from zaya_jax.run.manifest import has_manifest, try_read
from zaya_jax.run.retention import Saved

FOLDER = "checkpoints"  # of a run
PHASES = "phases.json"  # of a run: the step of each phase's last checkpoint
PINNED = "PINNED"
VERIFIED = "VERIFIED"
_LEFT_OVER = re.compile(r"\d+(\.g\d+(\..*tmp.*)?|\.deleted|\.partial)|GENERATION\..*\.partial")


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint, or what once was one, in the folder `checkpoints/` of a run."""
    return any(one.name.isdecimal() or ".corrupt-" in one.name for one in folder.glob("*"))


def saved_steps(folder: Path) -> list[int]:
    """The steps there are finished checkpoints of; whether they are whole, reading them says."""
    return sorted(int(one.name) for one in folder.glob("*") if one.name.isdecimal() and has_manifest(one))


def describe_saved(folder: Path) -> list[Saved]:
    """The finished checkpoints that count, for retention; what cannot be read is none of them, and so never removed."""
    found = []
    for step in saved_steps(folder):
        one = folder / str(step)
        manifest = try_read(one)
        if manifest is not None and counts(folder, step, manifest.generation):
            verified = manifest.read_back or (one / VERIFIED).exists()
            found.append(Saved(step, manifest.about.get("heldout_loss"), (one / PINNED).exists(), verified))
    return found


def mark_verified(folder: Path, step: int) -> None:
    """Note with a checkpoint that it was read and found whole, for those that go on with the run."""
    (folder / str(step) / VERIFIED).touch()


def named_steps(folder: Path) -> list[int]:
    """The steps there are checkpoints of by name: one is given its name when it is finished, whatever became of it."""
    return sorted(int(one.name) for one in folder.glob("*") if one.name.isdecimal())


def unfinished_name(step: int, generation: int) -> str:
    """Of a checkpoint that is being saved."""
    return f"{step}.g{generation}"


def clean(folder: Path) -> None:
    """Remove what saves that were not finished have left; none may be under way."""
    for path in folder.glob("*"):
        if not _LEFT_OVER.fullmatch(path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove(folder: Path, step: int) -> None:
    """Remove a checkpoint; from the first moment on it is none."""
    gone = folder / f"{step}.deleted"
    shutil.rmtree(gone, ignore_errors=True)
    (folder / str(step)).rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def quarantine(folder: Path, step: int, why: str) -> Path:
    """Keep a checkpoint that is not to be used under another name, and give it."""
    base = f"{step}.{why}-{time.strftime('%Y%m%dT%H%M%S')}"
    quarantined = next(one for one in (folder / f"{base}{'' if n == 0 else f'-{n}'}" for n in range(1000))
                 if not one.exists())  # fmt: skip
    (folder / str(step)).rename(quarantined)
    return quarantined


def counts(folder: Path, step: int, generation: int) -> bool:
    """Whether a checkpoint of that generation is not of processes that were given up for dead."""
    fence = read_fence(folder)
    return fence is None or fence.lets_pass(step, generation)


def ends_of_phases(run: Path) -> set[int]:
    """The steps of a run after which a phase was done."""
    try:
        return set(_phase_ends(run).values())
    except ValueError:
        return set()


def _phase_ends(run: Path) -> dict[str, int]:
    """The last step of each phase that is done, by name; ValueError where that is not known."""
    ends = read_json(run / PHASES)
    if not isinstance(ends, dict) or not all(type(step) is int for step in ends.values()):
        raise ValueError(f"{run / PHASES} holds something else than steps by name.")
    return ends


def checkpoint_folder(path: str, what: str = "init_from") -> Path:
    """The folder of one checkpoint.

    Args:
      path: the run's folder, for its newest checkpoint; the folder of a checkpoint; or RUN_DIR@PHASE, for the last
        checkpoint of a phase.
      what: the path is, for messages.

    Raises:
      InputError: there is none.
    """
    run, at, phase = path.rpartition("@") if not Path(path).expanduser().exists() else (path, "", "")
    folder = Path(run if at else path).expanduser().resolve()
    steps = [one.step for one in describe_saved(folder / FOLDER)]
    if at:
        try:
            ends = _phase_ends(folder)
        except ValueError as error:
            raise InputError(f"{what} is {path!r}, but {folder} is no run whose phases are known.") from error
        if phase not in ends:
            raise InputError(f"{what} is {path!r}, but the phases of {folder} that are done are: "
                             f"{', '.join(ends) or 'none'}.")  # fmt: skip
        folder = folder / FOLDER / str(ends[phase])
    elif steps:
        return folder / FOLDER / str(steps[-1])
    if folder.parent.name == FOLDER and folder.name.isdecimal() and has_manifest(folder):
        return folder
    raise InputError(f"{what} is {path!r}, but must be the folder of a run that has a checkpoint, one of its "
                     f"checkpoints (RUN_DIR/{FOLDER}/100), or RUN_DIR@PHASE for the last one of a phase.")  # fmt: skip
