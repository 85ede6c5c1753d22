"""Out of memory in one sentence: what was requested, what a device has, and which keys to change."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import psutil

from zaya_jax.errors import RunStopped

TRAINING_REMEDY = "Lower train.batch.micro_batch, set train.remat to full, or raise parallel.fsdp"
_REQUESTED = re.compile(r"allocat\w*(?: request for)?\s+([\d.]+) ?(bytes|[KMGT]?i?B)\b")


def check_compiled(compiled: Any, phase: str) -> None:
    """Raise `RunStopped` where the compiled step of `phase` allocates more than a device has, before it does.

    State and batch, the arguments of the step, are allocated already.
    """
    needs, available = compiled.memory_analysis(), available_memory()
    if needs is None or available is None:
        return
    new = needs.temp_size_in_bytes + max(0, needs.output_size_in_bytes - needs.alias_size_in_bytes)
    if jax.devices()[0].platform != "cpu":
        new += needs.argument_size_in_bytes  # the limit of another device counts what is there
    if new > available:
        raise RunStopped(f"A step of {phase} needs {gigabytes(new)} of memory per device, but only "
                         f"{gigabytes(available)} is available. {TRAINING_REMEDY}.")  # fmt: skip


@contextlib.contextmanager
def out_of_memory(activity: str, remedy: str) -> Iterator[None]:
    """Turn an allocation that fails inside the block into `RunStopped`, with what was requested and what there is.

    Args:
      activity: what needed the memory, the subject of the sentence.
      remedy: which keys to change, as an imperative.
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
        raise RunStopped(f"{activity} ran out of memory{asked}{has}. {remedy}.") from error


def available_memory() -> int | None:
    """Bytes that the first device of this process may allocate; None where it does not say.

    A GPU reports the limit of its allocator. Devices on the CPU share what the host, and the control groups that this
    process is in, leave.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    return min([free, *_control_groups()]) // jax.local_device_count()


def _control_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What each limit of this process (cgroup v2) leaves; caches, which the kernel gives up, do not count."""
    left = []
    with contextlib.suppress(OSError):
        inside = next((line[3:] for line in own.read_text().splitlines() if line.startswith("0::")), "/").strip("/")
        for folder in (root / inside, *(root / inside).parents):
            with contextlib.suppress(OSError, ValueError, KeyError):
                limit = int((folder / "memory.max").read_text())  # the word `max` where there is no limit
                used = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                left += [max(0, limit - int(used["anon"]))] if folder.is_relative_to(root) else []
    return left


def gigabytes(count: int) -> str:
    """A number of bytes, for messages."""
    return f"{count / 1e9:.3g} GB" if count < 1e12 else f"{count / 1e9:,.0f} GB"
