"""Compile a phase's step for a GPU: `python -m zaya_jax.machine.compilers.worker CONFIG PHASE GPU DEVICES FOLDER`."""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_jax.config import load_config
from zaya_jax.config.stages import largest_stage
from zaya_jax.data.convert import end_with_parent
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.machine.compilers.compiled import FACTS, STEP, program_memory
from zaya_jax.machine.compilers.gpus import GPUS, target_config
from zaya_jax.machine.compilers.stand_ins import load_stand_ins
from zaya_jax.machine.compilers.toolchain import find_toolchain, silence_plugins


def main(path: str, phase: int, name: str, devices: int, folder: str) -> None:
    """Write the scheduled program and the compiler's figures of a step into `folder`."""
    end_with_parent(os.getppid())
    load_compiler(name)
    import jax

    from zaya_jax.ops.registry import select_kernels
    from zaya_jax.train.program import Programs

    config = load_config(path)
    if config.train.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    mesh_devices = gpu_devices(name, devices)
    kernels = select_kernels(GPUS[name].target, config.model, config.train.compute_dtype)
    program = Programs(config, kernels, mesh_devices)[phase]
    compiled = compile_traced(lambda: program.trace(largest_stage(config, phase)), name, program.placement.mesh)
    (Path(folder) / STEP).write_text(compiled.as_text(), encoding="utf-8")
    facts = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    (Path(folder) / FACTS).write_text(json.dumps(program_memory(compiled) | facts), encoding="utf-8")


def compile_traced(trace: Callable[[], Any], name: str, mesh: Any) -> Any:
    """Compile what `trace` returns for a GPU of `GPUS`, on a `mesh` of `gpu_devices`."""
    import jax

    # From jax 0.12 on, the lowering of Triton kernels asks this mesh for the device.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return trace().lower(lowering_platforms=(GPUS[name].platform,)).compile()


def load_compiler(name: str) -> None:
    """Make the compiler for a GPU of `GPUS` usable in this process, which must have its `toolchain.environment`."""
    toolchain = find_toolchain(name)
    silence_plugins()
    if toolchain.platform == "rocm":
        load_stand_ins(toolchain.plugin)


def gpu_devices(name: str, devices: int) -> Any:
    """Return devices that can be compiled for, but not run on."""
    from jax.experimental import topologies

    node = min(devices, HARDWARE[name].node_size)
    shape = f"{devices // node}x1x{node}"  # NVLink domains or nodes × hosts of each × devices of each host
    platform = GPUS[name].platform
    return topologies.get_topology_desc(platform=platform, target_config=target_config(name), topology=shape).devices


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
