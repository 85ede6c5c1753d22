"""Registers, spills, shared memory, launch sizes and waves of each kernel that a compiler made, from its files."""

import itertools
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.lab.predict.compilers.gpus import GPUS, Gpu
from zaya_jax.lab.predict.compilers.toolchain import DUMP, find_toolchain

_THUNK = re.compile(
    r"\] (\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+) bytes"
)
_MOSAIC_LAUNCH = re.compile(r"gpu\.launch .* in \(%\w+ = %c(\d+),.*\) dynamic_shared_memory_size %c(\d+)_i32")
_MOSAIC_SUFFIX = "_mosaic_gpu_kernel"
_PTXAS = re.compile(
    r"Function properties for (\S+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*?Used (\d+) registers"
)
_DEFINITION = re.compile(r'define .*?@"?([^"(]+)"?\(')
# The head of a note: size of its owner's name, size of its content, type, and name.
# AMD's compute units, from the documents of the instruction sets CDNA 3 and CDNA 4, and LLVM's AMDGPU backend.
_SIMDS, _WAVE = 4, 64  # SIMDs, and threads of a wave
_WAVES = 8  # most waves of a SIMD
_VECTOR, _SCALAR = (512, 8), (800, 16)  # registers that the waves of a SIMD share, and how many are allocated at once
_PARTS = 128  # parts of the shared memory that are allocated at once
_NOTE = re.compile(rb"\x07\0{3}(?P<size>.{4})\x20\0{3}AMDGPU\0\0", re.DOTALL)


class KernelResources(NamedTuple):
    """Resources of one kernel of a compiled step."""

    name: str  # as the compiler calls it
    registers: int  # vector registers of a thread, AMD's accumulation registers included
    vector_spills: int  # on AMD vector registers that are spilled; on NVIDIA bytes
    scalar_spills: int  # scalar registers that are spilled; always 0 on NVIDIA
    scratch: int  # bytes of a thread in memory, spills included
    shared: int  # bytes of shared memory (LDS) of a block
    threads: int  # of a block; 0 if unknown
    is_atomic: bool = False  # whether it adds with atomic operations, so that the sum's last bits vary between runs
    scalars: int = 0  # AMD's scalar registers of a wave

    @property
    def family(self) -> str:
        """Name of the function that it was made from: the compiler calls those of one program name, name__1, …."""
        return self.name.partition("__")[0]

    @property
    def spills(self) -> int:
        """What is spilled: registers on AMD, bytes on NVIDIA."""
        return self.vector_spills + self.scalar_spills


def resource_heads(gpu: str) -> tuple[str, ...]:
    """Return the heads of a table of `resource_cells`."""
    spilled = "bytes" if GPUS[gpu].platform == "cuda" else "registers"
    waves = () if GPUS[gpu].platform == "cuda" else ("waves per SIMD, and their limit",)
    return "registers", "shared memory (KiB)", f"spilled {spilled}", "scratch (B)", "threads", *waves


def resource_cells(kernel: KernelResources, gpu: str) -> tuple[str, ...]:
    """Return the resources of a kernel as texts."""
    counts = map(str, (kernel.spills, kernel.scratch, kernel.threads))
    cells = str(kernel.registers), f"{kernel.shared / 1024:.1f}", *counts
    if GPUS[gpu].platform == "cuda":
        return cells
    waves, limit = waves_per_simd(kernel, GPUS[gpu])
    return *cells, f"{waves:g}, {limit}"


