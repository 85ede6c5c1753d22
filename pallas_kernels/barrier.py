"""A barrier between the threads of a program, apart from `launch`, on whose text all measurements depend."""

from jax.experimental.pallas import triton

from pallas_kernels.tiles import Architecture, architecture_name


def barrier(architecture: Architecture) -> None:
    """Wait until all threads have loaded what they load before, so that a thread can overwrite it."""
    if architecture_name(architecture) != "interpret":
        triton.debug_barrier()
