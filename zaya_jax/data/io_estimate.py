"""How many storage operations reading the tokens of a training step takes, and whether the storage keeps up.

The model is that of docs/reference.md §6.3: tokens are read in pages, one operation per page, and somewhat more where
the sequences of a batch lie apart. It leaves out checkpoints, whose writing is limited by bytes.
"""

from dataclasses import dataclass

PAGE_BYTES = 4096  # read by one operation


@dataclass(frozen=True)
class StorageLoad:
    """What one training step asks of the storage, all hosts together."""

    bytes_per_step: int  # of tokens
    fragmentation: float  # operations over the pages that the tokens fill: 1 to 2 is well packed, 2 to 8 scattered
    operations_per_step: float  # pages read
    operations_per_second: float
    shortest_step_seconds: float  # a step that is shorter waits for the storage


def io_estimate(*, sequences: int, context: int, token_bytes: int, extra_pages: float, step_seconds: float,
                max_operations_per_second: float) -> StorageLoad:  # fmt: skip
    """Estimate the load of reading one global batch of tokens a step.

    Args:
      sequences: a step.
      context: tokens a sequence.
      token_bytes: bytes of a stored token.
      extra_pages: pages read for a sequence beyond those its tokens fill, on average.
      step_seconds: how long a step takes.
      max_operations_per_second: reads of a page that the storage can do.
    """
    fragmentation = 1 + extra_pages * PAGE_BYTES / (context * token_bytes)
    bytes_per_step = sequences * context * token_bytes
    operations = fragmentation * bytes_per_step / PAGE_BYTES
    return StorageLoad(bytes_per_step, fragmentation, operations, operations_per_second=operations / step_seconds,
                       shortest_step_seconds=operations / max_operations_per_second)  # fmt: skip
