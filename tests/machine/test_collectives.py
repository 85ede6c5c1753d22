import jax
import pytest

from tests.train_helpers import on_devices
from zaya_jax.machine.collectives import check_collectives


def test_there_is_nothing_to_send_with_one_device():
    found = check_collectives()
    assert found["devices"] == 1
    assert "one device" in found["skipped"]


def collectives(broken):
    """`check_collectives`, with the ring of `ppermute` turned round where `broken`."""
    permute = jax.lax.ppermute
    with pytest.MonkeyPatch.context() as patch:
        if broken:
            patch.setattr(jax.lax, "ppermute", lambda x, axis, pairs: permute(x, axis, [(b, a) for a, b in pairs]))
        return check_collectives()


def test_collectives_are_right_over_eight_devices():
    found = on_devices(8, "tests.machine.test_collectives:collectives", False)
    assert found == {"devices": 8, "dtypes": ["float32", "bfloat16", "int32"]}


def test_a_wrong_collective_is_named():
    found = on_devices(4, "tests.machine.test_collectives:collectives", True)
    assert found["failed"].startswith("These gave wrong numbers over 4 devices: ppermute of float32, ppermute of")
