"""Report registers, shared memory and spills of every kernel at the 8B's sizes, for several GPUs, without a GPU."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from zaya_jax.errors import InputError
from zaya_jax.machine.proxies.codegen import GPUS, Kernel, compile_kernel, kernels_of, lower
from zaya_jax.machine.proxies.kernel_cases import EIGHT_B, Sizes, cases, passes
from zaya_jax.machine.result import describe_run, write_result
from zaya_jax.ops.registry import preferred_kernels
from zaya_jax.ops.target import Target

DTYPES = ("bfloat16", "float32")


def bench_machine_code(output: str | None, only: Sequence[str] = ()) -> dict[str, Any]:
    """Compile the kernels of all cases for `GPUS` with the `triton` package, print a table, and write it to `output`.

    Args:
      output: JSON file, written after each dtype; None for no file.
      only: names of cases; empty for all.

    Returns:
      What was written: `kernels`, a list of kernel, dtype, and by GPU warps, stages, registers per thread, bytes of
      shared memory per program, and spilled registers per thread (`codegen.MachineCode`).

    Raises:
      InputError: the `triton` package is not installed.
    """
    result = describe_run("machine code", f"the 8B's: {EIGHT_B}", "none", ("triton",))
    if result["versions"]["triton"] == "not installed":
        raise InputError("Kernels are compiled by the triton package: pip install -e '.[test]'.")
    result["kernels"] = []
    print("Per program: warps and bytes of shared memory. Per thread: 32-bit registers used, and spilled to memory.")
    head = "  ".join(f"{part:>6}" for part in ("warps", "regs", "shared", "spills"))
    print(f"{'':40}" + "".join(f"{name:>34}" for name in GPUS))
    print(f"{'kernel':30}{'dtype':10}" + f"  {head}" * len(GPUS))
    for dtype in DTYPES:
        for row in rows(dtype, only):
            result["kernels"].append(row)
            code = "  ".join(f"{gpu[part]:6}" for gpu in row["gpus"].values()
                             for part in ("warps", "registers", "shared", "spills"))  # fmt: skip
            print(f"{row['kernel']:30}{dtype:10}  {code}", flush=True)
        write_result(result, output)
    return result


def rows(dtype: str, only: Sequence[str] = (), sizes: Sizes = EIGHT_B) -> Iterator[dict[str, Any]]:
    """Yield one row per kernel; kernels with the same name and figures share a row."""
    kernels = {name: list(_kernels(gpu.target, dtype, only, sizes)) for name, gpu in GPUS.items()}
    seen: list[dict[str, Any]] = []
    for same in zip(*kernels.values(), strict=True):
        code = {
            name: {"warps": kernel.warps, "stages": kernel.stages, **dataclasses.asdict(compile_kernel(kernel, gpu))}
            for kernel, (name, gpu) in zip(same, GPUS.items(), strict=True)
        }
        row = {"kernel": same[0].name, "dtype": dtype, "gpus": code}
        if row not in seen:
            seen.append(row)
            yield row


def _kernels(target: Target, dtype: str, only: Sequence[str], sizes: Sizes) -> Iterator[Kernel]:
    for name, case in cases(sizes, dtype).items():
        if not only or name in only:
            function, arguments = passes(case, preferred_kernels(target))
            yield from kernels_of(lower(function, *arguments, target=target))
