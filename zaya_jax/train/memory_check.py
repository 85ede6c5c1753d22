"""Reject configurations that cannot fit the devices' memory, before anything is compiled."""

from zaya_jax.config.checks import counted
from zaya_jax.config.stages import stages
from zaya_jax.errors import InputError
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.parallel.mesh import SEQUENCE_AXIS, batch_shards
from zaya_jax.parallel.placement import device_bytes
from zaya_jax.train.memory_errors import available_memory, gigabytes
from zaya_jax.train.program import Programs


def check_memory(programs: Programs) -> None:
    """Raise `InputError` if a phase cannot fit the devices of this process, whatever the compiler does.

    The available memory is compared with three lower bounds: training state plus gradients; training state plus the
    residual stream that each group of layers keeps for the backward pass; and, in evaluation, training state plus the
    residual stream and its norm. CPU devices share the memory of the host.
    """
    available = available_memory()
    if available is not None:
        for phase in range(len(programs.config.phases)):
            _check_phase(programs, phase, available)


def _check_phase(programs: Programs, phase: int, available: int) -> None:
    config, program = programs.config, programs[phase]
    phase_config, mesh, model = config.phases[phase], program.placement.mesh, config.model
    stored = device_bytes((program.abstract_state, program.abstract_base))
    master_weights = device_bytes(program.abstract_state.params)
    item = accumulation_dtype(config.train.compute_dtype).itemsize
    low = 2 if config.train.compute_dtype == "bfloat16" else item

    def check(needed: int, purpose: str, remedy: str) -> None:
        if needed > available:
            raise InputError(f"{config.phase_key(phase)} needs at least {gigabytes(needed)} of memory per device for "
                             f"{purpose}, but only {gigabytes(available)} is available. {remedy}.")  # fmt: skip

    check(stored + master_weights * low // item, "parameters, gradients and optimizer state",
          "Use more devices, which divide the state, or a smaller model")  # fmt: skip
    spread, context = mesh.shape[SEQUENCE_AXIS], config.context_for(phase_config)
    rows = max(-(-program.batch_shape(stage)[1] // batch_shards(mesh)) for stage in stages(config)
               if stage.phase == phase)  # fmt: skip
    residual_stream = rows * context // spread * model.num_groups * model.hidden_size * item
    check(stored + residual_stream,
          f"training state and the residual stream of {counted(rows, 'sequence')} of {context:,} tokens",
          f"Lower {config.batch_key(phase_config)}.micro_batch, the number of sequences that a device processes at "
          "once")  # fmt: skip
    rows = -(-config.evaluation.batch_size // batch_shards(mesh))
    evaluation_bytes = rows * context // spread * model.hidden_size * (item + low)
    check(stored + evaluation_bytes,
          f"training state and the evaluation of {counted(rows, 'sequence')} of {context:,} tokens",
          f"Lower evaluation.batch_size ({config.evaluation.batch_size:,})")  # fmt: skip
