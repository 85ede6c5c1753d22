"""Compile a phase's step for simulated devices: `python -m zaya_jax.machine.dry_run.prove CONFIG PHASE`."""

import json
import resource
import sys

from zaya_jax.config import load_config


def main(path: str, phase: int) -> None:
    """Compile or lower the step of a phase; prints which (`proof`) and the process' peak `host_bytes`, as JSON."""
    import jax

    config = load_config(path)
    if config.train.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    from zaya_jax.machine.dry_run.estimate import largest_stage
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
