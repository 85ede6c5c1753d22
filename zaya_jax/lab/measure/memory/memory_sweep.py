"""Measure memory bandwidth over sizes, the model's memory-bound operations, and the peer in C; print and return."""

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from zaya_jax.config import ModelConfig
from zaya_jax.lab.kernel_cases import Case, Sizes, cases, program
from zaya_jax.lab.measure.memory import bandwidth
from zaya_jax.lab.measure.memory.stream import compile_stream, time_stream
from zaya_jax.lab.report.tables import TABLES
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.lab.timing import timed
from zaya_jax.ops.registry import KernelSelection, select_kernels
from zaya_jax.ops.target import current_target

MEMORY_BOUND = ("residual_norm", "residual_norm backward")
_TOGETHER = 4  # rounds in which the operations and the peer are measured, in turn


def measure_memory(sizes: Sequence[int], model: ModelConfig, repeats: int, *, stream: bool) -> dict[str, Any]:
    """Measure the first device of this process, and print tables.

    Args:
      sizes: bytes of each array; the largest one should be at least four times the last-level cache.
      model: gives the widths of the model's operations.
      repeats: number of timed calls of each operation and size.
      stream: whether to measure the triad in C, too, in the same rounds as ours at the largest size.

    Returns:
      The result, for JSON: `results` of BabelStream's operations, `operations` of the model's, `stream` of the peer.

    Raises:
      InputError: `stream` without a C compiler.
    """
    result = describe_run("memory bandwidth", f"arrays of {', '.join(f'{size:,}' for size in sizes)} bytes, float32",
                          "the triad in C with OpenMP" if stream else "", ())  # fmt: skip
    device = jax.devices()[0]
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = (device.memory_stats() or {}).get("bytes_limit", host_memory)
    result["hardware"] |= {"device": device.device_kind, "memory_bytes": limit}
    result["results"] = []
    with tempfile.TemporaryDirectory(prefix="zaya_jax_") as folder:
        program, compiler = compile_stream(Path(folder)) if stream else (None, "")
        c_seconds: list[float] = []
        for size in sizes:
            timed: dict[str, list[float]] = {name: [] for name in bandwidth.KERNELS}
            for _ in range(_TOGETHER):
                for name in bandwidth.KERNELS:
                    timed[name] += bandwidth.time_kernel(name, size, -(-repeats // _TOGETHER))
                if program is not None and size == max(sizes):
                    c_seconds += time_stream(program, size // bandwidth.ITEM, -(-repeats // _TOGETHER))
            rows = bandwidth.results(size, timed)
            print("\n".join([*bandwidth.table(rows), ""]), flush=True)
            result["results"] += rows
    (triad,) = (row["bytes_per_second"] for row in result["results"]
                if (row["operation"], row["bytes"]) == ("triad", max(sizes)))  # fmt: skip
    if stream:
        theirs = 3 * max(sizes) / min(c_seconds)
        result["stream"] = {"compiler": compiler, "bytes_per_second": theirs, "ratio": triad / theirs}
    widths = _widths(model, max(sizes))
    kernels, every = select_kernels(current_target(), widths.model, "float32"), cases(widths, "float32")
    result["operations"] = [_operation(name, every[name], kernels, triad, repeats) for name in MEMORY_BOUND]
    print_tables(TABLES["memory"](result)[1:])
    return result


def _widths(model: ModelConfig, size: int) -> Sizes:
    """Return sizes of cases with the model's widths, whose activations and matrices take about `size` bytes in fp32."""
    width, fused = model.hidden_size, 2 * model.expert_size
    tokens = max(1, size // (bandwidth.ITEM * width))
    matrices = max(1, size // (bandwidth.ITEM * width * fused))
    return Sizes(tokens, tokens, tokens, width, model.num_query_heads, model.num_kv_heads, model.head_dim,
                 model.router_size, 1, 8, model.expert_size, (matrices, width, fused), (1, 8))  # fmt: skip


def _operation(name: str, case: Case, kernels: KernelSelection, triad: float, repeats: int) -> dict[str, Any]:
    run, arguments = program(case, kernels)
    call = jax.jit(run, donate_argnums=tuple(range(case.held)))

    def one_call() -> None:
        nonlocal arguments
        out = jax.block_until_ready(call(*arguments))
        arguments = (*out[: case.held], *arguments[case.held :])

    speed = case.bytes / statistics.median(timed(one_call, repeats))
    return {"operation": name, "bytes": case.bytes, "bytes_per_second": speed, "of_triad": speed / triad}
