"""The kernels a run uses: chosen once at its start, tried, and the same in all processes."""

import jax

from zaya_jax.config import Config
from zaya_jax.ops.registry import KernelSelection, choose, validate_kernels
from zaya_jax.ops.target import Target
from zaya_jax.parallel.multihost import all_gather, is_primary

_PATIENCE = 600  # seconds that a process is waited for, while it compiles what it tries


def choose_kernels(config: Config, target: Target) -> KernelSelection:
    """What the devices of this job are compiled for: kernels where they can be had and are right on every process.

    Process 0 says which, on a platform that has kernels.

    Args:
      config: of the run.
      target: the kind of device.

    Raises:
      TimeoutError: another process was not heard.
    """
    dtype = config.train.compute_dtype
    choice = choose(target, config.model, dtype)
    choice = validate_kernels(choice, config.model, dtype)
    if jax.process_count() > 1:
        reasons = all_gather("kernels", dict(choice.reasons), _PATIENCE)
        choice = choice.without({name: why for process in reversed(reasons) for name, why in process.items()})
    if is_primary() and (choice.kernels or choice.reasons):
        print(choice)
    return choice
