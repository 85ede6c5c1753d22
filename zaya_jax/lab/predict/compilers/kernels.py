"""Compile the kernel cases for GPUs, and report what each kernel needs and what each case launches and moves."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.lab.kernel_cases import EIGHT_B, Case, cases
from zaya_jax.lab.predict.compilers.compiled import check_gpu, run_worker
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.hlo import Instruction, Place, entry_place, parse, shape_bytes, walk
from zaya_jax.lab.predict.compilers.predict import instruction_cost, is_launch, launches
from zaya_jax.lab.predict.compilers.resources import KernelResources, read_resources
from zaya_jax.lab.predict.compilers.toolchain import DUMP, find_toolchain
from zaya_jax.lab.result import describe_run, write_result

SIDES = ("kernels", "references")
DTYPES = ("bfloat16", "float32")
_PACKAGES = ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "jax-rocm7-pjrt")


class Request(NamedTuple):
    """Cases to compile, at the 8B's sizes."""

    dtypes: Sequence[str] = DTYPES  # dtypes of activations
    sides: Sequence[str] = SIDES  # of `SIDES`: with Pallas kernels, or with the references
    only: Sequence[str] = ()  # names of cases; empty for all


class CompiledProgram(NamedTuple):
    """A program on one GPU, compiled."""

    entry: Place  # the scheduled program
    # resources of each Pallas kernel; on AMD without kernels that a program before it has, too
    kernels: list[KernelResources]

    @property
    def launches(self) -> int:
        """Number of kernels that it launches; a loop without a known trip count counts once."""
        return launches(self.entry)

    @property
    def bytes(self) -> int:
        """Bytes that its launches read and write, each array of a launch once; loops as in `launches`."""
        return sum(place.times * moved_bytes(place, x) for place in walk(self.entry) for x in place.instructions)

    @property
    def counted(self) -> bool:
        """True if all trip counts are known."""
        return all(place.counted for place in walk(self.entry))


def moved_bytes(place: Place, instruction: Instruction) -> int:
    """Return the bytes that a launch reads and writes; 0 for instructions that launch nothing."""
    if instruction.kernel and is_launch(instruction):
        read = sum(shape_bytes(place.shapes.get(name, "")) for name in instruction.operands)
        return read + shape_bytes(instruction.shape)
    cost = instruction_cost(place, instruction)
    return int(cost.bytes) if cost else 0


def requested(request: Request) -> Iterator[tuple[str, str, str, str, Case]]:
    """Yield name, dtype, case's name, side and case of each program of a request."""
    for dtype in request.dtypes:
        for name, case in cases(EIGHT_B, dtype).items():
            for side in request.sides:
                if not request.only or name in request.only:
                    yield f"{side}_{dtype}_{name.replace(' ', '_')}", dtype, name, side, case


def compile_cases(gpu: str, request: Request) -> dict[tuple[str, str, str], CompiledProgram]:
    """Compile cases for a GPU, in a process of their own; a backward case includes its forward pass.

    Args:
      gpu: name in `GPUS`.
      request: what to compile.

    Returns:
      The programs by dtype, case's name and side.

    Raises:
      InputError: the packages of the compiler are missing, or the compiler refuses a program.
      ValueError: the compiler left no resources of a kernel.
    """
    words = json.dumps(request._asdict())
    with run_worker("cases", gpu, (words,), f"The kernels cannot be compiled for {gpu}") as folder:
        programs = {
            (dtype, case, side): read_program(name, gpu, folder) for name, dtype, case, side, _ in requested(request)
        }
    launched = {x.kernel for program in programs.values() for place in walk(program.entry) for x in place.instructions}
    described = {kernel.name for program in programs.values() for kernel in program.kernels}
    if missing := launched - described - {""}:
        raise ValueError(f"The compiler for {gpu} left no resources of {', '.join(sorted(missing))}.")
    return programs


