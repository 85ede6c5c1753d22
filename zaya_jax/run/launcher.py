"""Which launcher started this process, by its environment."""

from collections.abc import Mapping

# A variable that only a launched task has, and the number of tasks: a job of one task needs no coordinator.
_TASKS = {
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
}


def detect_launcher(environment: Mapping[str, str]) -> str | None:
    """'Slurm', 'Open MPI' or 'Kubernetes', which started this process with others; None where it is alone."""
    for name, (rank, size) in _TASKS.items():
        if rank in environment and int(environment.get(size, "1")) > 1:
            return name
    # An indexed job; how many pods it has, only the API says.
    return "Kubernetes" if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys() else None
