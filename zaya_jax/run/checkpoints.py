"""The folder `checkpoints/` of a run: what lies in it, by name.

`100` is the checkpoint of step 100. `100.g3` is one that the holder of the fencing token 3 has not finished,
`100.g3.orbax-checkpoint-tmp…` one that Orbax has not; `100.corrupt-…` is one that was found damaged, `100.stale-…` one
that a superseded process has saved; `100.deleted` is about to be gone. A file `PINNED` in a checkpoint keeps it from
being removed, a file `VERIFIED` says that it was read and that all its checksums matched.
"""

import re
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.run.fencing import read_token
from zaya_jax.run.files import read_json
from zaya_jax.run.manifest import Manifest, has_manifest, read_manifest

CHECKPOINTS = "checkpoints"  # of a run
PHASES = "phases.json"  # of a run: the step of each phase's last checkpoint
PINNED = "PINNED"
VERIFIED = "VERIFIED"
_LEFT_OVER = re.compile(r"\d+(\.g\d+(\..*tmp.*)?|\.deleted|\.partial)|GENERATION\..*\.partial")


class Checkpoint(NamedTuple):
    """What is known of a checkpoint without reading its arrays."""

    step: int
    heldout_loss: float | None = None  # nats/token after the step, where it was evaluated
    is_pinned: bool = False  # it is never removed
    is_verified: bool = False  # it was read, and all its checksums matched
    is_superseded: bool = False  # saved by processes that others had replaced by then, and so never restored
    phase: str = "-"
    tokens: int = 0  # that the run had seen
    size: int = 0  # bytes of all files
    problem: str = ""  # why it is damaged or cannot be read, in a sentence
    manifest: Manifest | None = None  # where there is no problem

    @property
    def is_usable(self) -> bool:
        """Whether it can be restored, as far as that is known."""
        return not self.problem and not self.is_superseded


def list_checkpoints(folder: Path, *, check_files: bool = True) -> list[Checkpoint]:
    """The checkpoints by step, also those that are damaged; `check_files` compares names and sizes of their files."""
    token = read_token(folder)

    def describe(step: int) -> Checkpoint:
        path = folder / str(step)
        try:
            manifest = read_manifest(path, check_files=check_files)
        except InputError as error:
            return Checkpoint(step, problem=str(error))
        metadata, verified = manifest.metadata, manifest.read_back or (path / VERIFIED).exists()
        superseded = token is not None and not token.accepts(step, manifest.fencing_token)
        return Checkpoint(step, metadata.get("heldout_loss"), (path / PINNED).exists(), verified, superseded,
                          metadata.get("phase", "-"), metadata.get("tokens_seen", 0), sum(manifest.files.values()),
                          manifest=manifest)  # fmt: skip

    return [describe(step) for step in named_steps(folder)]


def usable_checkpoints(folder: Path) -> list[Checkpoint]:
    """Those that can be restored, as far as manifests say; retention removes no others."""
    return [checkpoint for checkpoint in list_checkpoints(folder, check_files=False) if checkpoint.is_usable]


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint, or what once was one, in the folder `checkpoints/` of a run."""
    return any(path.name.isdecimal() or ".corrupt-" in path.name for path in folder.glob("*"))


def saved_steps(folder: Path) -> list[int]:
    """The steps of finished checkpoints, whether or not they are intact."""
    return [step for step in named_steps(folder) if has_manifest(folder / str(step))]


def named_steps(folder: Path) -> list[int]:
    """The steps there are checkpoints of by name, which a checkpoint gets when it is finished."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def unfinished_name(step: int, token: int) -> str:
    """The name of a checkpoint that the holder of a fencing token is saving."""
    return f"{step}.g{token}"


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
    """Rename a checkpoint that is not to be used, and return its new path; `why` is 'corrupt' or 'stale'."""
    base = f"{step}.{why}-{time.strftime('%Y%m%dT%H%M%S')}"
    paths = (folder / f"{base}{'' if n == 0 else f'-{n}'}" for n in range(1000))
    target = next(path for path in paths if not path.exists())
    (folder / str(step)).rename(target)
    return target


def quarantined(folder: Path) -> list[Path]:
    """The checkpoints that `quarantine` has renamed."""
    return sorted(path for why in ("corrupt", "stale") for path in folder.glob(f"*.{why}-*"))


def phase_ends(run: Path) -> dict[str, int]:
    """The last step of each phase of a run that is done, by name; InputError where that is not known."""
    path = run / PHASES
    ends = read_json(path) if path.exists() else {}
    if not isinstance(ends, dict) or not all(type(step) is int for step in ends.values()):
        raise InputError(f"{path} is not a JSON object of steps by phase.")
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
    if at:
        ends = phase_ends(folder)
        if phase not in ends:
            raise InputError(f"{what} is {path!r}, but the phases of {folder} that are done are: "
                             f"{', '.join(ends) or 'none'}.")  # fmt: skip
        folder = folder / CHECKPOINTS / str(ends[phase])
    elif usable := usable_checkpoints(folder / CHECKPOINTS):
        return folder / CHECKPOINTS / str(usable[-1].step)
    if folder.parent.name == CHECKPOINTS and folder.name.isdecimal() and has_manifest(folder):
        return folder
    raise InputError(f"{what} is {path!r}, but must be the folder of a run that has a checkpoint, one of its "
                     f"checkpoints (RUN_DIR/{CHECKPOINTS}/100), or RUN_DIR@PHASE for the last of a phase.")  # fmt: skip
