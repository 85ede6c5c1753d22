"""Select kernels, validate them on the devices, and make all processes agree on them."""

from zaya_jax.config import Config
from zaya_jax.ops.registry import KernelSelection, reject, rejections, validate_kernels
from zaya_jax.parallel.multihost import all_gather, is_primary
from zaya_jax.parallel.placement import device_kernels

_PATIENCE = 600  # seconds to wait for another process, which compiles the kernels it validates


def validated_kernels(config: Config) -> KernelSelection:
    """Select the kernels that exist for the devices and give correct results in every process.

    Process 0 prints the selection, on platforms that have kernels.

    Args:
      config: configuration of the run.

    Raises:
      TimeoutError: another process did not answer.
    """
    dtype = config.train.compute_dtype
    while True:
        selection = validate_kernels(device_kernels(config.model, dtype), config.model, dtype)
        target = selection.target
        processes = all_gather("kernels", rejections(target), _PATIENCE)
        for operation, kernel, reason in (rejection for process in processes for rejection in process):
            reject(target, operation, kernel, reason)
        # A kernel that one process rejects is now rejected in all. Its replacement must be validated, too.
        if all({tuple(r[:2]) for r in process} == {tuple(r[:2]) for r in processes[0]} for process in processes):
            break
    if is_primary() and (selection.kernels or selection.reasons):
        print(selection)
    return selection
