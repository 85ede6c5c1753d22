"""Place batches on the devices: which rows a process reads, and how they become sharded arrays."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from zaya_jax.config import ParallelConfig
from zaya_jax.parallel.context import sequence_order
from zaya_jax.parallel.mesh import SEQUENCE_AXIS, AnyMesh, batch_sharding

Batch = Mapping[str, np.ndarray]


class ProcessShare(NamedTuple):
    """The share of each batch that a process reads: the `part`-th of `parts` equal parts of its sequences."""

    part: int = 0
    parts: int = 1


WHOLE = ProcessShare()


def process_share(mesh: Mesh) -> ProcessShare:
    """Return the share of each batch that this process must read: all sequences that its devices hold a piece of.

    Processes whose devices hold pieces of the same sequences have the same share. A process whose sequences are not one
    of several equal parts reads the whole batch.
    """
    process = jax.process_index()
    shards = mesh.devices.reshape(-1, mesh.shape[SEQUENCE_AXIS])
    own_rows = [i for i, row in enumerate(shards) if any(device.process_index == process for device in row)]
    count = len(own_rows)
    first, contiguous = own_rows[0], own_rows == list(range(own_rows[0], own_rows[0] + count))
    whole_part = contiguous and first % count == len(shards) % count == 0
    return ProcessShare(first // count, len(shards) // count) if whole_part else WHOLE


def place_batch(
    batch: Batch, mesh: AnyMesh, config: ParallelConfig, micro_batches: int | None = None, share: ProcessShare = WHOLE
) -> dict[str, jax.Array]:
    """Place a batch, this process' `share` of it, on the devices, sharded as the layout has it.

    Returns global arrays [sequences, tokens], or with `micro_batches` [micro-batches, their sequences, tokens].
    """
    leading = () if micro_batches is None else (micro_batches,)
    sharding = batch_sharding(mesh, len(leading))

    def place(array: np.ndarray) -> jax.Array:
        order = sequence_order(config, array.shape[1])
        local = (array if order is None else array[:, order]).reshape(*leading, -1, array.shape[1])
        rows = local.shape[-2]

        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            *leading_axes, sequences, tokens = index or (slice(None),) * local.ndim
            first, last, _ = sequences.indices(rows * share.parts)
            return local[(*leading_axes, slice(first - share.part * rows, last - share.part * rows), tokens)]

        return jax.make_array_from_callback((*leading, rows * share.parts, array.shape[1]), sharding, piece)

    return {name: place(array) for name, array in batch.items()}
