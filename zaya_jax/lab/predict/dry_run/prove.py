"""Compile a phase's step for simulated devices: `python -m zaya_jax.lab.predict.dry_run.prove CONFIG PHASE`."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zaya_jax.config import Config, load_config, to_yaml
from zaya_jax.config.stages import largest_stage
from zaya_jax.data.prepare.workers import end_with_parent
from zaya_jax.errors import InputError
from zaya_jax.lab.predict.compilers.compiled import failure_reason

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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")
        process = subprocess.run(  # noqa: S603 (this program, on a file of our own)
            [sys.executable, "-m", "zaya_jax.lab.predict.dry_run.prove", str(path), str(phase)], capture_output=True,
            text=True, check=False, env={**os.environ, **_SIMULATED, "JAX_NUM_CPU_DEVICES": str(devices)},
        )  # fmt: skip
    if process.returncode:
        reason = failure_reason(process.returncode, process.stderr)
        raise InputError(f"The step of {config.phase_key(phase)} cannot be compiled for {devices} devices: {reason}")
    return {**json.loads(process.stdout), "seconds": round(time.monotonic() - start, 1)}


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
    print(json.dumps({
        "proof": "lowered" if ragged else "compiled",
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
