"""Detect the launcher of this process from its environment."""

from collections.abc import Mapping

from zaya_jax.errors import InputError

# A variable that only launched tasks have, and the number of tasks: a job of one task needs no coordinator.
_TASKS = {"Slurm": ("SLURM_PROCID", "SLURM_NTASKS"), "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}

RANKS = (*(rank for rank, _ in _TASKS.values()), "JOB_COMPLETION_INDEX")  # without these variables none is detected


def detect_launcher(environment: Mapping[str, str]) -> str | None:
    """Return the launcher of a multi-process job ('Slurm', 'Open MPI' or 'Kubernetes'); None for a single process.

    `InputError` if the launcher's number of tasks is not a number.
    """
    for name, (rank, size) in _TASKS.items():
        tasks = environment.get(size, "1")
        if rank in environment and not tasks.isdecimal():
            raise InputError(f"The environment variable {size} is {tasks!r}, but must be the number of {name} tasks.")
        if rank in environment and int(tasks) > 1:
            return name
    # An indexed job; only the API knows its number of pods.
    return "Kubernetes" if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys() else None


def node_index(environment: Mapping[str, str]) -> int | None:
    """Return the index of this node in a job of Slurm or Kubernetes; None if neither started this process."""
    for name in ("SLURM_NODEID", "JOB_COMPLETION_INDEX"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return None


def split_address(text: str, source: str) -> tuple[str, int]:
    """Split HOST:PORT; raises `InputError`, which names the `source`, if `text` is not of that form."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"{source} is {text!r}, but must be HOST:PORT.")
    return host.removeprefix("[").removesuffix("]"), int(port)