def program_files(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the file of a program's HLO, and the folder of its code objects on AMD."""
    return folder / f"{name}.hlo", folder / name


def read_program(name: str, gpu: str, folder: Path) -> CompiledProgram:
    """Read a program that `cross_compile.compile_program` wrote."""
    text, objects = program_files(folder, name)
    entry = entry_place(parse(text.read_text(encoding="utf-8")))
    pallas = {instruction.kernel for place in walk(entry) for instruction in place.instructions}
    every = read_resources(name, find_toolchain(gpu), GPUS[gpu].architecture, folder / DUMP, objects)
    kernels = [kernel._replace(name=kernel.name.partition("__")[0]) for kernel in every]  # name__1, … in one program
    return CompiledProgram(entry, [kernel for kernel in kernels if kernel.name in pallas])


def bench_kernels(names: Sequence[str], output: str | None) -> dict[str, Any]:
    """Compile all cases at the 8B's sizes with kernels and with references, print a table for each GPU, and write them.

    Args:
      names: names in `GPUS`; empty for all whose compilers are installed.
      output: JSON file, written after each GPU; None for no file.

    Returns:
      What was written: `gpus`, by name the cases and kernels (`_report`).

    Raises:
      InputError: a name is unknown, or its compiler is missing; or no compiler is installed.
    """
    for name in names:
        check_gpu(name)
        find_toolchain(name)
    names = names or [name for name in GPUS if _is_installed(name)]
    if not names:
        raise InputError("No compiler for GPUs is installed. Install one with pip install 'zaya-jax[compile-cuda]' or "
                         "pip install 'zaya-jax[compile-rocm]'.")  # fmt: skip
    result = describe_run("compiled kernels", f"the 8B's: {EIGHT_B}", "the references", _PACKAGES)
    result["gpus"] = {}
    for gpu in names:
        result["gpus"][gpu] = report = _report(gpu)
        print("\n".join(_table(gpu, report)), flush=True)
        write_result(result, output)
    return result


def _is_installed(name: str) -> bool:
    try:
        find_toolchain(name)
    except InputError:
        return False
    return True


def _report(gpu: str) -> dict[str, Any]:
    """Compile all cases for a GPU, and describe them.

    Returns:
      `cases`, a list with the minimum bytes of each case, and for each side `launches`, `bytes` and `counted`
      (`CompiledProgram`); `kernels`, a list with the resources of each kernel, of which there may be variants.
    """
    request = Request()
    programs = compile_cases(gpu, request)
    rows, kernels = [], set[tuple[str, KernelResources]]()
    for dtype in request.dtypes:
        every = cases(EIGHT_B, dtype)
        for name, case in every.items():
            least = case.bytes + (every[name.removesuffix(" backward")].bytes if case.backward else 0)
            row: dict[str, Any] = {"case": name, "dtype": dtype, "least_bytes": least}
            for side in request.sides:
                program = programs[dtype, name, side]
                row[side] = {"launches": program.launches, "bytes": program.bytes, "counted": program.counted}
                kernels |= {(dtype, kernel) for kernel in program.kernels}
            rows.append(row)
    ordered = sorted(kernels, key=lambda item: (item[1].name, item))
    return {"cases": rows, "kernels": [{"dtype": dtype, **kernel._asdict()} for dtype, kernel in ordered]}


def _table(gpu: str, report: dict[str, Any]) -> Iterator[str]:
    spills = "spilled bytes" if GPUS[gpu].platform == "cuda" else "spilled registers"
    yield f"{gpu}: launches, and bytes as a multiple of the minimum; '+': loops of unknown length count once"
    yield f"  {'case':<26}{'dtype':<10}{'kernels':>18}{'references':>18}"
    for row in report["cases"]:
        sides = (f"{row[side]['launches']}{'' if row[side]['counted'] else '+'}, "
                 f"{row[side]['bytes'] / row['least_bytes']:.2f} ×" for side in SIDES)  # fmt: skip
        yield f"  {row['case']:<26}{row['dtype']:<10}" + "".join(f"{side:>18}" for side in sides)
    yield f"  {'kernel':<36}{'dtype':<10}{'registers':>10}{'shared memory':>15}{spills:>19}{'scratch':>9}{'threads':>9}"
    for kernel in report["kernels"]:
        yield (f"  {kernel['name']:<36}{kernel['dtype']:<10}{kernel['registers']:>10}{kernel['shared'] / 1024:>11.1f} "
               f"KiB{kernel['vector_spills'] + kernel['scalar_spills']:>19}{kernel['scratch']:>7} B"
               f"{kernel['threads']:>9}")  # fmt: skip
