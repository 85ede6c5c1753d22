"""Every layout computes what one device does."""

import numpy as np
import pytest

from tests.parallel_helpers import LAYOUTS, ThreeSteps, run_layout
from tests.train_helpers import on_devices

BANDS = {"float32": 1e-5, "bfloat16": 0.15}  # of the largest value of a leaf's gradient
QUICK = ["fsdp_expert_context", "single data_fsdp_expert"]
SINGLE = [f"single {name}" for name in ("data", "fsdp", "hybrid", "data_fsdp_ring", "fsdp_expert_context")]


def far(x: np.ndarray, expected: np.ndarray) -> float:
    """The largest distance, over the largest value."""
    return float(np.abs(x.astype(np.float64) - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-300))


def check(name: str, run: ThreeSteps, alone: ThreeSteps) -> None:
    assert run.tokens == alone.tokens
    distances = {"loss": far(np.array(run.losses), np.array(alone.losses))}
    for step, (state, expected) in enumerate(zip(run.states, alone.states, strict=True)):
        distances |= {f"state {step} {key}": far(value, expected[key]) for key, value in state.items()}
    if run.gradient:
        np.testing.assert_array_equal(run.sums["counts"], alone.sums["counts"], err_msg=name)
        assert run.gradient.keys() == alone.gradient.keys()
        distances |= {f"gradient {key}": far(value, alone.gradient[key]) for key, value in run.gradient.items()}
    assert {key: value for key, value in distances.items() if value > 1e-8} == {}, name


@pytest.fixture(scope="module")
def alone():
    return run_layout(LAYOUTS["data"], devices=1, gradient=False)


@pytest.fixture(scope="module")
def alone_with_gradient():
    return run_layout(LAYOUTS["data"], devices=1)


def test_the_routing_compared_is_uneven_and_skips(alone):
    assert (alone.skip_rates[0] > 0).all()
    assert (alone.max_loads[0] > 2).all()  # over the mean


def test_layouts_give_what_one_device_gives(alone):
    for name, run in on_devices(8, "tests.parallel_helpers:run_layouts", QUICK, False).items():
        check(name, run, alone)


@pytest.mark.soak
@pytest.mark.parametrize("name", [*sorted(LAYOUTS), *SINGLE])
def test_every_layout_gives_what_one_device_gives(alone_with_gradient, name):
    check(name, on_devices(8, "tests.parallel_helpers:run_layouts", [name], True)[name], alone_with_gradient)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("dtype", BANDS)
def test_every_layout_agrees_within_rounding(name, dtype):
    """The losses of three steps, and the gradient, which is the momentum after the first."""
    alone = run_layout(LAYOUTS["data"], devices=1, gradient=False, dtype=dtype)
    run = on_devices(8, "tests.parallel_helpers:run_layouts", [name], False, dtype)[name]
    np.testing.assert_allclose(run.losses, alone.losses, rtol=BANDS[dtype] / 10)
    momentum = {key: value for key, value in alone.states[0].items() if "opt_state" in key and value.ndim > 1}
    assert len(momentum) > 10
    distances = {key: far(run.states[0][key], value) for key, value in momentum.items()}
    assert max(distances.values()) < BANDS[dtype], distances
