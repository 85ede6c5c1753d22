"""The network gives up first, then the peers, then jax, then the supervisor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.policy import Policy, TimeoutPolicy, WatchPolicy
from zaya_jax.aegis.timeouts import check_timeouts, network_window
from zaya_jax.errors import InputError
from zaya_jax.hardware.presets import PRESETS

MI300X = PRESETS["mi300x"]


def test_the_defaults_are_in_order():
    for preset in PRESETS.values():
        check_timeouts(Policy(), preset, preset.peer_timeout, {})


def test_the_window_is_that_of_the_specification():
    assert network_window(PRESETS["cpu"], {}) == 0
    assert network_window(MI300X, {}) == pytest.approx(120.26, abs=0.01)  # 4.096 µs · 2²² · 7
    assert network_window(MI300X, {"NCCL_IB_TIMEOUT": "20", "NCCL_IB_RETRY_CNT": "1"}) == pytest.approx(4.295, abs=1e-3)


@given(st.floats(1, 1000), st.floats(1, 1000), st.integers(14, 26))
def test_only_timeouts_in_order_are_accepted(peer_timeout, floor, exponent):
    environment = {"NCCL_IB_TIMEOUT": str(exponent)}
    policy = Policy(timeouts=TimeoutPolicy(floor=floor, end=1e6), watch=WatchPolicy(link_down_seconds=1e6))
    in_order = network_window(MI300X, environment) < peer_timeout < peer_timeout + 30 < floor
    try:
        check_timeouts(policy, MI300X, peer_timeout, environment)
    except InputError:
        assert not in_order
    else:
        assert in_order


@pytest.mark.parametrize("value", ["x", "-1", "99", ""])
def test_a_variable_that_is_no_number_is_named(value):
    with pytest.raises(InputError, match="NCCL_IB_RETRY_CNT is"):
        check_timeouts(Policy(), MI300X, 180, {"NCCL_IB_RETRY_CNT": value})
