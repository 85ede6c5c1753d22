"""Which process of a job that makes no progress is the one that hangs; the others wait for it."""

from collections.abc import Collection, Mapping

from zaya_jax.run.progress_record import Phase, Progress

# In these phases a process waits for others: their connections, collectives, or ends.
WAITING = (Phase.JOIN, Phase.DISPATCH, Phase.DEVICE_WAIT, Phase.END)


def find_suspects(progress: Mapping[int, Progress | None], stopped: Collection[int] = ()) -> list[int]:
    """Return the processes that may cause a hang; all of them if nothing tells them apart.

    The first that applies: processes that are stopped; those without a record; those behind the others in steps; those
    in a phase in which a process does not wait for others.

    Args:
      progress: what each process does; None for one that has written no record.
      stopped: processes that the kernel shows as stopped (by SIGSTOP or a debugger).
    """
    steps = {rank: each.step for rank, each in progress.items() if each is not None}
    groups = (
        [rank for rank in progress if rank in stopped],
        [rank for rank, each in progress.items() if each is None],
        [rank for rank, step in steps.items() if step < max(steps.values())],
        [rank for rank, each in progress.items() if each is not None and each.phase not in WAITING],
    )
    return next((group for group in groups if 0 < len(group) < len(progress)), list(progress))
