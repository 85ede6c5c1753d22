"""How many storage operations reading the tokens of a training step takes, and whether the storage keeps up.

The model of ZAYA1's report (zaya1.md §6.3): tokens are read in pages, one operation a page, somewhat more where the
sequences of a batch lie apart from each other. Writing checkpoints is not part of it: that is bound by bytes.
"""

import math
from dataclasses import dataclass

from zaya_jax.errors import InputError


@dataclass(frozen=True)
class StorageLoad:
    """What one training step asks of the storage, all hosts together."""

    bytes_per_step: int  # of tokens
    operations_per_step: float  # pages read
    operations_per_second: float
    shortest_step_seconds: float  # a step that is shorter waits for the storage


def io_estimate(
    *,
    global_batch: int,
    context: int,
    step_seconds: float,
    max_operations_per_second: float,
    token_bytes: int = 4,
    page_bytes: int = 4096,
    fragmentation: float = 1.0,
) -> StorageLoad:
    """The load of reading one global batch of tokens a step.

    Args:
      global_batch: sequences a step.
      context: tokens a sequence.
      step_seconds: how long a step takes.
      max_operations_per_second: reads of a page that the storage can do.
      token_bytes: bytes of a stored token.
      page_bytes: bytes that one operation reads.
      fragmentation: operations over the pages that the tokens fill, at least 1: 1 to 2 for well-packed data,
        2 to 8 for scattered data; see the function of that name.

    Raises:
      InputError: a value is not finite and above 0, or `fragmentation` is below 1.
    """
    _check_positive(
        global_batch=global_batch,
        context=context,
        step_seconds=step_seconds,
        max_operations_per_second=max_operations_per_second,
        token_bytes=token_bytes,
        page_bytes=page_bytes,
    )
    if not (math.isfinite(fragmentation) and fragmentation >= 1):
        raise InputError(f"fragmentation is {fragmentation}; it must be finite and at least 1, which means none.")
    bytes_per_step = global_batch * context * token_bytes
    operations = fragmentation * bytes_per_step / page_bytes
    return StorageLoad(
        bytes_per_step=bytes_per_step,
        operations_per_step=operations,
        operations_per_second=operations / step_seconds,
        shortest_step_seconds=operations / max_operations_per_second,
    )


def fragmentation(*, extra_faults: float, context: int, token_bytes: int = 4, page_bytes: int = 4096) -> float:
    """Operations over the pages that the tokens of a sequence fill.

    Args:
      extra_faults: pages read for a sequence beyond those its tokens fill, on average; 0 or more.
      context: tokens a sequence.
      token_bytes: bytes of a stored token.
      page_bytes: bytes that one operation reads.

    Returns:
      1 + extra_faults / (context · token_bytes / page_bytes).

    Raises:
      InputError: `extra_faults` is not finite or below 0, or another value is not finite and above 0.
    """
    _check_positive(context=context, token_bytes=token_bytes, page_bytes=page_bytes)
    if not (math.isfinite(extra_faults) and extra_faults >= 0):
        raise InputError(f"extra_faults is {extra_faults}; it must be finite and not below 0.")
    return 1 + extra_faults * page_bytes / (context * token_bytes)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} is {value}; it must be finite and above 0.")