def waves_per_simd(kernel: KernelResources, gpu: Gpu) -> tuple[float, str]:
    """Return how many waves of a kernel run at once on a SIMD of an AMD GPU, on average, and what limits them.

    That is 'vector registers', 'scalar registers', 'shared memory', or 'waves' where the SIMD is full.
    """
    waves, part = max(kernel.threads // _WAVE, 1), gpu.shared // _PARTS
    blocks = {"waves": _SIMDS * _WAVES // waves}
    for name, count, (most, step) in (("vector", kernel.registers, _VECTOR), ("scalar", kernel.scalars, _SCALAR)):
        blocks[f"{name} registers"] = _SIMDS * (most // (max(-(-count // step), 1) * step)) // waves
    blocks["shared memory"] = _PARTS // max(-(-kernel.shared // part), 1)
    limit = min(blocks, key=lambda name: blocks[name])
    return blocks[limit] * waves / _SIMDS, limit


def read_resources(program: str, gpu: str, folder: Path, objects: Path) -> list[KernelResources]:
    """Return the resources of a program's kernels, from the folders of the compiler and of code objects."""
    dump, (_, assembler) = folder / DUMP, find_toolchain(gpu)
    launches, atomic = _launches(dump, program) | _mosaic_launches(objects), _atomic_kernels(dump, program)
    kernels = _amd(objects) if assembler is None else _nvidia(dump, program, objects, assembler, GPUS[gpu].architecture)
    found = []
    for kernel in kernels:
        if kernel.name in launches:
            shared, threads = launches[kernel.name]
            shared, is_atomic = max(kernel.shared, shared), kernel.name in atomic
            found.append(kernel._replace(shared=shared, threads=threads, is_atomic=is_atomic))
    return sorted(found)


def _launches(dump: Path, program: str) -> dict[str, tuple[int, int]]:
    """Return bytes of shared memory and threads of each kernel that the program launches."""
    launches = {}
    for path in dump.glob(f"*.jit_{program}.*thunk_sequence.txt"):
        for name, *sizes, shared in _THUNK.findall(path.read_text(encoding="utf-8")):
            launches[name] = int(shared), int(sizes[3]) * int(sizes[4]) * int(sizes[5])
    return launches


def _mosaic_launches(objects: Path) -> dict[str, tuple[int, int]]:
    """Return bytes of shared memory and threads of each kernel of Pallas' Mosaic backend."""
    logs = {path: path.read_text(encoding="utf-8") for path in objects.glob("*.mlir-passes.log")}
    found = {path.name.rpartition("_")[0]: _MOSAIC_LAUNCH.search(text) for path, text in logs.items()}
    return {name: (int(match[2]), int(match[1])) for name, match in found.items() if match}


def _atomic_kernels(dump: Path, program: str) -> set[str]:
    """Return the kernels whose LLVM code has atomic operations, before the compiler rewrites them."""
    kernels, kernel = set(), ""
    for path in dump.glob(f"*.jit_{program}.*ir-no-opt.ll"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := _DEFINITION.match(line):
                kernel = match[1]
            elif "atomicrmw fadd" in line or "cmpxchg " in line:  # sums of integers are exact
                kernels.add(kernel)
    return kernels


def _nvidia(dump: Path, program: str, objects: Path, assembler: Path, architecture: str) -> Iterator[KernelResources]:
    def assemble(path: Path) -> str:
        command = [str(assembler), "-v", f"-arch={architecture}a", "-o", "/dev/null", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise InputError(f"{assembler} rejects a kernel: {done.stderr.strip()[:300]}")
        return done.stderr

    # The PTX file of XLA's generated kernels is empty if there are none.
    files = [path for path in sorted(dump.glob(f"*.jit_{program}.*ptx")) if path.stat().st_size]
    with ThreadPoolExecutor(2) as pool:
        mosaic = (path.read_text(encoding="utf-8") for path in sorted(objects.glob("*.ptxas")))
        for text in itertools.chain(pool.map(assemble, files), mosaic):
            for name, stack, stores, _, registers in _PTXAS.findall(text):
                kernel = name.removesuffix(_MOSAIC_SUFFIX)
                yield KernelResources(kernel, int(registers), int(stores), 0, int(stack), 0, 0)


def _amd(objects: Path) -> Iterator[KernelResources]:
    """Yield the resources in ELF files, from the notes that LLVM documents for AMDGPU."""
    import msgpack

    for elf in (path.read_bytes() for path in sorted(objects.glob("*.hsaco"))):
        contents = (elf[x.end() : x.end() + int.from_bytes(x["size"], "little")] for x in _NOTE.finditer(elf))
        notes = (msgpack.unpackb(content, strict_map_key=False)["amdhsa.kernels"] for content in contents)
        for kernel in itertools.chain.from_iterable(notes):
            vector, scalar = (kernel.get(f".{kind}gpr_spill_count", 0) for kind in ("v", "s"))
            scratch, shared = kernel[".private_segment_fixed_size"], kernel[".group_segment_fixed_size"]
            found = KernelResources(kernel[".name"], kernel[".vgpr_count"], vector, scalar, scratch, shared, 0)
            yield found._replace(scalars=kernel[".sgpr_count"])
