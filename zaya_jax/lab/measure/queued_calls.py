"""Time calls on a device: a pass queues many before it waits, to time the device and not the launch overhead."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.lab.timing import elapsed

PASS = 0.1  # seconds that a pass takes at least, with at most `MOST` calls
MOST = 1000
TOGETHER = 8  # calls in one program, so that launching does not dominate short kernels
SHORT = 2**28  # bytes of arrays below which a call counts as short


def calls_together(arrays: Any) -> int:
    """Return how many calls with such arrays belong in one program; emulated kernels are never short."""
    is_short = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)) < SHORT
    return TOGETHER if is_short and jax.default_backend() != "cpu" else 1


def queued(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> Callable[[], int]:
    """Make a pass of `function`, with `calls` of its calls in one program.

    Each of these calls has its own arrays: with shared arrays, the compiler would compute the result only once, and the
    second call would find them in the cache.
    """
    sets = [arguments, *(jax.tree.map(jnp.copy, arguments) for _ in range(calls - 1))]
    run, last = jax.jit(lambda sets: [function(*arrays) for arrays in sets]), []

    def call() -> None:
        last[:] = [run(sets)]

    return repeated(call, lambda: jax.block_until_ready(last), calls)


def stepped(function: Callable[..., Any], arguments: tuple[Any, ...], held: int) -> Callable[[], int]:
    """Make a pass of `function` that donates its first `held` arguments, and feeds the first `held` outputs back."""
    run = jax.jit(lambda state, inputs: function(*state, *inputs), donate_argnums=0)
    state, inputs = [arguments[:held]], arguments[held:]

    def call() -> None:
        state[0] = run(state[0], inputs)[:held]

    return repeated(call, lambda: jax.block_until_ready(state), 1)


def repeated(call: Callable[[], Any], wait: Callable[[], Any], counts: int) -> Callable[[], int]:
    """Make a pass with enough calls to take `PASS` seconds; it returns their number, each counted as `counts`."""
    number = 1

    def one_pass() -> int:
        for _ in range(number):
            call()
        wait()
        return number * counts

    one_pass()  # compiles
    while number < MOST and (seconds := elapsed(one_pass)) < PASS:
        number = min(MOST, max(2 * number, math.ceil(number * PASS / max(seconds, 1e-6))))

    return one_pass
