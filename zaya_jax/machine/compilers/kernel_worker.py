"""Compile kernel cases for a GPU: `python -m zaya_jax.machine.compilers.kernel_worker GPU REQUEST FOLDER`."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from zaya_jax.data.convert import end_with_parent
from zaya_jax.machine.compilers.gpus import GPUS
from zaya_jax.machine.compilers.kernels import Request, program_files, requested
from zaya_jax.machine.compilers.toolchain import CODE_OBJECTS
from zaya_jax.machine.compilers.worker import compile_traced, gpu_devices, load_compiler
from zaya_jax.machine.kernel_cases import EIGHT_B, passes
from zaya_jax.ops.registry import KernelSelection, select_kernels


def main(gpu: str, request: str, folder: str) -> None:
    """Compile the cases of a `Request`, given as JSON, and write them into `folder`."""
    end_with_parent(os.getppid())
    load_compiler(gpu)
    target = GPUS[gpu].target
    for name, dtype, _, side, case in requested(Request(**json.loads(request))):
        kernels = select_kernels(target, EIGHT_B.model, dtype) if side == "kernels" else KernelSelection(target)
        function, arguments = passes(case, kernels)
        donated = () if case.backward else tuple(range(case.held))
        compile_program(name, function, arguments, gpu, Path(folder), donated)


def compile_program(
    name: str, function: Callable[..., Any], arguments: Sequence[Any], gpu: str, folder: Path,
    donated: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Compile a function for one GPU, and write what `kernels.read_program` reads.

    Args:
      name: name of the program, unique in this process.
      function: function of arrays.
      arguments: its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      gpu: name in `GPUS`, whose compiler is loaded.
      folder: folder of the compiler's `toolchain.environment`.
      donated: indices of arguments that are donated.
    """
    mesh = jax.sharding.Mesh(gpu_devices(gpu, 1), "device")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tuple(arguments))

    def named(*arrays: Any) -> Any:
        return function(*arrays)

    named.__name__ = name
    compiled = compile_traced(lambda: jax.jit(named, donate_argnums=donated).trace(*shapes), gpu, mesh)
    text, objects = program_files(folder, name)
    text.write_text(compiled.as_text(), encoding="utf-8")
    objects.mkdir()
    # Kernels of different programs can have the same name.
    for file in (folder / CODE_OBJECTS).glob("*.hsaco"):
        file.rename(objects / file.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
