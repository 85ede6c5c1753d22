"""The kernels that are used: selected, tried, and the same in all processes."""

from zaya_jax.config import Config
from zaya_jax.ops.registry import KernelSelection, reject, rejections, validate_kernels
from zaya_jax.parallel.multihost import all_gather, is_primary
from zaya_jax.parallel.placement import device_kernels

_PATIENCE = 600  # seconds that a process is waited for, while it compiles what it tries


def validated_kernels(config: Config) -> KernelSelection:
    """Kernels where they can be had and are right on every process, as training, evaluation and benchmarks use them.

    Process 0 says which, on a platform that has kernels.

    Args:
      config: of the run.

    Raises:
      TimeoutError: another process was not heard.
    """
    dtype = config.train.compute_dtype
    while True:
        selection = validate_kernels(device_kernels(config.model, dtype), config.model, dtype)
        target = selection.target
        processes = all_gather("kernels", rejections(target), _PATIENCE)
        for operation, kernel, reason in (rejection for process in processes for rejection in process):
            reject(target, operation, kernel, reason)
        # Those of one process reject in the others what they had passed, and what takes its place has to be tried.
        if all({tuple(r[:2]) for r in process} == {tuple(r[:2]) for r in processes[0]} for process in processes):
            break
    if is_primary() and (selection.kernels or selection.reasons):
        print(selection)
    return selection
