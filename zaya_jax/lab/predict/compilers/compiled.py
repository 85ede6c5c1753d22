"""Compile a phase's train step for a GPU in a subprocess, and parse the compiler's output."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.config import Config, to_yaml
from zaya_jax.config.checks import require
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.hlo import Place, entry_place, parse
from zaya_jax.lab.predict.compilers.resources import KernelResources, read_resources
from zaya_jax.lab.predict.compilers.toolchain import CODE_OBJECTS, environment

# Parts of a line that says why a compiler failed, the most telling first.
_TELLING = ("is a stand-in", "RESOURCE_EXHAUSTED", "Check failed", "Error")
STEP = "step.hlo"  # the scheduled program, from the worker
FACTS = "facts.json"  # the compiler's figures, from the worker


class CompiledStep(NamedTuple):
    """A training step, compiled for a GPU."""

    gpu: str  # name in `GPUS`
    devices: int  # number of devices
    # bytes on each device: `arguments`, of which `donated` are reused for outputs, `outputs`, `temporaries`
    memory: dict[str, int]
    entry: Place  # the scheduled program
    kernels: list[KernelResources]  # resources of each kernel
    seconds: float  # time it took to trace and compile
    host_bytes: int  # peak memory of the process that compiled

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
        most = f"at most {node} or a multiple of {node} with --compile-for {gpu}, whose nodes have {node} GPUs"
        raise InputError(f"--devices is {devices}, but must be {most}.")


def compile_step(config: Config, phase: int, gpu: str, devices: int) -> CompiledStep:
    """Compile the largest step of a phase for `devices` GPUs of a kind in `GPUS`.

    Raises:
      InputError: the packages of the compiler are missing, or the compiler refuses the step.
    """
    start = time.monotonic()
    failure = f"The step of {config.phase_key(phase)} cannot be compiled for {devices} {gpu}"
    with run_worker("step", gpu, (str(phase), str(devices)), failure, config) as folder:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        entry = entry_place(parse((folder / STEP).read_text(encoding="utf-8")))
        kernels = read_resources("train_step", gpu, folder, folder / CODE_OBJECTS)
    host_bytes = facts.pop("host_bytes")
    return CompiledStep(gpu, devices, facts, entry, kernels, round(time.monotonic() - start, 1), host_bytes)


@contextlib.contextmanager
def run_worker(
    what: str, gpu: str, arguments: Sequence[str], failure: str, config: Config | None = None
) -> Iterator[Path]:
    """Run `compile_worker` with the environment of a GPU's compiler, and yield the folder of what both wrote.

    Its arguments are `what` to compile, the `gpu`, these `arguments`, the file of `config`, if the worker needs one
    (whose key `measurements` sets flags), and the folder.

    Raises:
      InputError: the packages of the compiler are missing, or the process fails; the message starts with `failure`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = [] if config is None else [write_config(config, folder)]
        variables = environment(gpu, folder, None if config is None else config.measurements)
        run_compiler("zaya_jax.lab.compile_worker", (what, gpu, *arguments, *files, temporary), failure, variables)
        yield folder


def write_config(config: Config, folder: Path) -> str:
    """Write a configuration into a folder, and return its file."""
    path = folder / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    return str(path)


def run_compiler(module: str, arguments: Sequence[str], failure: str, variables: Mapping[str, str]) -> str:
    """Run a module that compiles with these environment variables, and return what it prints.

    Raises:
      InputError: the process fails; the message starts with `failure`.
    """
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)  # noqa: S603 (ours)
    if process.returncode:
        raise InputError(f"{failure}: {failure_reason(process.returncode, process.stderr)}")
    return process.stdout


def failure_reason(status: int, stderr: str) -> str:
    """Return why a compiler's process failed: the signal that ended it, and the most telling line of its output."""
    lines = stderr.strip().splitlines()
    telling = [line for sign in _TELLING for line in lines if sign in line]
    line = (telling or lines[-1:] or ["it printed nothing"])[0].strip()[:400]
    return line if status >= 0 else f"{signal.Signals(-status).name} ended the compiler: {line}"
