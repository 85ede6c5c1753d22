"""Measure the memory bandwidth of a device, and the share of it that the model's memory-bound operations reach.

The five operations are those of BabelStream (github.com/UoB-HPC/BabelStream): an operation's rate is that of its
shortest call, and the first call is left out. `copy` writes −a, since XLA would return a plain copy's input as its
output.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from zaya_jax.config import ModelConfig
from zaya_jax.lab.kernel_cases import Case, Sizes, cases, program
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.lab.result_tables import TABLES
from zaya_jax.ops.registry import KernelSelection, select_kernels
from zaya_jax.ops.target import current_target

SCALAR = 3.0
ITEM = 4  # bytes of fp32
MEMORY_BOUND = ("residual_norm", "residual_norm backward")
_FILL = (1.0, 2.0)  # of a and b
_ROUNDS = 4  # in which the operations are measured, in turn


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


def measure_memory(sizes: Sequence[int], model: ModelConfig, repeats: int) -> dict[str, Any]:
    """Measure the first device of this process, print tables, and return the result, for JSON.

    Arrays have `sizes` bytes; the largest should be at least four times the last-level cache. The model gives the
    widths of its `operations`.
    """
    arrays = f"arrays of {', '.join(f'{size:,}' for size in sizes)} bytes, float32"
    result = describe_run("memory bandwidth", arrays, "", ())
    device, largest = jax.devices()[0], max(sizes)
    limit = (device.memory_stats() or {}).get("bytes_limit", psutil.virtual_memory().total)
    result["hardware"] |= {"device": device.device_kind, "memory_bytes": limit}
    result["results"], calls = [], -(-repeats // _ROUNDS)
    for size in sizes:
        timed: dict[str, list[float]] = {name: [] for name in KERNELS}
        for _ in range(_ROUNDS):
            for name in KERNELS:
                timed[name] += time_kernel(name, size, calls)
        result["results"] += summarize(size, timed)
    speeds = {(row["operation"], row["bytes"]): row["bytes_per_second"] for row in result["results"]}
    triad = speeds["triad", largest]
    widths = _widths(model, largest)
    kernels, every = select_kernels(current_target(), widths.model, "float32"), cases(widths, "float32")
    result["operations"] = [_operation(name, every[name], kernels, triad, repeats) for name in MEMORY_BOUND]
    print_tables(TABLES["memory"](result))
    return result


def time_kernel(name: str, size: int, repeats: int) -> list[float]:
    """Return the seconds of `repeats` calls of an operation on arrays of `size` bytes; RuntimeError if it is wrong."""
    kernel, count = KERNELS[name], size // ITEM
    a, b = (jnp.full(count, value, jnp.float32) for value in _FILL)
    reduces = name == "Dot"
    out = jnp.zeros(() if reduces else count, jnp.float32)
    # The result takes the memory of the one before, so that no call allocates.
    call = jax.jit(lambda _out, a, b: kernel.run(a, b), donate_argnums=0, keep_unused=True).lower(out, a, b).compile()

    def one_call() -> None:
        nonlocal out
        out = call(out, a, b).block_until_ready()

    seconds = time_calls(one_call, repeats).seconds
    low, high = np.array(jnp.stack([out.min(), out.max()])) / (count if reduces else 1)
    if not np.allclose((low, high), kernel.result, rtol=1e-3 if reduces else 0):  # a sum of many fp32 is rounded
        raise RuntimeError(f"{name} returned {low:g} to {high:g} instead of {kernel.result:g}.")
    return seconds


def summarize(size: int, timed: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each operation over arrays of `size` bytes: seconds, and bytes/s of the shortest call."""
    rows = []
    for name, seconds in timed.items():
        times = {"min": min(seconds), "max": max(seconds), "mean": statistics.fmean(seconds)}
        speed = KERNELS[name].arrays * (size // ITEM * ITEM) / min(seconds)
        rows.append({"operation": name.lower(), "bytes": size, "bytes_per_second": speed} | times)
    return rows


def _widths(model: ModelConfig, size: int) -> Sizes:
    """Return sizes of cases with the model's widths, whose activations and matrices take about `size` bytes in fp32."""
    d, f, heads = model.hidden_size, model.expert_size, (model.num_query_heads, model.num_kv_heads)
    tokens, matrices = max(1, size // (ITEM * d)), max(1, size // (ITEM * d * 2 * f))
    widths = (d, *heads, model.head_dim, model.router_size)
    return Sizes(tokens, tokens, tokens, *widths, 1, 8, f, (matrices, d, 2 * f), (1, 8))


def _operation(name: str, case: Case, kernels: KernelSelection, triad: float, repeats: int) -> dict[str, Any]:
    run, arguments = program(case, kernels)
    call = jax.jit(run, donate_argnums=tuple(range(case.held)))

    def one_call() -> None:
        nonlocal arguments
        out = jax.block_until_ready(call(*arguments))
        arguments = (*out[: case.held], *arguments[case.held :])

    speed = case.bytes / time_calls(one_call, repeats).median
    return {"operation": name, "bytes": case.bytes, "bytes_per_second": speed, "of_triad": speed / triad}
