import pytest

from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE, hardware_named, peak_of


@pytest.mark.parametrize("name", HARDWARE)
def test_a_device_is_found_by_its_name_and_by_what_runtimes_call_it(name):
    device = hardware_named(name)
    assert device is HARDWARE[name]
    assert [peak_of(f"AMD or NVIDIA {kind} SXM") for kind in device.kinds] == [device.peak] * len(device.kinds)


def test_no_two_devices_share_a_name():
    kinds = [kind for device in HARDWARE.values() for kind in device.kinds]
    assert len(kinds) == len(set(kinds))


def test_other_devices_have_no_peak():
    assert peak_of("cpu") is None


def test_a_device_without_a_data_sheet_is_one_sentence():
    with pytest.raises(InputError, match=r"^--hardware is 'b200', but must be one of mi300x, mi355x, h100, h200\.$"):
        hardware_named("b200")


@pytest.mark.parametrize("device", HARDWARE.values(), ids=HARDWARE)
def test_data_sheets_are_in_bytes_and_operations(device):
    """Links are slower than memory, other nodes slower than one's own, and a byte takes hundreds of operations."""
    assert device.between < device.inside < device.bandwidth
    assert 10e9 < device.memory < 1e12
    assert 100 < device.peak / device.bandwidth < 1000
