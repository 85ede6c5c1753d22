"""Compile a phase's train step in a subprocess, for a GPU or simulated devices, and parse the compiler's output."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.config import Config, to_yaml
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.predict.compilers.gpus import GPUS, check_gpu
from zaya_jax.lab.predict.compilers.hlo import Place, parse
from zaya_jax.lab.predict.compilers.resources import KernelResources, read_resources
from zaya_jax.lab.predict.compilers.toolchain import CODE_OBJECTS, environment

# Parts of a line that says why a compiler failed, the most telling first.
_TELLING = ("is a stand-in", "RESOURCE_EXHAUSTED", "Check failed", "Error")
STEP = "step.hlo"  # the scheduled program, from the worker
FACTS = "facts.json"  # the compiler's figures, from the worker
WORKER = "zaya_jax.lab.compile_worker"  # the module that compiles
# A proof is never run, so optimisation would only cost time. The disabled pass would expand every all-to-all into one
# slice per device, which takes minutes for a thousand devices.
_SIMULATED = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_disable_hlo_passes=all_to_all_decomposer",
}


class CompiledStep(NamedTuple):
    """A training step, compiled for a GPU."""

    gpu: str  # name in `GPUS`
    devices: int  # number of devices
    memory: dict[str, int]  # bytes on each device, as in `program_memory`
    entry: Place  # the scheduled program
    kernels: list[KernelResources]  # resources of each kernel
    seconds: float  # time it took to trace and compile
    host_bytes: int  # peak memory of the process that compiled
    stand_ins: str = ""  # a sentence on kernels in whose place a GPU would run others; '' without any

    @property
    def peak_memory(self) -> int:
        """Bytes that the step needs on each device."""
        return peak_bytes(self.memory)


def program_memory(compiled: Any) -> dict[str, int]:
    """Return the bytes of a compiled program on each device; `donated` arguments are reused for outputs."""
    needs = compiled.memory_analysis()
    fields = {"arguments": "argument", "temporaries": "temp", "outputs": "output", "donated": "alias"}
    return {name: getattr(needs, f"{field}_size_in_bytes") for name, field in fields.items()}


def peak_bytes(memory: Mapping[str, int]) -> int:
    """Return the bytes that a program needs on each device; donated arguments are counted once."""
    return memory["arguments"] + memory["outputs"] - memory["donated"] + memory["temporaries"]


def check_devices(gpu: str, devices: int) -> None:
    """Raise `InputError` unless `gpu` is in `GPUS`, and the devices fill nodes, or part of one."""
    check_gpu(gpu)
    node = HARDWARE[gpu].node_size
    if devices > node and devices % node:
        most = f"at most {node} or a multiple of {node} with --compile-for {gpu}, whose nodes have {node} GPUs"
        raise InputError(f"--devices is {devices}, but must be {most}.")


def compile_step(config: Config, phase: int, gpu: str, devices: int) -> CompiledStep:
    """Compile the largest step of a phase for `devices` GPUs of a kind in `GPUS`; raises like `run_worker`."""
    start = time.monotonic()
    failure = f"The step of {config.phase_key(phase)} cannot be compiled for {devices} {gpu}"
    with run_worker("step", gpu, (str(phase), str(devices)), failure, config) as folder:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        entry = parse((folder / STEP).read_text(encoding="utf-8"))
        kernels = read_resources("train_step", gpu, folder, folder / CODE_OBJECTS)
    others = {name: facts.pop(name) for name in ("host_bytes", "stand_ins")}
    return CompiledStep(gpu, devices, facts, entry, kernels, round(time.monotonic() - start, 1), **others)


def prove(config: Config, phase: int, devices: int) -> dict[str, Any]:
    """Compile the step of a phase for simulated devices; raises like `run_worker`.

    Returns `proof` ("lowered" for a ragged exchange, which CPUs lack, else "compiled"), `seconds`, and peak
    `host_bytes`.
    """
    start = time.monotonic()
    failure = f"The step of {config.phase_key(phase)} cannot be compiled for {devices} devices"
    with run_worker("proof", str(devices), (str(phase),), failure, config) as folder:
        proof = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return {**proof, "seconds": round(time.monotonic() - start, 1)}


@contextlib.contextmanager
def run_worker(
    what: str, target: str, arguments: Sequence[str], failure: str, config: Config | None = None
) -> Iterator[Path]:
    """Run `compile_worker` with the environment of a compiler, and yield the folder of what both wrote.

    Its arguments are `what` to compile, the `target`, a GPU or a number of simulated devices, these `arguments`, the
    file of `config`, if the worker needs one (whose key `measurements` sets flags), and the folder. InputError if the
    compiler's packages are missing, or the process fails; the message starts with `failure`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder, files = Path(temporary), list[str]()
        if config is not None:
            files = [str(folder / "config.yaml")]
            Path(files[0]).write_text(to_yaml(config), encoding="utf-8")
        if target in GPUS:
            variables = environment(target, folder, None if config is None else config.measurements)
        else:
            variables = {**os.environ, **_SIMULATED, "JAX_NUM_CPU_DEVICES": target}
        command = [sys.executable, "-m", WORKER, what, target, *arguments, *files, temporary]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)  # noqa: S603 (ours)
        if done.returncode:
            raise InputError(f"{failure}: {failure_reason(done.returncode, done.stderr)}")
        yield folder


def failure_reason(status: int, stderr: str) -> str:
    """Return why a compiler's process failed: the signal that ended it, and the most telling line of its output."""
    lines = stderr.strip().splitlines()
    telling = [line for sign in _TELLING for line in lines if sign in line]
    line = (telling or lines[-1:] or ["it printed nothing"])[0].strip()[:400]
    return line if status >= 0 else f"{signal.Signals(-status).name} ended the compiler: {line}"
