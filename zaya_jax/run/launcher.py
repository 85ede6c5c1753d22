"""Which launcher started this process, by its environment."""

from collections.abc import Mapping

from zaya_jax.errors import InputError

# A variable that only a launched task has, and the number of tasks: a job of one task needs no coordinator.
_TASKS = {
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
}


def detect_launcher(environment: Mapping[str, str]) -> str | None:
    """'Slurm', 'Open MPI' or 'Kubernetes', which started this process with others; None where it is alone.

    Raises:
      InputError: the number of tasks that the launcher gives is none.
    """
    for name, (rank, size) in _TASKS.items():
        tasks = environment.get(size, "1")
        if rank in environment and not tasks.isdecimal():
            raise InputError(f"The variable {size} is {tasks!r}, but must be the number of tasks that {name} started.")
        if rank in environment and int(tasks) > 1:
            return name
    # An indexed job; how many pods it has, only the API says.
    return "Kubernetes" if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys() else None
