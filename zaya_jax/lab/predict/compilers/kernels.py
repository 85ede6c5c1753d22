"""Compile the kernel cases for GPUs, and report what each kernel needs and what each case launches and moves."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.lab.kernel_cases import EIGHT_B, Case, cases
from zaya_jax.lab.predict.compilers.compiled import run_worker
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.hlo import Place, parse, walk
from zaya_jax.lab.predict.compilers.predict import launched, launches
from zaya_jax.lab.predict.compilers.resources import KernelResources, read_resources, resource_cells, resource_heads
from zaya_jax.lab.predict.compilers.toolchain import find_toolchain, program_files
from zaya_jax.lab.result import describe_run, print_tables, write_result
from zaya_jax.run.table import Table

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
    kernels: list[KernelResources]  # of Pallas kernels; on AMD without those of a program before it

    @property
    def launches(self) -> int:
        """Number of kernels that it launches; a loop without a known trip count counts once."""
        return launches(self.entry)

    @property
    def bytes(self) -> int:
        """Bytes that its launches read and write, each array of a launch once; loops as in `launches`."""
        return int(sum(place.times * work.bytes for place, _, _, work in launched(self.entry)))

    @property
    def counted(self) -> bool:
        """True if all trip counts are known."""
        return all(place.counted for place in walk(self.entry))


def requested(request: Request) -> Iterator[tuple[str, str, str, str, Case]]:
    """Yield name, dtype, case's name, side and case of each program of a request."""
    for dtype in request.dtypes:
        for name, case in cases(EIGHT_B, dtype).items():
            for side in request.sides:
                if not request.only or name in request.only:
                    yield f"{side}_{dtype}_{name.replace(' ', '_')}", dtype, name, side, case


def compile_cases(gpu: str, request: Request) -> dict[tuple[str, str, str], CompiledProgram]:
    """Compile cases for a GPU, in another process, and return the programs by dtype, case's name and side.

    A backward case includes its forward pass. Raises like `run_worker`; ValueError if a kernel's resources are missing.
    """
    words = json.dumps(request._asdict())
    with run_worker("cases", gpu, (words,), f"The kernels cannot be compiled for {gpu}") as folder:
        programs = {
            (dtype, case, side): read_program(name, gpu, folder) for name, dtype, case, side, _ in requested(request)
        }
    ran = {x.kernel for program in programs.values() for place in walk(program.entry) for x in place.instructions}
    described = {kernel.name for program in programs.values() for kernel in program.kernels}
    if missing := ran - described - {""}:
        raise ValueError(f"The compiler for {gpu} left no resources of {', '.join(sorted(missing))}.")
    return programs


def read_program(name: str, gpu: str, folder: Path) -> CompiledProgram:
    """Read a program that `toolchain.compile_program` wrote."""
    text, objects = program_files(folder, name)
    entry = parse(text.read_text(encoding="utf-8"))
    pallas = {instruction.kernel for place in walk(entry) for instruction in place.instructions}
    kernels = (kernel for kernel in read_resources(name, gpu, folder, objects) if kernel.family in pallas)
    return CompiledProgram(entry, [kernel._replace(name=kernel.family) for kernel in kernels])


def bench_kernels(names: Sequence[str], output: str | None) -> dict[str, Any]:
    """Compile all cases at the 8B's sizes, with kernels and with references, for GPUs of these `names`.

    Without names, these are all whose compilers are installed. For each GPU a table is printed, and the result written
    to the JSON file `output`, if it is not None: in `gpus`, by name the cases and kernels (`_report`). InputError if a
    name is unknown, its compiler is missing, or none is installed.
    """
    for name in names:
        find_toolchain(name)
    installed = list(names)
    for name in () if names else GPUS:
        with contextlib.suppress(InputError):
            find_toolchain(name)
            installed.append(name)
    if not installed:
        install = " or ".join(f"pip install 'zaya-jax[compile-{platform}]'" for platform in ("cuda", "rocm"))
        raise InputError(f"No compiler for GPUs is installed. Install one with {install}.")
    result = describe_run("compiled kernels", f"the 8B's: {EIGHT_B}", "the references", _PACKAGES)
    result["gpus"] = {}
    for gpu in installed:
        result["gpus"][gpu] = report = _report(gpu)
        print_tables(_tables(gpu, report))
        write_result(result, output)
    return result


def _report(gpu: str) -> dict[str, Any]:
    """Compile all cases for a GPU; describe `cases` with minimum bytes and each side, and the variants of `kernels`."""
    programs = compile_cases(gpu, Request())
    rows, kernels = [], set[tuple[str, KernelResources]]()
    for dtype in DTYPES:
        every = cases(EIGHT_B, dtype)
        for name, case in every.items():
            least = case.bytes + (every[name.removesuffix(" backward")].bytes if case.backward else 0)
            row: dict[str, Any] = {"case": name, "dtype": dtype, "least_bytes": least}
            for side in SIDES:
                program = programs[dtype, name, side]
                row[side] = {"launches": program.launches, "bytes": program.bytes, "counted": program.counted}
                kernels |= {(dtype, kernel) for kernel in program.kernels}
            rows.append(row)
    ordered = sorted(kernels, key=lambda item: (item[1].name, item))
    return {"cases": rows, "kernels": [{"dtype": dtype, **kernel._asdict()} for dtype, kernel in ordered]}


def _tables(gpu: str, report: dict[str, Any]) -> Iterator[Table]:
    def side_text(row: dict[str, Any], side: str) -> str:
        unknown, multiple = "" if row[side]["counted"] else "+", row[side]["bytes"] / row["least_bytes"]
        return f"{row[side]['launches']}{unknown}, {multiple:.2f} ×"

    title = f"{gpu}: launches, and bytes as a multiple of the minimum; '+': loops of unknown length count once"
    cells = [[row["case"], row["dtype"], *(side_text(row, side) for side in SIDES)] for row in report["cases"]]
    yield Table(title, ["case", "dtype", *SIDES], cells)
    cells = []
    for row in report["kernels"]:
        kernel = KernelResources(**{key: value for key, value in row.items() if key != "dtype"})
        cells.append([kernel.name, row["dtype"], *resource_cells(kernel, gpu)])
    yield Table(f"{gpu}: kernels", ["kernel", "dtype", *resource_heads(gpu)], cells)
