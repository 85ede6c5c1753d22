"""Time a problem with its operands in the caches, and after the caches were overwritten."""

import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.machine.gemm.problems import Problem
from zaya_jax.machine.kernel_cases import drawn
from zaya_jax.machine.timing import elapsed


class Seconds(NamedTuple):
    """Median seconds of a call."""

    warm: float
    cold: float


def flush_array(size: int) -> jax.Array:
    """Make the array of `size` bytes whose update overwrites the caches."""
    return jnp.zeros(max(1, size // 4), jnp.float32)


def time_problem(problem: Problem, flush: jax.Array, repeats: int) -> Seconds:
    """Time calls, warm and cold in turn; the first call of each, which compiles, is left out."""
    arguments = jax.block_until_ready((*drawn(problem.arrays), *map(jnp.asarray, problem.integers)))
    call, overwrite = jax.jit(problem.run), jax.jit(lambda x: x + 1)
    warm, cold = [], []

    def one_call() -> None:
        jax.block_until_ready(call(*arguments))

    for _ in range(repeats + 1):
        one_call()  # loads the caches
        warm.append(elapsed(one_call))
        overwrite(flush).block_until_ready()
        cold.append(elapsed(one_call))
    return Seconds(statistics.median(warm[1:]), statistics.median(cold[1:]))
