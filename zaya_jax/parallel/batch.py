"""From rows on the host to arrays on the devices of a layout."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from zaya_jax.config import ParallelConfig
from zaya_jax.parallel.context import sequence_order
from zaya_jax.parallel.mesh import SEQUENCE_AXIS, AnyMesh, batch_sharding


class ProcessShare(NamedTuple):
    """This process reads the `part`-th of `parts` equal parts of each batch's sequences."""

    part: int = 0
    parts: int = 1


WHOLE = ProcessShare()


def process_share(mesh: Mesh) -> ProcessShare:
    """What of each batch this process needs: the sequences of which its devices hold any part.

    Processes whose devices hold parts of the same sequences have the same share. Where its sequences are not one of
    so many equal parts, a process reads them all.
    """
    process = jax.process_index()
    shards = mesh.devices.reshape(-1, mesh.shape[SEQUENCE_AXIS])
    own_rows = [i for i, row in enumerate(shards) if any(device.process_index == process for device in row)]
    count = len(own_rows)
    whole_part = (
        own_rows == list(range(own_rows[0], own_rows[0] + count)) and own_rows[0] % count == len(shards) % count == 0
    )
    return ProcessShare(own_rows[0] // count, len(shards) // count) if whole_part else WHOLE


def place_batch(
    batch: Mapping[str, np.ndarray], mesh: AnyMesh, config: ParallelConfig, micro_batches: int | None = None,
    share: ProcessShare = WHOLE,
) -> dict[str, jax.Array]:  # fmt: skip
    """The batch on the devices, sequences and tokens where the layout has them.

    Args:
      batch: arrays [sequences, tokens], this process's share of them.
      mesh: the devices.
      config: the layout.
      micro_batches: where given, the sequences become [micro-batches, sequences / micro-batches].
      share: of the batch that `batch` is.
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
