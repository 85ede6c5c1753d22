"""Select kernels, validate them on the devices, and make all processes agree on them."""

from collections.abc import Callable
from pathlib import Path

from zaya_jax.config import Config
from zaya_jax.errors import InputError
from zaya_jax.job.multihost import all_gather, broadcast, is_primary
from zaya_jax.ops.kernel_table import KernelTable, find_table, parse_table
from zaya_jax.ops.registry import TUNE, KernelSelection, reject, rejections, select_kernels, validate_kernels
from zaya_jax.ops.target import GPU_PLATFORMS, current_target
from zaya_jax.run.checkpoints import CHECKPOINTS, has_checkpoint
from zaya_jax.run.files import read_object, write_atomically

TABLE = "kernels.json"  # in the run folder: the measurements that the run began with
_PATIENCE = 600  # seconds to wait for another process, which compiles the kernels it validates


def validated_kernels(
    config: Config, folder: Path | None = None, *, training: bool = True, say: Callable[[str], object] = print
) -> KernelSelection:
    """Select the kernels that exist for the devices and give correct results in every process.

    Process 0 reads the measurements that decide for all processes, from the run folder if something is resumed, and
    describes the selection, on platforms that have kernels. With `training`, gradients and the optimizer's operations
    are checked, too. `say` is called with each line for the user.

    `InputError` if an implementation of `config.ops` does not exist or cannot be used; `TimeoutError` if another
    process does not answer.
    """
    dtype, own = config.train.compute_dtype, _read_table(folder, say) if is_primary() else None
    texts = broadcast([own.text, own.source] if own else [])
    table = KernelTable(*texts) if texts else None
    while True:
        target, problem = current_target(), None
        selection = select_kernels(target, config.model, dtype, table, config.ops)
        try:
            selection = validate_kernels(selection, config.model, dtype, training=training)
        except InputError as error:  # of a pinned kernel: once the others know that it is wrong, they raise it, too
            problem = error
        processes = all_gather("kernels", rejections(target), _PATIENCE)
        for operation, kernel, reason in (rejection for process in processes for rejection in process):
            reject(target, operation, kernel, reason)
        if problem is not None:
            raise problem
        # A kernel that one process rejects is now rejected in all. Its replacement must be validated, too.
        if all({tuple(r[:2]) for r in process} == {tuple(r[:2]) for r in processes[0]} for process in processes):
            break
    if is_primary() and (selection.kernels or selection.reasons):
        say(str(selection))
    return selection


def _read_table(folder: Path | None, say: Callable[[str], object]) -> KernelTable | None:
    """Return the measurements that a run began with, or for a run that begins, those for this process' device."""
    target = current_target()
    if folder is not None and (folder / TABLE).exists():
        try:
            return parse_table(read_object(folder / TABLE), target.device_kind, str(folder / TABLE))
        except InputError as error:  # such as after a change of devices; others might change from start to start
            say(f"Not used: {error} The default kernels run.")
            return None
    began = folder is not None and has_checkpoint(folder / CHECKPOINTS)
    table = None if began else find_table(target, say)
    if table is None and target.platform in GPU_PLATFORMS:
        advice = f"No kernels were measured on {target.device_kind}: the default ones run. To measure: {TUNE} CONFIG"
        say("This run began without measured kernels, and continues with the default ones." if began else advice)
    return table


def keep_table(folder: Path, table: KernelTable | None, check: Callable[[], object]) -> None:
    """Write the measurements into the folder of a run that begins; `check` is called before."""
    if is_primary() and table is not None and not (folder / TABLE).exists():
        check()
        write_atomically(folder / TABLE, table.text)
