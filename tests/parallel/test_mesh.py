import jax
import numpy as np

from tests.train_helpers import on_devices
from zaya_jax.parallel.mesh import (
    AXES,
    BATCH_AXES,
    batch_sharding,
    make_mesh,
    replicated,
)


def test_all_devices_stand_along_data():
    mesh = make_mesh()
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"data": jax.device_count(), "fsdp": 1, "expert": 1, "context": 1}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert set(BATCH_AXES) < set(AXES)


def layout() -> dict[str, list]:
    """Where eight devices hold what, and what the meshes of some of them are."""
    mesh = make_mesh()
    array = np.arange(2 * 16 * 3).reshape(2, 16, 3)

    def shards(sharding: jax.sharding.NamedSharding) -> list:
        placed = jax.device_put(array, sharding).addressable_shards
        return [(shard.device.id, np.array(shard.data)) for shard in placed]

    return {
        "split": shards(batch_sharding(mesh, leading=1)),
        "whole": shards(replicated(mesh)),
        "some": [device.id for device in make_mesh(devices=jax.devices()[1:3]).devices.ravel()],
        "sizes": [mesh.shape["data"], make_mesh(devices=jax.devices()[1:3]).shape["data"]],
    }


def test_each_device_holds_its_sequences_in_order_or_everything():
    placed = on_devices(8, "tests.parallel.test_mesh:layout")
    array = np.arange(2 * 16 * 3).reshape(2, 16, 3)
    assert sorted(device for device, _ in placed["split"]) == list(range(8))
    for device, part in placed["split"]:
        assert np.array_equal(part, array[:, 2 * device : 2 * device + 2])
    assert len(placed["whole"]) == 8
    assert all(np.array_equal(part, array) for _, part in placed["whole"])
    assert placed["some"] == [1, 2]
    assert placed["sizes"] == [8, 2]
