"""Checkpoints of a run: asynchronous, atomic, the newest few kept (Orbax)."""

import logging
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import jax
from orbax.checkpoint import v1 as ocp

from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import InputError


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

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        # Typed as Any: Orbax declares these policies as something its own checkers do not recognise.
        every: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(config.every)
        newest: Any = ocp.training.preservation_policies.LatestN(config.keep)
        context = ocp.Context()
        # Compression saves 8 % of fp32 noise, for twice the time and a copy in memory.
        context.array.saving.use_compression = False
        self._context = context
        with context:
            self._checkpointer = ocp.training.Checkpointer(
                str(folder.resolve()),
                save_decision_policy=every,
                preservation_policy=newest,
                cleanup_tmp_directories=True,  # what a killed save left behind
            )

    def __enter__(self) -> Self:
        """Wait for the last save at the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the last save, and close."""
        with self._context:
            self._checkpointer.close()

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

    def restore(self, step: int, abstract_state: Any, data: Any) -> Any:
        """The state at `step`, laid out as `abstract_state` says; `data` takes up its own position.

        Raises:
          InputError: the checkpoint holds other arrays than `abstract_state`, or cannot be read.
        """
        return self._load(step, {"state": abstract_state, "data": data})["state"]

    def _load(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        log = logging.getLogger("absl")
        level = log.level
        try:
            log.setLevel(logging.ERROR)
            with self._context:
                return self._checkpointer.load_checkpointables(step, items)
        except (ValueError, KeyError, OSError) as error:  # Orbax's NoEntryError is a KeyError
            raise InputError(f"The checkpoint of step {step} in {self._checkpointer.directory} cannot be restored "
                             f"into this configuration: {' '.join(str(error).split())[:300]}") from error  # fmt: skip
        finally:
            log.setLevel(level)
