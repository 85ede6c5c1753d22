"""The folder of a run: its files, its one lock, and the configuration that it belongs to."""

import fcntl
import json
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import yaml

from zaya_jax.config import Config, flatten_keys, to_dict, to_yaml, with_current_keys
from zaya_jax.config.checks import shown
from zaya_jax.config.stages import phase_steps
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS, PHASES
from zaya_jax.run.files import locked, write_atomically

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
SUMMARY = "summary.json"
CHANGES = "changes.jsonl"
STATUS = "status.json"
_LOCK = ".lock"

# Keys that may differ when a run resumes and that change what is computed: `record_changes` notes them. Which
# phases may differ is for training to check.
_RECORDED = ("phases", "train.spike.", "train.max_skipped_steps", "evaluation.")
# The other keys that may differ change nothing of what is computed, or its last bits alone, as other devices do.
_FREE = (*_RECORDED, "run_dir", "preset", "parallel.", "train.batch.micro_batch", "train.remat", "train.log_every",
         "checkpoint.", "sample.", "data.cache_dir", "data.workers")  # fmt: skip


def run_folder(config: Config) -> Path:
    """The folder `config.run_dir`."""
    return Path(config.run_dir).expanduser()


def lock_folder(folder: Path, what: str = "The run") -> AbstractContextManager[None]:
    """Hold the lock of a run, which is made where there is none: one process at a time trains it or removes from it.

    Raises:
      InputError: another process holds it, or the folder cannot be written; `what` names it.
    """
    return locked(folder / _LOCK, what, wait=False)


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine, or of any whose locks the file system shares, holds the lock of a run."""
    try:
        with (folder / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go of at once
    except BlockingIOError:
        return True
    except OSError:  # there is no such file, or no such locks
        pass
    return False


@contextmanager
def lock_run(config: Config) -> Iterator[Path]:
    """The folder `config.run_dir`, made where there is none, locked until the block ends.

    Raises:
      InputError: another process has it, or it holds a run of another configuration, or files of a run
        without a configuration; nothing in it is touched then.
    """
    folder = run_folder(config)
    with lock_folder(folder, "run_dir"):
        _compare(folder, config)
        yield folder


def claim_run(folder: Path, config: Config) -> None:
    """Write `config.yaml`, from which on the folder is this run's; done once its corpus is known to be good."""
    if (folder / CONFIG).exists():
        return
    try:
        write_atomically(folder / CONFIG, to_yaml(config))
    except OSError as error:
        raise InputError(f"run_dir ({folder}) cannot be written: {error.strerror}.") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The tree of `config.yaml`, whatever version wrote it, by the keys of this one; InputError where damaged."""
    path = folder / CONFIG
    try:
        tree = with_current_keys(yaml.safe_load(path.read_text(encoding="utf-8")))
        _recorded(tree)
    except (OSError, ValueError, RecursionError, yaml.YAMLError, AttributeError, LookupError, TypeError) as error:
        raise InputError(f"{path} cannot be read, so it is not known which run this folder holds.") from error
    return tree


def record_changes(folder: Path, config: Config, step: int) -> None:
    """Note in `changes.jsonl` which settings changed after `step` steps, and bring `config.yaml` up to date.

    A line is `{"step": …, "changes": {key: [old, new], …}}`; done once the new settings are known to be possible.
    """
    old, new = (_recorded(tree) for tree in (read_config(folder), to_dict(config)))
    changes = {key: [old.get(key), new.get(key)] for key in [*new, *(key for key in old if key not in new)]
               if old.get(key) != new.get(key)}  # fmt: skip
    if not changes:
        return
    path, line = folder / CHANGES, json.dumps({"step": step, "changes": changes}) + "\n"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    if lines[-1:] != [line]:  # else an earlier start was killed before it could write the configuration
        write_atomically(path, "".join([*lines, line]))
    write_atomically(folder / CONFIG, to_yaml(config))


def _recorded(tree: dict[str, Any]) -> dict[str, Any]:
    phases = {phase["name"]: phase for phase in tree["phases"]}
    return {key: value for key, value in flatten_keys({**tree, "phases": phases}) if key.startswith(_RECORDED)}


def write_phase_ends(folder: Path, config: Config, steps: Collection[int]) -> None:
    """Note in `phases.json` which of the checkpoints of `steps` are the last of which phase: name to step."""
    ends = {phase.name: end for phase, (_, end) in zip(config.phases, phase_steps(config), strict=True)}
    text = json.dumps({name: end for name, end in ends.items() if end in steps}, indent=1) + "\n"
    path = folder / PHASES
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


def _compare(folder: Path, config: Config) -> None:
    path = folder / CONFIG
    if not path.exists():
        for name in (METRICS, CHECKPOINTS):
            if (folder / name).exists():
                raise InputError(f"{folder} holds {name} but no {CONFIG}, so it is not known which run it is; choose "
                                 "another run_dir.")  # fmt: skip
        return
    # A key that runs of earlier versions do not have.
    old = {"resume_from": None} | dict(flatten_keys(read_config(folder)))
    new = dict(flatten_keys(to_dict(config)))
    for key in [*new, *(key for key in old if key not in new)]:
        if not _is_free(key) and (key in old, old.get(key)) != (key in new, new.get(key)):
            was, becomes = (shown(values[key]) if key in values else "absent" for values in (old, new))
            raise InputError(
                f"{path.parent} holds a run of another configuration: {key} was {was} and is now {becomes}. Restore "
                f"the old value to resume that run, or choose another run_dir, where resume_from={path.parent} "
                "continues it with other settings."
            )


def _is_free(key: str) -> bool:
    moved = key.startswith("data.sources.") and key.endswith(".path")  # a checkpoint knows its sources by content
    return moved or key.startswith(_FREE)
