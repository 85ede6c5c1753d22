"""Compile a phase's train step for a GPU in a subprocess, and parse the compiler's output."""

import functools
import json
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zaya_jax.config import Config
from zaya_jax.config.checks import require
from zaya_jax.config.stages import largest_stage
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.machine.compilers.cross_compile import compile_traced, gpu_devices, load_compiler
from zaya_jax.machine.compilers.gpus import GPUS
from zaya_jax.machine.compilers.hlo import Place, entry_place, parse
from zaya_jax.machine.compilers.resources import KernelResources, read_resources
from zaya_jax.machine.compilers.toolchain import CODE_OBJECTS, DUMP, environment, find_toolchain
from zaya_jax.ops.registry import select_kernels
from zaya_jax.train.program import Programs

# Parts of a line that says why a compiler failed, the most telling first.
_TELLING = ("is a stand-in", "RESOURCE_EXHAUSTED", "Check failed", "Error")


class CompiledStep(NamedTuple):
    """A training step, compiled for a GPU.

    Attributes:
      gpu: name in `GPUS`.
      devices: number of devices.
      memory: bytes on each device: `arguments`, of which `donated` are reused for outputs, `outputs`, `temporaries`.
      entry: the scheduled program.
      kernels: resources of each kernel.
      seconds: time it took to trace and compile.
      host_bytes: peak memory of the process that compiled.
    """

    gpu: str
    devices: int
    memory: dict[str, int]
    entry: Place
    kernels: list[KernelResources]
    seconds: float
    host_bytes: int

    @property
    def peak_memory(self) -> int:
        """Bytes that the step needs on each device."""
        return peak_bytes(self.memory)


def program_memory(compiled: Any) -> dict[str, int]:
    """Return the bytes of a compiled program on each device, as in `CompiledStep.memory`."""
    needs = compiled.memory_analysis()
    return {
        "arguments": needs.argument_size_in_bytes,
        "temporaries": needs.temp_size_in_bytes,
        "outputs": needs.output_size_in_bytes,
        "donated": needs.alias_size_in_bytes,
    }


def peak_bytes(memory: Mapping[str, int]) -> int:
    """Return the bytes that a program needs on each device; donated arguments are counted once."""
    return memory["arguments"] + memory["outputs"] - memory["donated"] + memory["temporaries"]


def check_gpu(name: str) -> None:
    """Raise `InputError` if there is no compiler for a GPU of this name."""
    require(name in GPUS, "--compile-for", name, f"one of {', '.join(GPUS)}")


def check_devices(gpu: str, devices: int) -> None:
    """Raise `InputError` unless `gpu` is in `GPUS`, and the devices fill nodes, or part of one."""
    check_gpu(gpu)
    node = HARDWARE[gpu].node_size
    if devices > node and devices % node:
        raise InputError(f"--devices is {devices}, but must be at most {node} or a multiple of {node} with "
                         f"--compile-for {gpu}, whose nodes have {node} GPUs.")  # fmt: skip


def compile_step(config: Config, phase: int, gpu: str, devices: int) -> CompiledStep:
    """Compile the largest step of a phase for `devices` GPUs.

    Args:
      config: configuration of the run.
      phase: index of the phase.
      gpu: name in `GPUS`.
      devices: number of devices.

    Raises:
      InputError: the packages of the compiler are missing, or the compiler refuses the step.
    """
    toolchain, start = find_toolchain(gpu), time.monotonic()
    work = functools.partial(scheduled_step, config, phase, gpu, devices)
    failure = f"The step of {config.phase_key(phase)} cannot be compiled for {devices} {gpu}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made = run_worker(work, environment(gpu, folder, config.measurements), failure)
        kernels = read_resources("train_step", toolchain, GPUS[gpu].architecture, folder / DUMP, folder / CODE_OBJECTS)
    entry, seconds = entry_place(parse(made["text"])), round(time.monotonic() - start, 1)
    return CompiledStep(gpu, devices, made["memory"], entry, kernels, seconds, made["host_bytes"])


def scheduled_step(config: Config, phase: int, gpu: str, devices: int) -> dict[str, Any]:
    """Compile a step in a process with the environment of the GPU's compiler; returns its text and `memory`."""
    load_compiler(gpu)
    if config.train.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    kernels = select_kernels(GPUS[gpu].target, config.model, config.train.compute_dtype)
    program = Programs(config, kernels, gpu_devices(gpu, devices))[phase]
    compiled = compile_traced(lambda: program.trace(largest_stage(config, phase)), gpu, program.placement.mesh)
    return {"text": compiled.as_text(), "memory": program_memory(compiled)}


def run_worker(work: Callable[[], dict[str, Any]], environment: Mapping[str, str], failure: str) -> dict[str, Any]:
    """Run a function in a process of its own.

    Args:
      work: the function, which can be pickled and returns JSON values.
      environment: of the process.
      failure: start of the message if the process fails.

    Returns:
      What it returned, with the peak memory of the process, `host_bytes`.

    Raises:
      InputError: the process failed.
    """
    process = subprocess.run([sys.executable, "-m", "zaya_jax.machine.compilers.worker"], input=pickle.dumps(work),
                             capture_output=True, check=False, env=environment)  # fmt: skip
    if process.returncode:
        raise InputError(f"{failure}: {failure_reason(process.returncode, process.stderr.decode(errors='replace'))}")
    return json.loads(process.stdout.splitlines()[-1])


def failure_reason(status: int, stderr: str) -> str:
    """Return why a compiler's process failed: the signal that ended it, and the most telling line of its output."""
    lines = stderr.strip().splitlines()
    telling = [line for sign in _TELLING for line in lines if sign in line]
    line = (telling or lines[-1:] or ["it printed nothing"])[0].strip()[:400]
    return line if status >= 0 else f"{signal.Signals(-status).name} ended the compiler: {line}"
