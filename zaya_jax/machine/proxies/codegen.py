"""Compile a program's kernels to machine code for GPUs that this machine does not need to have.

The program is lowered for a platform, and the Triton IR of each kernel is compiled with the `triton` package (extra:
`test`), as on a real device. The numbers of registers, shared bytes and spills are therefore exact; speed is unknown.
"""

import dataclasses
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from zaya_jax.ops.target import Target


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU to compile for.

    Attributes:
      target: the target that operations select kernels for.
      backend: Triton's name for the vendor's compiler.
      architecture: Triton's name for the instruction set.
      warp: threads per warp.
      shared: maximum bytes of shared memory per program.
    """

    target: Target
    backend: str
    architecture: str | int
    warp: int
    shared: int


GPUS = {
    "gfx942": Gpu(Target("rocm", "gfx942", "gfx942"), "hip", "gfx942", 64, 64 * 1024),
    "gfx950": Gpu(Target("rocm", "gfx950", "gfx950"), "hip", "gfx950", 64, 160 * 1024),
    "sm_90": Gpu(Target("cuda", "NVIDIA H200", "sm_90"), "cuda", 90, 32, 227 * 1024),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a lowered program."""

    name: str
    bytecode: bytes  # Triton IR
    warps: int
    stages: int  # of the software pipeline


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """The resources that a compiled kernel uses.

    Attributes:
      registers: 32-bit registers per thread (on AMD vector registers, including accumulation registers).
      shared: bytes of shared memory per program (LDS on AMD).
      spills: 32-bit registers per thread that are spilled to memory.
    """

    registers: int
    shared: int
    spills: int


def lower(function: Callable[..., Any], *arrays: Any, target: Target) -> Any:
    """Jit `function` and lower it for `target`, which this machine does not need to have.

    Args:
      function: function of arrays.
      arrays: its arguments: arrays or `jax.ShapeDtypeStruct`s.
      target: target with the platform 'cuda' or 'rocm'.

    Returns:
      The `jax.stages.Lowered` program.
    """
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), **abstract_device(target))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=(target.platform,))


def abstract_device(target: Target) -> dict[str, Any]:
    """Return the arguments of `AbstractMesh` that make jax lower kernels for `target`.

    jax 0.11 and later need a description of the device; earlier versions need nothing.
    """
    if jax.__version_info__ < (0, 11):
        return {}
    device = jax.sharding.AbstractDevice(device_kind=target.device_kind, num_cores=132, platform="gpu")  # type: ignore
    return {"abstract_device": device}


def kernels_of(lowered: Any) -> list[Kernel]:
    """Return the kernels of a lowered program in order, once per call."""
    functions = {}
    for operation in lowered.compiler_ir().operation.regions[0].blocks[0].operations:
        functions[operation.attributes["sym_name"].value] = operation.operation
    kernels = []
    for operation in _walk(functions["main"], functions):
        if operation.name != "stablehlo.custom_call":
            continue
        if "__gpu$xla.gpu.triton" not in str(operation.attributes["call_target_name"]):
            continue
        attributes = operation.attributes
        config = attributes["mhlo.backend_config" if "mhlo.backend_config" in attributes else "backend_config"]
        name, ir = (config[key] for key in ("name", "ir"))
        warps, stages = (_number(config[key]) for key in ("num_warps", "num_stages"))
        kernels.append(Kernel(name.value, ir.value_bytes, warps, stages))
    return kernels


def _number(attribute: Any) -> int:
    return int(str(attribute).split(":", maxsplit=1)[0])


def _walk(operation: Any, functions: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the operations of a function, including those of the functions it calls."""
    yield operation
    if operation.name == "func.call":
        yield from _walk(functions[operation.attributes["callee"].value], functions)
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk(inner.operation, functions)


def compile_kernel(kernel: Kernel, gpu: Gpu) -> MachineCode:
    """Compile `kernel` for `gpu` with the `triton` package.

    Raises:
      ModuleNotFoundError: the package is not installed (extra `test`).
    """
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget(gpu.backend, gpu.architecture, gpu.warp)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ttir"
        source.write_text(_text(kernel.bytecode))
        source.write_text(_simplified(source, target, options))
        compiled = triton.compile(str(source), target=target, options=options)
    if gpu.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers = _largest(r"\.vgpr_count:\s*(\d+)", text)
        spills = _largest(r"\.vgpr_spill_count:\s*(\d+)", text)
    else:
        registers, spills = _assembled(compiled.asm["ptx"], gpu)
    return MachineCode(registers, compiled.metadata.shared, spills)


def _simplified(source: pathlib.Path, target: Any, options: Mapping[str, int]) -> str:
    """Run the compiler's first stage, which `triton.compile` skips for files, and return the Triton IR as text."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import Language
    from triton.compiler.compiler import make_backend

    backend: Any = make_backend(target)  # Any: vendors' methods have more arguments than the declared ones
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(str(source), context)
    module.context = context
    stages: dict[str, Any] = {}
    backend.add_stages(stages, backend.parse_options(dict(options)), Language.TRITON)
    return str(stages["ttir"](module, {}))


def _text(bytecode: bytes) -> str:
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    context = ir.Context()
    dialect.register_dialect(context)
    context.load_all_available_dialects()
    with context:
        return str(ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=False))


def _assembled(ptx: str, gpu: Gpu) -> tuple[int, int]:
    """Return the registers and the spilled registers that `ptxas`, which `triton` contains, reports."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{gpu.architecture}a", "--output-file",
                   str(source.with_suffix(".cubin")), str(source)]  # fmt: skip
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr  # noqa: S603
    return _largest(r"Used (\d+) registers", log), _largest(r"(\d+) bytes spill stores", log) // 4


def _largest(pattern: str, text: str) -> int:
    return max(int(number) for number in re.findall(pattern, text))
