"""Estimate the storage operations of reading a step's tokens, and whether the storage keeps up.

The model of ZAYA1's report (docs/reference.md §6.3): one operation per page, plus extra pages for scattered sequences.
Checkpoints are not included, since writing them is limited by bandwidth.
"""

from dataclasses import dataclass

PAGE_BYTES = 4096  # read by one operation


@dataclass(frozen=True)
class StorageLoad:
    """Storage load of one training step, over all hosts."""

    bytes_per_step: int  # of tokens
    fragmentation: float  # operations over the pages that the tokens fill: 1 to 2 is well packed, 2 to 8 scattered
    operations_per_step: float  # pages read
    operations_per_second: float
    shortest_step_seconds: float  # shorter steps wait for the storage


def io_estimate(
    sequences: int, context: int, token_bytes: int, extra_pages: float, step_seconds: float, max_iops: float
) -> StorageLoad:
    """Estimate the load of reading one global batch per step, with `extra_pages` per sequence beyond those it fills."""
    fragmentation = 1 + extra_pages * PAGE_BYTES / (context * token_bytes)
    bytes_per_step = sequences * context * token_bytes
    operations = fragmentation * bytes_per_step / PAGE_BYTES
    return StorageLoad(bytes_per_step, fragmentation, operations, operations / step_seconds, operations / max_iops)
