"""Compile a phase's step for simulated devices, in a process of its own."""

import functools
import os
import time
from typing import Any

import jax

from zaya_jax.config import Config
from zaya_jax.config.stages import largest_stage
from zaya_jax.machine.compilers.compiled import run_worker
from zaya_jax.train.program import make_programs

# The program is compiled but never run, so optimisation would only cost time. The disabled pass would expand every
# all-to-all into one slice per device, which takes minutes for a thousand devices.
_SIMULATED = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_disable_hlo_passes=all_to_all_decomposer",
}


def prove(config: Config, phase: int, devices: int) -> dict[str, Any]:
    """Compile the step of a phase in a subprocess that simulates the devices.

    A step with a ragged exchange, which CPUs do not support, is only lowered, for GPUs.

    Returns:
      `proof` ("compiled" or "lowered"), `seconds` it took, and the peak `host_bytes` of the subprocess.

    Raises:
      InputError: the step does not compile.
    """
    start, failure = time.monotonic(), f"The step of {config.phase_key(phase)} cannot be compiled for {devices} devices"
    environment = {**os.environ, **_SIMULATED, "JAX_NUM_CPU_DEVICES": str(devices)}
    proof = run_worker(functools.partial(compile_simulated, config, phase), environment, failure)
    return proof | {"seconds": round(time.monotonic() - start, 1)}


def compile_simulated(config: Config, phase: int) -> dict[str, str]:
    """Compile or lower the step of a phase for all devices of this process; returns which, as `proof`."""
    if config.train.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    step = make_programs(config)[phase].trace(largest_stage(config, phase))
    parallel = config.parallel_for(config.phases[phase])
    if parallel.expert > 1 and parallel.expert_exchange == "ragged":
        step.lower(lowering_platforms=("rocm", "cuda"))
        return {"proof": "lowered"}
    step.lower().compile()
    return {"proof": "compiled"}
