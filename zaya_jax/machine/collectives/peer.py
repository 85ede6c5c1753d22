"""Run nccl-tests or rccl-tests on the same cases, where they are installed, and compare bus bandwidths."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.machine.collectives import text
from zaya_jax.machine.collectives.timing import WARM_UP

_PROGRAMS = {"all_reduce": "all_reduce_perf", "reduce_scatter": "reduce_scatter_perf", "all_gather": "all_gather_perf",
             "broadcast": "broadcast_perf", "all_to_all": "alltoall_perf", "permute": "sendrecv_perf"}  # fmt: skip
_SECONDS = 600  # that the program may take


def peer_bandwidths(operation: str, rows: Sequence[Mapping[str, Any]], repeats: int) -> tuple[dict[int, float], str]:
    """Measure the sizes of one operation over all devices of this process with the program of nccl-tests.

    Args:
      operation: name in `COLLECTIVES`.
      rows: its measured cases, of `sweep.measure_collectives`, in one dtype, by ascending size.
      repeats: number of timed calls.

    Returns:
      Bus bandwidth out of place in bytes/s, by size in bytes, {} if the program is not installed; and why it failed, a
      sentence or ''.
    """
    program = shutil.which(_PROGRAMS[operation])
    if program is None:
        return {}, ""
    sizes = [row["bytes"] for row in rows]
    factor = max(2, round(sizes[1] / sizes[0])) if len(sizes) > 1 else 2
    arguments = {"-b": sizes[0], "-e": sizes[-1], "-f": factor, "-g": rows[0]["devices"], "-n": repeats, "-w": WARM_UP,
                 "-d": text.TYPES[rows[0]["dtype"]]}  # fmt: skip
    try:
        done = subprocess.run(  # noqa: S603 (a program of the person's own PATH)
            [program, *(str(word) for pair in arguments.items() for word in pair)],
            capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"{program} failed: {error}."
    table = [row for line in done.stdout.splitlines() if len(row := line.split()) > 8 and row[0].isdigit()]
    measured = {int(row[0]): 1e9 * float(row[7]) for row in table}  # size, and bus bandwidth out of place
    if done.returncode or not measured:
        said = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        return {}, f"{program} failed with status {done.returncode}: {said}"
    return measured, ""
