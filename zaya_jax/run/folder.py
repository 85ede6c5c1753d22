"""The folder of a run: whose it is, and that one process at a time writes to it."""

import fcntl
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from zaya_jax.config import Config, PhaseConfig, to_dict, to_yaml
from zaya_jax.config.checks import shown
from zaya_jax.config.stages import phase_steps, schedule_spans, stage_at, stages, tokens_before
from zaya_jax.errors import InputError
from zaya_jax.optim.schedule import learning_rate_factor
from zaya_jax.run.checkpoints import FOLDER as CHECKPOINTS
from zaya_jax.run.checkpoints import PHASES
from zaya_jax.run.files import write_atomically

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
SUMMARY = "summary.json"

CHANGES = "changes.jsonl"

# Keys that may differ when a run resumes and that change what is computed: `record_changes` notes them. `check_past`
# sees to phases.
_RECORDED = ("phases", "train.spike.", "train.max_skipped_steps", "evaluation.")
# The other keys that may differ change nothing of what is computed, or its last bits alone, as other devices do.
_FREE = (*_RECORDED, "run_dir", "preset", "parallel.", "train.batch.micro", "train.remat", "train.log_every",
         "checkpoint.", "sample.", "data.cache_dir", "data.workers")  # fmt: skip


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
    if (folder / CONFIG).exists():
        return
    try:
        write_atomically(folder / CONFIG, to_yaml(config))
    except OSError as error:
        raise InputError(f"run_dir is {config.run_dir!r}, which cannot be written to: {error.strerror}.") from error


def record_changes(folder: Path, config: Config, step: int) -> None:
    """Note in `changes.jsonl` which settings changed after `step` steps, and bring `config.yaml` up to date.

    A line is `{"step": …, "changes": {key: [old, new], …}}`; done once the new settings are known to be possible.
    """
    old, new = (_recorded(tree) for tree in (yaml.safe_load((folder / CONFIG).read_text("utf-8")), to_dict(config)))
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
    return {key: value for key, value in _leaves({**tree, "phases": phases}, "") if key.startswith(_RECORDED)}


def name_phases(folder: Path, config: Config, steps: Collection[int]) -> None:
    """Note in `phases.json` which of the checkpoints of `steps` are the last of which phase: name to step."""
    ends = {phase.name: end for phase, (_, end) in zip(config.phases, phase_steps(config), strict=True)}
    text = json.dumps({name: end for name, end in ends.items() if end in steps}, indent=1) + "\n"
    path = folder / PHASES
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


def check_past(old: Config, new: Config, step: int, *, rates: bool = True) -> None:
    """Raise `InputError` where `new` has other batches or rates than `old` in the first `step` steps.

    Args:
      old: of the run so far.
      new: to resume with. A phase may be as long as it likes once what is done fits into it.
      step: steps done.
      rates: whether learning rates must have been the same, too.
    """
    begun = sum(first < step for first, _ in phase_steps(old))
    for index, phase in enumerate(old.phases[:begun]):
        where = f"phases.{phase.name}"
        if index >= len(new.phases):
            raise InputError(f"{where} is gone, but the run is past its beginning; put it back, or choose another "
                             "run_dir.")  # fmt: skip
        before, now = _fixed(phase), _fixed(new.phases[index])
        if index < begun - 1:
            before["tokens"], now["tokens"] = phase.tokens, new.phases[index].tokens
        for key, value in before.items():
            if value != now[key]:
                raise InputError(
                    f"{where}.{key} was {shown(value)} and is now {shown(now[key])}, but the run has started that "
                    "phase. Restore the old value to resume that run, or choose another run_dir."
                )
    if _steps_done(old, step) != _steps_done(new, step):
        where, budget = f"phases.{old.phases[begun - 1].name}", new.phases[begun - 1].tokens
        done = tokens_before(old, step) - tokens_before(old, phase_steps(old)[begun - 1][0])
        if budget < done:
            raise InputError(f"{where}.tokens is {budget:,}, but {done:,} tokens of that phase are done; take at least "
                             "as many.")  # fmt: skip
        raise InputError(f"The batch (train.batch) or the context (data.context) was another in the {step} steps that "
                         "are done. Restore the old values; a new phase may have others.")  # fmt: skip
    if rates:
        _check_rates(old, new, step, begun)


def _check_rates(old: Config, new: Config, step: int, begun: int) -> None:
    """Raise `InputError` where the learning rate of a step that is done would have been another."""
    spans, now = schedule_spans(old)[:begun], schedule_spans(new)[:begun]
    if spans == now:
        return
    differing = np.flatnonzero(_factors(old, step) != _factors(new, step))
    if not differing.size:
        return
    first = int(differing[0])
    phase = stage_at(old, first).phase
    was, becomes = spans[phase], now[phase]
    what = f"spanned {was.tokens:,} tokens and now spans {becomes.tokens:,}"
    if was.schedule != becomes.schedule:
        before, after = to_dict(was.schedule), to_dict(becomes.schedule)
        what = " and ".join(f"had {key} {shown(value)} and now has {shown(after[key])}"
                            for key, value in before.items() if value != after[key])  # fmt: skip
    raise InputError(
        f"phases.{old.phases[phase].name}: the {was.schedule.shape} schedule {what}, so steps {first + 1} to {step}, "
        "which are done, would have had other learning rates. Restore the old values and append a phase with a "
        f"schedule of its own; or continue at the new rates in a new run_dir with resume_from={new.run_dir} (up to "
        f"step {first} both schedules have the same rates: {new.run_dir}/checkpoints/STEP)."
    )


def _factors(config: Config, steps: int) -> np.ndarray:
    """The learning-rate factor of each of the first `steps` steps."""
    return jax.device_get(jax.jit(jax.vmap(learning_rate_factor(config)))(np.arange(steps, dtype=np.int32)))


def _steps_done(config: Config, step: int) -> list[tuple[int, ...]]:
    """Phase, first step, end, context and sequences of each stage in the first `step` steps."""
    return [(one.phase, one.first_step, min(one.end, step), one.context, one.sequences)
            for one in stages(config) if one.first_step < step]  # fmt: skip


def _fixed(phase: PhaseConfig) -> dict[str, Any]:
    """What of a phase may not change once it is begun; that lengths and rates fit is seen from the steps themselves."""
    free = ("parallel", "remat", "tokens", "schedule")
    found = {key: value for key, value in to_dict(phase).items() if key not in free}
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
        old = {"resume_from": None} | dict(_leaves(there, ""))  # a key that runs of earlier versions do not have
        _recorded(there)
    except (OSError, ValueError, RecursionError, yaml.YAMLError, AttributeError, LookupError, TypeError) as error:
        raise InputError(f"{path} cannot be read, so it is not known which run this folder holds.") from error
    new = dict(_leaves(to_dict(config), ""))
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


def _leaves(tree: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value
