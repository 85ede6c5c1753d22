"""The run folder: its files, its lock, and the check that it belongs to the configuration."""

import fcntl
import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from zaya_jax.config import Config, flatten_keys, from_dict, to_dict, to_yaml, with_current_keys
from zaya_jax.config.checks import counted, shown
from zaya_jax.config.data import CORPUS_KEYS
from zaya_jax.config.stages import phase_steps
from zaya_jax.config.yaml_text import MAX_BYTES, parse_yaml
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS, PHASES, has_checkpoint, phase_ends
from zaya_jax.run.fencing import FENCE
from zaya_jax.run.files import (
    Unlockable,
    expanded,
    explained,
    locked,
    open_regular,
    read_file,
    read_start,
    write_atomically,
)
from zaya_jax.run.manifest import Unreadable
from zaya_jax.run.metrics import read_rows
from zaya_jax.run.signals import warn
from zaya_jax.run.writing import remove, remove_partials

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
SUMMARY = "summary.json"
CHANGES = "changes.jsonl"
STATUS = "status.json"
PROFILE = "profile"
_LOCK = ".lock"
_ABSENT = object()  # value of a key that a configuration does not have, and of an empty section
_MAX_CONFIG = 4 * MAX_BYTES  # a file and those that it extends, with all defaults and rows to skip
# Mount options with which locks hold on one node only: nfs(5), mount.lustre(8), mount.cifs(8), and Linux's
# documentation of afs, gfs2 and ocfs2.
_LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock", "localflock", "nobrl", "flock=local", "localflocks"}

# Keys that may change when a run resumes and affect the computation; `record_changes` records them. Training checks
# which phases and rows to skip may change.
_RECORDED = ("phases", "train.spike.", "train.max_skipped_steps", "evaluation.", "data.skip_rows")
# The other keys that may change affect at most the last bits of the results, as a change of devices does.
_FREE_OF_RUN = ("run_dir", "preset", "measurements", "profile", "ops.", "parallel.", "checkpoint.", "sample.")
_FREE_OF_TRAIN = ("train.batch.micro_batch", "train.remat", "train.deterministic", "train.log_every", "train.sinks")
_FREE = (*_RECORDED, *_FREE_OF_RUN, *_FREE_OF_TRAIN, "data.cache_dir", "data.workers")


def lock_folder(folder: Path, name: str = "The run") -> AbstractContextManager[None]:
    """Hold the lock of a run, so that only one process at a time trains it or removes checkpoints; see `locked`."""
    return locked(folder / _LOCK, name, wait=False)


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a run, here or where the file system shares it; None if untestable."""
    try:
        with open_regular(folder / _LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases it at once
    except BlockingIOError:
        return True
    except PermissionError:
        return None
    except OSError:  # no lock file, or a file system without locks
        pass
    return False


def why_unlocked(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return why the lock that this process holds does not keep others out, here or elsewhere; empty if it does."""
    if is_locked(folder) is False:
        return "file locks do not work"
    number, text = folder.stat().st_dev, mounts.read_text(errors="replace") if mounts.exists() else ""
    options = re.findall(rf"^\d+ \d+ {os.major(number)}:{os.minor(number)} .* (\S+)$", text, re.MULTILINE)
    named = ", ".join(sorted(_LOCAL_LOCKS.intersection(",".join(options).split(","))))
    return f"file locks hold on one node only (mount option {named})" if named else ""


@contextmanager
def lock_run(config: Config) -> Iterator[Path]:
    """Create and lock `config.run_dir` during the block, and remove partial files of killed processes from it.

    At the end, removes the folder if this call created it and it holds only the lock, as after a refused run. Raises
    `InputError`, and leaves the folder unchanged, if another process holds the lock, or the folder contains a run with
    a different configuration, without one, or without the checkpoints that it had.
    """
    folder = expanded(config.run_dir)
    existed = folder.exists()
    with ExitStack() as stack:
        with suppress(Unlockable):
            stack.enter_context(lock_folder(folder, "run_dir"))
        if reason := why_unlocked(folder):
            problem = f"{reason} in run_dir ({folder}), so nothing refuses a second training of this run"
            instead = "the first one stops when the second one takes the next fencing token"
            warn(f"Warning: {problem}; instead, {instead}.")
        _compare(folder, config)
        _require_checkpoints(folder)
        remove_partials(folder)
        try:
            yield folder
        finally:
            if not existed:
                _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [_LOCK]:
            remove(folder / _LOCK)
            folder.rmdir()


