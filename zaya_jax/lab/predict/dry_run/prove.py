"""Compile a phase's step for simulated devices: `python -m zaya_jax.lab.predict.dry_run.prove CONFIG PHASE`."""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zaya_jax.config import Config, load_config
from zaya_jax.config.stages import largest_stage
from zaya_jax.data.prepare.workers import end_with_parent
from zaya_jax.lab.predict.compilers.compiled import run_compiler, write_config

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
    start = time.monotonic()
    failure = f"The step of {config.phase_key(phase)} cannot be compiled for {devices} devices"
    variables = {**os.environ, **_SIMULATED, "JAX_NUM_CPU_DEVICES": str(devices)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = write_config(config, Path(folder)), str(phase)
        proof = json.loads(run_compiler("zaya_jax.lab.predict.dry_run.prove", arguments, failure, variables))
    return {**proof, "seconds": round(time.monotonic() - start, 1)}


def main(path: str, phase: int) -> None:
    """Compile or lower the step of a phase; prints which (`proof`) and the process' peak `host_bytes`, as JSON."""
    import jax

    end_with_parent(os.getppid())
    config = load_config(path)
    if config.train.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    from zaya_jax.train.program import make_programs

    step = make_programs(config)[phase].trace(largest_stage(config, phase))
    parallel = config.parallel_for(config.phases[phase])
    ragged = parallel.expert > 1 and parallel.expert_exchange == "ragged"
    if ragged:
        step.lower(lowering_platforms=("rocm", "cuda"))
    else:
        step.lower().compile()
    host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"proof": "lowered" if ragged else "compiled", "host_bytes": host_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
