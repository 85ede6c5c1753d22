"""Compile for a GPU that need not be here, in a process that has the environment of its compiler."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.predict.compilers.gpus import GPUS, target_config
from zaya_jax.lab.predict.compilers.kernels import program_files
from zaya_jax.lab.predict.compilers.stand_ins import load_stand_ins
from zaya_jax.lab.predict.compilers.toolchain import CODE_OBJECTS, find_toolchain, silence_plugins


def load_compiler(name: str) -> None:
    """Make the compiler for a GPU of `GPUS` usable in this process, which must have its `toolchain.environment`."""
    toolchain = find_toolchain(name)
    silence_plugins()
    if toolchain.platform == "rocm":
        load_stand_ins(toolchain.plugin)


def gpu_devices(name: str, devices: int) -> Any:
    """Return devices that can be compiled for, but not run on."""
    node = min(devices, HARDWARE[name].node_size)
    shape = f"{devices // node}x1x{node}"  # NVLink domains or nodes × hosts of each × devices of each host
    platform = GPUS[name].platform
    return topologies.get_topology_desc(platform=platform, target_config=target_config(name), topology=shape).devices


def compile_traced(trace: Callable[[], Any], name: str, mesh: Any) -> Any:
    """Compile what `trace` returns for a GPU of `GPUS`, on a `mesh` of `gpu_devices`."""
    # From jax 0.12 on, the lowering of Triton kernels asks this mesh for the device.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return trace().lower(lowering_platforms=(GPUS[name].platform,)).compile()


def compile_program(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    gpu: str,
    folder: Path,
    donated: Sequence[int] = (),
) -> None:
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
