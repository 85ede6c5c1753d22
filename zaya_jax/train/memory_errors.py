"""Turn out-of-memory errors into a message with the memory requested and available, and the keys to change."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax

from zaya_jax.errors import Reason, RunStopped
from zaya_jax.run.host_memory import free_memory

TRAINING_REMEDY = "Lower train.batch.micro_batch, set train.remat to full, or raise parallel.fsdp"
_REQUESTED = re.compile(r"allocat\w*(?: request for)?\s+([\d.]+) ?(bytes|[KMGT]?i?B)\b")


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
        raise RunStopped(f"A step of {phase} needs {gigabytes(new)} of memory per device, but only "
                         f"{gigabytes(available)} is available. {TRAINING_REMEDY}.", Reason.DEVICE_MEMORY)  # fmt: skip


@contextlib.contextmanager
def out_of_memory(activity: str, remedy: str) -> Iterator[None]:
    """Turn a failed allocation inside the block into `RunStopped`, with the memory requested and available.

    Args:
      activity: subject of the message, such as "The evaluation".
      remedy: which keys to change, as an imperative sentence without the full stop.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = str(error)
        if isinstance(error, jax.errors.JaxRuntimeError) and not re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", text):
            raise
        requested, available = _REQUESTED.search(text), available_memory()
        asked = ""
        if requested:
            count, unit = requested.groups()
            asked = f": it requested {gigabytes(int(float(count))) if unit == 'bytes' else f'{count} {unit}'}"
        has = f", and {gigabytes(available)} is available per device" if available is not None else ""
        reason = Reason.HOST_MEMORY if isinstance(error, MemoryError) else Reason.DEVICE_MEMORY
        raise RunStopped(f"{activity} ran out of memory{asked}{has}. {remedy}.", reason) from error


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