def claim_run(folder: Path, config: Config) -> None:
    """Write `config.yaml`, which makes the folder this run's; called once its data is known to be usable."""
    if (folder / CONFIG).exists():
        return
    with explained(f"run_dir ({folder}) cannot be written"):
        write_atomically(folder / CONFIG, to_yaml(config))


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.yaml` as nested dicts with this version's keys; InputError if it is damaged.

    Keys that an earlier version did not have get their defaults, which do what that version did.
    """
    path = folder / CONFIG
    try:
        text = read_start(path, _MAX_CONFIG + 1)
        if len(text) > _MAX_CONFIG:
            raise InputError(f"{path} is larger than the limit of {_MAX_CONFIG:,} bytes.")
        tree = with_current_keys(parse_yaml(text.decode(), str(path)))
        _recorded(tree)
    except (OSError, ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        raise InputError(f"{path} cannot be read, so the run in this folder cannot be identified.") from error
    with suppress(InputError):
        return to_dict(from_dict(tree))
    # This version refuses a value, which stays as it is. The oldest versions wrote neither of these keys.
    return {"resume_from": None, **tree, "data": {"skip_rows": [], **tree.get("data", {})}}


def record_changes(folder: Path, config: Config, step: int) -> None:
    """Append the settings that changed after `step` steps to `changes.jsonl`, and update `config.yaml`.

    A line is `{"step": …, "changes": {key: [old, new], …}}`. Called once the new settings are known to work.
    """
    old, new = (_recorded(tree) for tree in (read_config(folder), to_dict(config)))
    changes = {key: [old.get(key), new.get(key)] for key in {**new, **old} if old.get(key) != new.get(key)}
    if not changes:
        return
    path, line = folder / CHANGES, json.dumps({"step": step, "changes": changes}) + "\n"
    lines = read_file(path).decode().splitlines(keepends=True) if path.exists() else []
    if lines[-1:] != [line]:  # equal if an earlier start was killed before it wrote the configuration
        write_atomically(path, "".join([*lines, line]))
    write_atomically(folder / CONFIG, to_yaml(config))


def _recorded(tree: dict[str, Any]) -> dict[str, Any]:
    phases = {phase["name"]: phase for phase in tree["phases"]}
    keys = dict(flatten_keys({**tree, "phases": phases}))
    return {key: value for key, value in keys.items() if key.startswith(_RECORDED)}


def write_phase_ends(folder: Path, config: Config, steps: Collection[int]) -> None:
    """Write `phases.json`: phase name → step, for each phase whose last checkpoint is among `steps`."""
    ends = {phase.name: end for phase, (_, end) in zip(config.phases, phase_steps(config), strict=True)}
    text = json.dumps({name: end for name, end in ends.items() if end in steps}, indent=1) + "\n"
    path = folder / PHASES
    if not path.exists() or read_file(path) != text.encode():
        write_atomically(path, text)


def _compare(folder: Path, config: Config) -> None:
    path = folder / CONFIG
    if not path.exists():
        if names := [name for name in (METRICS, CHECKPOINTS) if (folder / name).exists()]:
            problem = f"{folder} contains {names[0]} but no {CONFIG}, so its run cannot be identified"
            raise InputError(f"{problem}; choose another run_dir.")
        return
    differing = [each for each in _differences(read_config(folder), to_dict(config)) if not _is_free(each[0], config)]
    if not differing:
        return
    (key, was, becomes), *others = differing
    rest = [other for other, *_ in others]
    listed = [*rest[:5], *([f"{len(rest) - 5} more"] if len(rest) > 5 else [])]
    more = f" Other differences: {', '.join(listed)}." if rest else ""
    weights = "" if key.startswith("model.") else f": with init_from={folder} it starts from that run's weights"
    if config.lora is None and all(each.endswith("learning_rate") for each in (key, *rest)):
        cleared = "" if config.init_from is None else "init_from=null "
        weights = f": with {cleared}resume_from={folder} it continues that run, if its phases have tokens left"
    problem = f"{folder} contains a run with a different configuration: {key} was {was} and is now {becomes}.{more}"
    restore = f"Restore the old value{'s' if rest else ''} to resume that run"
    raise InputError(f"{problem} {restore}, or choose another run_dir{weights}.")


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield key, old and new value for a message; what only one configuration has is one difference."""
    for key in {**new, **old}:
        was, becomes = (_ABSENT if tree.get(key, {}) == {} else tree[key] for tree in (old, new))
        if isinstance(was, dict) and isinstance(becomes, dict):
            yield from _differences(was, becomes, f"{prefix}{key}.")
        elif was != becomes:
            yield f"{prefix}{key}", _describe(was), _describe(becomes)


def _describe(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    return "set" if isinstance(value, dict) else shown(value)


def _require_checkpoints(folder: Path) -> None:
    """Raise `Unreadable` if the checkpoints that the run had are gone, since their file system may not be mounted."""
    checkpoints = folder / CHECKPOINTS
    if has_checkpoint(checkpoints):
        return
    ends, rows = phase_ends(folder), read_rows(folder / METRICS)
    if ends or (rows and not (checkpoints / FENCE).exists()):  # which is written before the first row
        without = f"{METRICS} has {counted(len(rows), 'step')}, and the run's {FENCE} is missing there, too"
        reason = f"{PHASES} names that of step {max(ends.values())}" if ends else without
        remedy = "Mount its file system or restore its content, then rerun; to start over, choose another run_dir."
        raise Unreadable(f"{checkpoints} has no checkpoint, but {reason}. {remedy}")


def _is_free(key: str, config: Config) -> bool:
    of_source, source = key.startswith("data.sources."), key.removeprefix("data.sources.").split(".")[0]
    moved = of_source and key.endswith(".path")  # checkpoints identify sources by content
    # A phase that has started did not read it either: training checks that its mixture is unchanged.
    unused = of_source and all(phase.mixture and source not in phase.mixture for phase in config.phases)
    unread = bool(config.data.sources) and key.removeprefix("data.") in CORPUS_KEYS
    return moved or unused or unread or f"{key}.".startswith(_FREE)  # also of a section that only one configuration has
