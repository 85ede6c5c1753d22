"""The folder of a run: whose it is, and that one process at a time writes to it."""

import fcntl
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from zaya_jax.checkpoint.folder import FOLDER as CHECKPOINTS
from zaya_jax.checkpoint.folder import PHASES
from zaya_jax.config import Config, PhaseConfig, to_dict, to_yaml
from zaya_jax.config.stages import phase_steps, schedule_spans
from zaya_jax.errors import InputError
from zaya_jax.files import write_atomically

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"

# Keys that change nothing of what is computed, or its last bits alone, as other devices do: they may differ when a run
# goes on. `check_past` sees to phases.
_FREE = ("run_dir", "preset", "parallel.", "train.batch.micro", "train.remat", "train.log_every", "checkpoint.",
         "sample.", "data.cache_dir", "data.workers", "phases")  # fmt: skip


def run_folder(config: Config) -> Path:
    """The folder `config.run_dir`."""
    return Path(config.run_dir).expanduser()


@contextmanager
def open_run(config: Config) -> Iterator[Path]:
    """The folder `config.run_dir`, made where there is none, locked until the block ends.

    Raises:
      InputError: another process has it, or it holds a run of another configuration, or files of a run
        without a configuration; nothing in it is touched then.
    """
    folder = run_folder(config)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run_dir is {config.run_dir!r}, which is a file, but must be a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise InputError(f"run_dir is {config.run_dir!r}, which cannot be written to: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"Another process is training in {folder}; choose another run_dir or wait.") from error
        except OSError as error:
            raise InputError(f"run_dir is {config.run_dir!r}, which cannot be locked: {error.strerror}.") from error
        _compare(folder, config)
        yield folder
    finally:
        os.close(lock)


def claim_run(folder: Path, config: Config) -> None:
    """Write `config.yaml`, from which on the folder is this run's; done once its corpus is known to be good."""
    if not (folder / CONFIG).exists():
        write_atomically(folder / CONFIG, to_yaml(config))


def note_phases(folder: Path, config: Config) -> None:
    """Write `config.yaml` anew where phases to come have changed; done once they are known to be to come."""
    there = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    if there["phases"] != to_dict(config)["phases"]:
        write_atomically(folder / CONFIG, to_yaml(config))


def name_phases(folder: Path, config: Config, steps: Collection[int]) -> None:
    """Note in `phases.json` which of the checkpoints of `steps` are the last of which phase: name to step."""
    ends = {phase.name: end for phase, (_, end) in zip(config.phases, phase_steps(config), strict=True)}
    text = json.dumps({name: end for name, end in ends.items() if end in steps}, indent=1) + "\n"
    path = folder / PHASES
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


def check_past(old: Config, new: Config, step: int) -> None:
    """Raise `InputError` where phases that are begun after `step` steps of a run have changed since."""
    begun = sum(first < step for first, _ in phase_steps(old))
    for index, phase in enumerate(old.phases[:begun]):
        where = f"phases[{index}] ({phase.name})"
        if index >= len(new.phases):
            raise InputError(f"{where} is gone, but the run is past its beginning; put it back, or choose another "
                             "run_dir.")  # fmt: skip
        before, now = _fixed(phase), _fixed(new.phases[index])
        for key, value in before.items():
            if value != now[key]:
                raise InputError(
                    f"{where}: {key} was {value!r} and is now {now[key]!r}, but the phase is begun. Take the old value "
                    "to go on with that run, or choose another run_dir."
                )
    for index, (was, becomes) in enumerate(zip(schedule_spans(old)[:begun], schedule_spans(new), strict=False)):
        # A constant rate does not depend on where its span ends.
        if was != becomes and (was.schedule != becomes.schedule or was.schedule.shape != "constant"):
            raise InputError(
                f"phases[{index}] ({old.phases[index].name}): schedule spanned {was.tokens} tokens and now spans "
                f"{becomes.tokens}, since a phase after it has changed; give the first new phase a schedule of its "
                "own, or choose another run_dir."
            )


def _fixed(phase: PhaseConfig) -> dict[str, Any]:
    """What of a phase may not change once it is begun."""
    found = {key: value for key, value in to_dict(phase).items() if key not in ("parallel", "remat")}
    if found["batch"] is not None:
        found["batch"] = {key: value for key, value in found["batch"].items() if key != "micro"}
    return found


def _compare(folder: Path, config: Config) -> None:
    path = folder / CONFIG
    if not path.exists():
        for name in (METRICS, CHECKPOINTS):
            if (folder / name).exists():
                raise InputError(f"{folder} holds {name} but no {CONFIG}, so it is not known which run it is; choose "
                                 "another run_dir.")  # fmt: skip
        return
    try:
        there = yaml.safe_load(path.read_text(encoding="utf-8"))
        old = dict(_leaves(there, ""))
    except (OSError, ValueError, yaml.YAMLError, AttributeError) as error:
        raise InputError(f"{path} cannot be read, so it is not known which run this folder holds.") from error
    new = dict(_leaves(to_dict(config), ""))
    for key in [*new, *(key for key in old if key not in new)]:
        if not _is_free(key) and old.get(key, "nothing") != new.get(key, "nothing"):
            raise InputError(
                f"{path.parent} holds a run of another configuration: {key} was {old.get(key, 'nothing')!r} and is now "
                f"{new.get(key, 'nothing')!r}. Choose another run_dir, or take the old value to go on with that run."
            )


def _is_free(key: str) -> bool:
    moved = key.startswith("data.sources.") and key.endswith(".path")  # a checkpoint knows its sources by content
    return moved or key.startswith(_FREE)


def _leaves(tree: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value
