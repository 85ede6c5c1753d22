"""Device memory: refuse configurations that cannot fit, and explain failed allocations with the keys to change."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax

from zaya_jax.config.checks import counted
from zaya_jax.config.stages import stages
from zaya_jax.errors import InputError, Reason, RunStopped
from zaya_jax.generate.engine import CacheTooLarge
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.parallel.mesh import SEQUENCE_AXIS, batch_shards
from zaya_jax.parallel.placement import device_bytes
from zaya_jax.run.host_memory import free_memory
from zaya_jax.train.program import Programs

TRAINING_REMEDY = "Lower train.batch.micro_batch, set train.remat to full, or raise parallel.fsdp"
_REQUESTED = re.compile(r"allocat\w*(?: request for)?\s+([\d.]+) ?(bytes|[KMGT]?i?B)\b")


def check_memory(programs: Programs) -> None:
    """Raise `InputError` if a phase cannot fit the devices of this process, whatever the compiler does.

    The available memory is compared with three lower bounds: training state plus gradients; training state plus the
    residual stream that each group of layers keeps for the backward pass; and, in evaluation, training state plus the
    residual stream and its norm.
    """
    if (available := available_memory()) is not None:
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
            needs = f"{config.phase_key(phase)} needs at least {gigabytes(needed)} of memory per device for {purpose}"
            raise InputError(f"{needs}, but only {gigabytes(available)} is available. {remedy}.")

    remedy = "Use more devices, which divide the state, or a smaller model"
    check(stored + master_weights * low // item, "parameters, gradients and optimizer state", remedy)
    spread, context = mesh.shape[SEQUENCE_AXIS], config.context_for(phase_config)
    shapes = (program.batch_shape(stage) for stage in stages(config) if stage.phase == phase)
    rows = max(-(-sequences // batch_shards(mesh)) for _, sequences, _ in shapes)
    residual_stream = rows * context // spread * model.num_groups * model.hidden_size * item
    purpose = f"training state and the residual stream of {counted(rows, 'sequence')} of {context:,} tokens"
    key = f"{config.batch_key(phase_config)}.micro_batch"
    remedy = f"Lower {key}, the number of sequences that a device processes at once"
    check(stored + residual_stream, purpose, remedy)
    rows = -(-config.evaluation.batch_size // batch_shards(mesh))
    evaluation_bytes = rows * context // spread * model.hidden_size * (item + low)
    purpose = f"training state and the evaluation of {counted(rows, 'sequence')} of {context:,} tokens"
    check(stored + evaluation_bytes, purpose, f"Lower evaluation.batch_size ({config.evaluation.batch_size:,})")


def check_compiled(compiled: Any, phase: str) -> None:
    """Raise `RunStopped` if the compiled step of `phase` needs more memory than a device has available.

    The arguments of the step, state and batch, are already allocated.
    """
    needs, available = compiled.memory_analysis(), available_memory()
    if needs is None or available is None:
        return
    new = needs.temp_size_in_bytes + max(0, needs.output_size_in_bytes - needs.alias_size_in_bytes)
    if jax.devices()[0].platform != "cpu":
        new += needs.argument_size_in_bytes  # a GPU's limit is its total memory, not what is free
    if new > available:
        only = f"only {gigabytes(available)} is available. {TRAINING_REMEDY}."
        problem = f"A step of {phase} needs {gigabytes(new)} of memory per device, but {only}"
        raise RunStopped(problem, Reason.DEVICE_MEMORY)


@contextlib.contextmanager
def out_of_memory(activity: str, remedy: str) -> Iterator[None]:
    """Turn a failed allocation inside the block into `RunStopped`, with the memory requested and available.

    `activity` is the subject of the message, `remedy` says which keys to change, without the full stop.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = str(error)
        if isinstance(error, jax.errors.JaxRuntimeError) and not re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", text):
            raise
        requested, available = _REQUESTED.search(text), available_memory()
        request = ""
        if requested:
            count, unit = requested.groups()
            request = f": it requested {gigabytes(int(float(count))) if unit == 'bytes' else f'{count} {unit}'}"
        has = f", and {gigabytes(available)} is available per device" if available is not None else ""
        on_device = isinstance(error, jax.errors.JaxRuntimeError | CacheTooLarge)
        reason = Reason.DEVICE_MEMORY if on_device else Reason.HOST_MEMORY
        raise RunStopped(f"{activity} ran out of memory{request}{has}. {remedy}.", reason) from error


def available_memory() -> int | None:
    """Return the bytes that the first device of this process may allocate; None if it does not report them.

    A GPU reports the limit of its allocator. CPU devices share the free memory of the host, within the limits of the
    process' control groups.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    return free_memory() // jax.local_device_count()


def gigabytes(count: int) -> str:
    """Format a number of bytes in GB, for messages."""
    return f"{count / 1e9:.3g} GB" if count < 1e12 else f"{count / 1e9:,.0f} GB"
