"""Checkpoints of a run: asynchronous, atomic, the newest few kept (Orbax)."""

import json
import logging
import os
import platform
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import jax
from orbax.checkpoint import v1 as ocp

from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import InputError

FOLDER = "checkpoints"  # of a run, see `CheckpointStore`
PHASES = "phases.json"  # of a run: the step of each phase's last checkpoint


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a whole checkpoint in the folder `checkpoints/` of a run."""
    return any(one.name.isdecimal() for one in folder.glob("*"))


def environment() -> dict[str, Any]:
    """What two runs must share for their numbers to be bitwise equal."""
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def cpu_name() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class CheckpointStore:
    """The folder `checkpoints/` of a run.

    A checkpoint holds `state` (a pytree of arrays), `data` (anything Orbax can checkpoint, such as the data
    iterator) and `about` (the configuration it is of, and `environment()`). It appears whole or not at all.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, pinned: Collection[int] = ()) -> None:
        """Open or make the folder; checkpoints of the steps `pinned` stay beside the newest few."""
        # Typed as Any: Orbax declares these policies as something its own checkers do not recognise.
        policies: Any = ocp.training.preservation_policies
        every: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(config.every)
        kept = policies.AnyPreservationPolicy([policies.LatestN(config.keep), policies.CustomSteps(list(pinned))])
        context = ocp.Context()
        # Compression saves 8 % of fp32 noise, for twice the time and a copy in memory.
        context.array.saving.use_compression = False
        self._context = context
        with context:
            self._checkpointer = ocp.training.Checkpointer(
                str(folder.resolve()),
                save_decision_policy=every,
                preservation_policy=kept,
                cleanup_tmp_directories=True,  # what a killed save left behind
            )

    def __enter__(self) -> Self:
        """Wait for the last save at the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the last save, and close."""
        with self._context:
            self._checkpointer.close()

    def steps(self) -> list[int]:
        """The steps there are checkpoints of."""
        with self._context:
            return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def latest(self) -> int | None:
        """The newest step there is a checkpoint of."""
        with self._context:
            newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: Any, data: Any, config: Mapping[str, Any]) -> None:
        """Start saving; the arrays may be donated to the next step at once. One save is in flight at a time."""
        about = {"config": dict(config), "environment": environment()}
        with self._context:
            self._checkpointer.save_checkpointables_async(step, {"state": state, "data": data, "about": about},
                                                          force=True)  # fmt: skip

    def about(self, step: int) -> dict[str, Any]:
        """The configuration and the environment of a checkpoint.

        Raises:
          InputError: they cannot be read.
        """
        return self._load(step, {"about": None})["about"]

    def restore(self, step: int, abstract_state: Any, data: Any = None) -> Any:
        """The state at `step`, laid out as `abstract_state` says; `data`, where given, takes up its own position.

        Raises:
          InputError: the checkpoint holds other arrays than `abstract_state`, or cannot be read.
        """
        items = {"state": abstract_state} if data is None else {"state": abstract_state, "data": data}
        return self._load(step, items)["state"]

    def _load(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        what = f"The checkpoint of step {step} in {self._checkpointer.directory}"
        with self._context:
            return _quietly(lambda: self._checkpointer.load_checkpointables(step, items), what)


def about_checkpoint(path: str) -> dict[str, Any]:
    """The configuration and the environment of a checkpoint of any run; see `read_checkpoint`."""
    folder = _checkpoint_folder(path)
    items = {"about": None}
    return _quietly(lambda: ocp.load_checkpointables(str(folder), items), f"The checkpoint {folder}")["about"]


def read_checkpoint(path: str, abstract_state: Any) -> Any:
    """The state of a checkpoint of any run, which is left as it is.

    Args:
      path: the run's folder, for its newest checkpoint; the folder of a checkpoint; or RUN_DIR@PHASE, for the last
        checkpoint of a phase.
      abstract_state: says how the state is laid out.

    Raises:
      InputError: there is no checkpoint, or it holds other arrays than `abstract_state`, or cannot be read.
    """
    folder = _checkpoint_folder(path)
    items = {"state": abstract_state}
    return _quietly(lambda: ocp.load_checkpointables(str(folder), items), f"The checkpoint {folder}")["state"]


def read_part(path: str, abstract_part: dict[str, Any]) -> dict[str, Any]:
    """Some of the state of a checkpoint of any run.

    Args:
      path: as for `read_checkpoint`.
      abstract_part: fields of the state, and how each is laid out and in which dtype it is wanted.

    Raises:
      InputError: as `read_checkpoint`.
    """
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        found = read_checkpoint(path, abstract_part)
    wanted, there = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (abstract_part, found))
    held = {jax.tree_util.keystr(key): x.shape for key, x in there if isinstance(x, jax.Array)}
    for key, x in wanted:  # Orbax leaves out what is not there
        if held.get(name := jax.tree_util.keystr(key)) != x.shape:
            raise InputError(f"init_from is {path!r}, whose checkpoint holds no {name} of the shape {x.shape}.")
    return found


def _checkpoint_folder(path: str) -> Path:
    run, at, phase = path.rpartition("@") if not Path(path).expanduser().exists() else (path, "", "")
    folder = Path(run if at else path).expanduser().resolve()
    steps = [one.name for one in (folder / FOLDER).glob("*") if one.name.isdecimal()]
    if at:
        try:
            ends = json.loads((folder / PHASES).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"init_from is {path!r}, but {folder} is no run whose phases are known.") from error
        if phase not in ends:
            raise InputError(f"init_from is {path!r}, but the phases of {folder} that are done are: "
                             f"{', '.join(ends) or 'none'}.")  # fmt: skip
        folder = folder / FOLDER / str(ends[phase])
    elif steps:
        return folder / FOLDER / max(steps, key=int)
    if folder.parent.name == FOLDER and folder.name.isdecimal() and folder.is_dir():
        return folder
    raise InputError(f"init_from is {path!r}, but must be the folder of a run that has a checkpoint, one of its "
                     f"checkpoints (RUN_DIR/{FOLDER}/100), or RUN_DIR@PHASE for the last one of a phase.")  # fmt: skip


def _quietly(load: Callable[[], dict[str, Any]], what: str) -> dict[str, Any]:
    """What `load` gives, its errors told in one sentence about `what`."""
    log = logging.getLogger("absl")
    level = log.level
    try:
        log.setLevel(logging.ERROR)
        return load()
    except (ValueError, KeyError, OSError) as error:  # Orbax's NoEntryError is a KeyError
        raise InputError(f"{what} cannot be restored into this configuration: "
                         f"{' '.join(str(error).split())[:300]}") from error  # fmt: skip
    finally:
        log.setLevel(level)
