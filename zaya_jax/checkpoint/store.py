"""Checkpoints of a run: asynchronous, atomic, the newest few kept (Orbax)."""

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

_FOLDER = "checkpoints"  # of a run, see `CheckpointStore`


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


def read_checkpoint(path: Path, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
    """The state and the `about` of a checkpoint of any run, which is left as it is.

    Args:
      path: the run's folder, for its newest checkpoint, or the folder of a checkpoint, or a link to one.
      abstract_state: says how the state is laid out.

    Raises:
      InputError: there is no checkpoint, or it holds other arrays than `abstract_state`, or cannot be read.
    """
    folder = path.expanduser().resolve()
    if (folder / _FOLDER).is_dir():
        steps = [int(one.name) for one in (folder / _FOLDER).iterdir() if one.name.isdecimal()]
        if not steps:
            raise InputError(f"The run {path} has no checkpoint.")
        folder = folder / _FOLDER / str(max(steps))
    if folder.parent.name != _FOLDER or not folder.is_dir():
        raise InputError(f"{path} is neither the folder of a run nor one of its checkpoints, such as "
                         f"RUN_DIR/{_FOLDER}/100.")  # fmt: skip
    what = f"The checkpoint {folder}"
    about = _quietly(lambda: ocp.load_checkpointables(str(folder), {"about": None}), what)["about"]
    return _quietly(lambda: ocp.load_checkpointables(str(folder), {"state": abstract_state}), what)["state"], about


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
