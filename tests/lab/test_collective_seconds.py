"""The time of collectives, against cases worked by hand and published bandwidths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.hardware.data_sheets import HARDWARE, LINKS
from zaya_jax.hardware.presets import PRESETS
from zaya_jax.lab.predict.step_time import collective_seconds

MI300X, H100 = HARDWARE["mi300x"], HARDWARE["h100"]
NODE, TWO, MANY = range(8), range(16), range(1024)
GB = 1e9


@pytest.mark.parametrize(
    ("kind", "sent", "devices", "hardware", "seconds"),
    [
        ("all-gather", 7 * GB, NODE, MI300X, 7 / 448),  # 8 GB in all, of which each device sends 7
        ("all-gather", 7 * GB, NODE, H100, 7 / 450),
        ("all-reduce", 14 * GB, NODE, H100, 14 / 450),
        # Two or four of the eight have one or three links each on AMD, and the whole switch on NVIDIA.
        ("reduce-scatter", 1 * GB, range(2), MI300X, 1 / 64),
        ("reduce-scatter", 3 * GB, range(4), MI300X, 3 / 192),
        ("reduce-scatter", 1 * GB, range(2), H100, 1 / 450),
        ("reduce-scatter", 3 * GB, range(4), H100, 3 / 450),
        # Whole nodes: of 16 GB, each node sends half, over 8 adapters; 1 GB by each.
        ("all-gather", 15 * GB, TWO, MI300X, max(15 / 448, 1 / 50)),
        # 128 nodes: 1024 GB · 127/128 / 8 adapters; xGMI carries the ring too.
        ("all-gather", 1023 * GB, MANY, MI300X, max(1023 / 448, 127 / 50)),
        # One device of each node: all of it passes one adapter.
        ("all-gather", 127 * GB, range(0, 1024, 8), H100, 127 / 50),
        # Two of each of four nodes.
        ("reduce-scatter", 7 * GB, [0, 1, 8, 9, 16, 17, 24, 25], MI300X, max(7 / 64, 8 * 3 / 4 / 2 / 50)),
        ("all-to-all", 7 * GB, NODE, MI300X, 7 / 448),
        ("all-to-all", 1 * GB, range(2), MI300X, 1 / 64),
        # Of 15 GB to 15 others, 8 go to the other node through the own adapter.
        ("all-to-all", 15 * GB, TWO, H100, max(8 / 50, 7 / 450)),
        ("collective-permute", 1 * GB, range(4), MI300X, 1 / 64),
        ("collective-permute", 1 * GB, range(4), H100, 1 / 450),
        ("collective-permute", 1 * GB, TWO, H100, 1 / 50),
        ("all-gather", 0.0, NODE, H100, 0.0),
        ("all-gather", 0.0, range(1), H100, 0.0),
    ],
)
def test_seconds_are_those_worked_by_hand(kind, sent, devices, hardware, seconds):
    assert collective_seconds(kind, sent, list(devices), hardware) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("hardware", "kind", "devices", "published"),
    [
        # Bus bandwidths of large messages in GB/s: what each device sends, over the time.
        (MI300X, "all-reduce", NODE, 304),  # the least that AMD's acceptance test of a node allows
        (H100, "all-gather", NODE, 360),
        (H100, "all-gather", range(256), 340),  # github.com/NVIDIA/nccl/issues/1218
        (H100, "collective-permute", TWO, 48.5),  # github.com/NVIDIA/nccl-tests/issues/267: an adapter's 48 to 49
        # rocm.blogs.amd.com, "Understanding RCCL bandwidth and xGMI performance on MI300X": 93 % of 48 over one link
        (MI300X, "all-gather", range(2), 44.6),
        (MI300X, "all-to-all", NODE, 320),  # what AMD's cluster validation suite accepts
    ],
)
def test_bus_bandwidth_is_within_a_fifth_of_published_ones(hardware, kind, devices, published):
    seconds = collective_seconds(kind, 1 * GB, list(devices), hardware, LINKS)
    assert 1 / seconds == pytest.approx(published, rel=0.2)


@given(st.sampled_from(["all-gather", "all-reduce", "all-to-all", "collective-permute"]), st.integers(1, 64),
       st.sampled_from(sorted(HARDWARE)))  # fmt: skip
def test_a_network_never_beats_its_links(kind, n, name):
    sheet = HARDWARE[name]
    seconds = collective_seconds(kind, 1 * GB, list(range(n)), sheet)
    if n == 1:
        assert seconds == 0
    else:
        assert seconds >= 1 * GB / (sheet.intra_node + sheet.inter_node)
        assert seconds <= collective_seconds(kind, 1 * GB, list(range(n)), sheet, LINKS)


def test_data_sheets_know_the_memory_that_presets_let_xla_allocate():
    for name, sheet in HARDWARE.items():
        (setting,) = (x for x in PRESETS[name].settings if x.name == "XLA_PYTHON_CLIENT_MEM_FRACTION")
        assert float(setting.value) == sheet.memory_fraction
