"""The process that compiles: `python -m zaya_jax.lab.compile_worker step|proof|cases GPU … FOLDER`."""

import dataclasses
import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from zaya_jax.config import Config, load_config
from zaya_jax.config.stages import largest_stage
from zaya_jax.data.prepare.workers import end_with_parent
from zaya_jax.lab.kernel_cases import EIGHT_B, passes
from zaya_jax.lab.predict.compilers.compiled import FACTS, STEP, program_memory
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.kernels import Request, requested
from zaya_jax.lab.predict.compilers.toolchain import compile_program, compile_traced, gpu_devices, load_compiler
from zaya_jax.ops.kernel_table import find_table
from zaya_jax.ops.registry import KernelSelection, pins_on, select_kernels
from zaya_jax.train.program import Programs, make_programs


def compile_step(gpu: str, phase: str, devices: str, path: str, folder: str) -> None:
    """Write the scheduled program and the compiler's figures of the largest step of a phase into `folder`."""
    config, index, target = _load(path), int(phase), GPUS[gpu].target
    table, dtype = find_table(target, print), config.train.compute_dtype
    kernels, stand_ins = select_kernels(target, config.model, dtype, table, config.ops).without_libraries()
    program = Programs(config, kernels, gpu_devices(gpu, int(devices)))[index]
    compiled = compile_traced(lambda: program.trace(largest_stage(config, index)), gpu, program.placement.mesh)
    (Path(folder) / STEP).write_text(compiled.as_text(), encoding="utf-8")
    _write_facts(folder, program_memory(compiled) | {"stand_ins": stand_ins})


def prove_step(_: str, phase: str, path: str, folder: str) -> None:
    """Compile or lower the step of a phase for the devices of this process, and write which into `folder`."""
    config, index = _load(path), int(phase)
    config = dataclasses.replace(config, ops=pins_on("cpu", config.ops))
    step = make_programs(config)[index].trace(largest_stage(config, index))
    parallel = config.parallel_for(config.phases[index])
    ragged = parallel.expert > 1 and parallel.expert_exchange == "ragged"
    if ragged:
        step.lower(lowering_platforms=("rocm", "cuda"))
    else:
        step.lower().compile()
    _write_facts(folder, {"proof": "lowered" if ragged else "compiled"})


def _load(path: str) -> Config:
    config = load_config(path)
    if config.train.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    return config


def _write_facts(folder: str, facts: Mapping[str, Any]) -> None:
    host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (Path(folder) / FACTS).write_text(json.dumps({**facts, "host_bytes": host_bytes}), encoding="utf-8")


def compile_cases(gpu: str, request: str, folder: str) -> None:
    """Compile the kernel cases of a `kernels.Request`, given as JSON, and write them into `folder`."""
    target = GPUS[gpu].target
    for name, dtype, _, side, case in requested(Request(**json.loads(request))):
        kernels = select_kernels(target, EIGHT_B.model, dtype) if side == "kernels" else KernelSelection(target)
        function, arguments = passes(case, kernels)
        donated = () if case.backward else tuple(range(case.held))
        compile_program(name, function, arguments, gpu, Path(folder), donated)


def main(what: str, target: str, *arguments: str) -> None:
    """Compile; this process ends with the one that started it."""
    end_with_parent(os.getppid())
    if target in GPUS:
        load_compiler(target)
    {"step": compile_step, "proof": prove_step, "cases": compile_cases}[what](target, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
