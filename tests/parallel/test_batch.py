"""Rows of each process, and where they lie."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.train_helpers import on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.parallel.batch import ProcessShare, place_batch, process_share
from zaya_jax.parallel.context import sequence_order
from zaya_jax.parallel.mesh import AXES, axis_sizes, make_mesh


class Device(NamedTuple):
    process_index: int


class Devices(NamedTuple):
    """What of a mesh over several processes is asked for."""

    devices: np.ndarray
    shape: dict[str, int]


def over_processes(config: ParallelConfig, processes: int, devices: int) -> Devices:
    sizes, array = axis_sizes(config, devices), np.empty(devices, object)
    array[:] = [Device(index * processes // devices) for index in range(devices)]
    return Devices(array.reshape([sizes[axis] for axis in AXES]), sizes)


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        (ParallelConfig(), [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (ParallelConfig(fsdp=2, expert=2), [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (ParallelConfig(context=2), [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (ParallelConfig(context=4), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (ParallelConfig(context=8), [(0, 1)] * 4),
        (ParallelConfig(context=3), [(0, 2), (0, 1), (1, 2)]),
    ],
)
def test_a_process_reads_the_sequences_its_devices_hold_or_all_where_parts_are_not_equal(monkeypatch, config, shares):
    mesh = over_processes(config, processes=len(shares), devices=12 if config.context == 3 else 8)
    for process, share in enumerate(shares):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert process_share(mesh) == ProcessShare(*share)


def placed(config: ParallelConfig, micro_batches: int | None):
    """For each device, its part of rows 0, 1, …, and what the rows are in all."""
    mesh = make_mesh(config)
    rows = np.arange(16 * 16).reshape(16, 16)
    placed_rows = place_batch({"tokens": rows}, mesh, config, micro_batches)["tokens"]
    batch = np.asarray(placed_rows)
    parts = {shard.device.id: np.asarray(shard.data) for shard in placed_rows.addressable_shards}
    return (
        batch,
        parts,
        placed_rows.sharding.spec
        == PartitionSpec(*([None] * (micro_batches is not None)), ("data", "fsdp", "expert"), "context"),
    )


@pytest.mark.parametrize("micro_batches", [None, 2])
def test_rows_lie_in_order_and_pieces_where_the_layout_has_them(micro_batches):
    config = ParallelConfig(fsdp=2, context=4)
    batch, parts, spec = on_devices(8, "tests.parallel.test_batch:placed", config, micro_batches)
    assert spec
    rows = np.arange(16 * 16).reshape(16, 16)[:, sequence_order(config, 16)]
    np.testing.assert_array_equal(batch.reshape(16, 16), rows)
    leading = rows.reshape((2, 8, 16) if micro_batches else (1, 16, 16))
    half = leading.shape[1] // 2
    for device, part in parts.items():  # the innermost axis is context
        first, piece = (device // 4) * half, (device % 4) * 4
        expected = leading[:, first : first + half, piece : piece + 4]
        np.testing.assert_array_equal(part.reshape(expected.shape), expected)
