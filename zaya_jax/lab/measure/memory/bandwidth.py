"""The five operations of BabelStream (github.com/UoB-HPC/BabelStream) over sizes, in its table's form.

As there, an operation's rate is that of its shortest call, and the first call is left out. `copy` writes −a, since XLA
would return a plain copy's input as its output.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.lab.timing import timed

SCALAR = 3.0
ITEM = 4  # bytes of fp32
_FILL = (1.0, 2.0)  # of a and b


class Kernel(NamedTuple):
    """An operation."""

    run: Callable[[jax.Array, jax.Array], jax.Array]  # (a, b) → result
    arrays: int  # arrays that it reads or writes
    result: float  # expected value of each element; for `dot`, of the mean of the products


KERNELS = {
    "Copy": Kernel(lambda a, _b: -a, 2, -_FILL[0]),
    "Mul": Kernel(lambda a, _b: SCALAR * a, 2, SCALAR * _FILL[0]),
    "Add": Kernel(lambda a, b: a + b, 3, _FILL[0] + _FILL[1]),
    "Triad": Kernel(lambda a, b: a + SCALAR * b, 3, _FILL[0] + SCALAR * _FILL[1]),
    "Dot": Kernel(jnp.vdot, 2, _FILL[0] * _FILL[1]),
}


def time_kernel(name: str, size: int, repeats: int) -> list[float]:
    """Return the seconds of each call but the first.

    Args:
      name: key of `KERNELS`.
      size: bytes of each array.
      repeats: number of timed calls.

    Raises:
      RuntimeError: the result is wrong.
    """
    kernel, count = KERNELS[name], size // ITEM
    a, b = (jnp.full(count, value, jnp.float32) for value in _FILL)
    reduces = name == "Dot"
    out = jnp.zeros(() if reduces else count, jnp.float32)
    # The result takes the memory of the one before, so that no call allocates.
    call = jax.jit(lambda _out, a, b: kernel.run(a, b), donate_argnums=0, keep_unused=True).lower(out, a, b).compile()

    def one_call() -> None:
        nonlocal out
        out = call(out, a, b).block_until_ready()

    seconds = timed(one_call, repeats)
    got = np.array(jnp.stack([out.min(), out.max()])) / (count if reduces else 1)
    if not np.allclose(got, kernel.result, rtol=1e-3 if reduces else 0):  # a sum of many fp32 products is rounded
        raise RuntimeError(f"{name} returned {got[0]:g} to {got[1]:g} instead of {kernel.result:g}.")
    return seconds


def results(size: int, timed: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each operation over arrays of `size` bytes: seconds, and bytes/s of the shortest call."""
    return [
        {"operation": name.lower(), "bytes": size,
         "bytes_per_second": KERNELS[name].arrays * (size // ITEM * ITEM) / min(seconds), "min": min(seconds),
         "max": max(seconds), "mean": float(np.mean(seconds))}
        for name, seconds in timed.items()
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of BabelStream's table."""
    lines = [f"{'Function':<12}{'MBytes/sec':<12}{'Min (sec)':<12}{'Max':<12}{'Average':<12}"]
    return lines + [f"{row['operation'].title():<12}{row['bytes_per_second'] / 1e6:<12.3f}{row['min']:<12.5f}"
                    f"{row['max']:<12.5f}{row['mean']:<12.5f}" for row in rows]  # fmt: skip
