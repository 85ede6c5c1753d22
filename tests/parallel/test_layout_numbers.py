"""Every layout gives what one device gives, whatever the number of devices along an axis."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.devices_helpers import on_devices
from tests.helpers import assert_close
from tests.parallel_helpers import LAYOUTS, ODD, ODD_SIZES, SINGLE, ThreeSteps, odd_config, run_layout, three_steps
from zaya_jax.config import ParallelConfig
from zaya_jax.parallel.collectives import sum_scatter
from zaya_jax.parallel.mesh import make_mesh

SINGLES = [f"{SINGLE}{name}" for name in ("data", "fsdp", "hybrid", "data_fsdp_ring", "fsdp_expert_context")]
BANDS = {"float32": 1e-5, "bfloat16": 0.15}  # of the largest value of a leaf's gradient


def both_scatters(count):
    """A sum over tuples of axes of which each device keeps a part: as one process does it, and as one of several."""
    mesh = make_mesh(ParallelConfig(data=2, fsdp=2), jax.devices()[:4])
    x = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
    kept = []
    for axes, axis, spec in ((("data", "fsdp"), 2, P(None, None, ("data", "fsdp"))), ("fsdp", 0, P("fsdp"))):

        def scatter(part, axes=axes, axis=axis):
            return sum_scatter(part * (1 + jax.lax.axis_index(("data", "fsdp"))), axes, axis)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: count)
            run = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=P(), out_specs=spec, check_vma=False))
            kept.append(np.asarray(run(x)))
    return kept


def test_sums_of_which_each_keeps_a_part_are_the_same_over_processes():
    alone, several = (on_devices(8, "tests.parallel.test_layout_numbers:both_scatters", count) for count in (1, 2))
    for x, y in zip(alone, several, strict=True):
        assert_close(x, y, 1e-6)
        assert np.abs(x).max() > 1


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


@functools.cache
def alone():
    return run_layout(LAYOUTS["data"], devices=1)


@pytest.mark.soak
@pytest.mark.parametrize("name", [*sorted(LAYOUTS), *SINGLES])
def test_every_layout_gives_what_one_device_gives(name):
    check(name, on_devices(8, "tests.parallel_helpers:run_layouts", [name], True)[name], alone())


@functools.cache
def odd_alone(sizes):
    return three_steps(odd_config(sizes), ParallelConfig(), devices=1, gradient=False)


@pytest.mark.soak
@pytest.mark.parametrize("sizes", [*ODD_SIZES, *(f"{SINGLE}{sizes}" for sizes in ODD_SIZES)])
@pytest.mark.parametrize("name", ODD)
def test_any_number_of_devices_along_an_axis_gives_what_one_device_gives(name, sizes):
    check(name, on_devices(12, "tests.parallel_helpers:run_odd", name, sizes), odd_alone(sizes))


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("dtype", BANDS)
def test_every_layout_agrees_within_rounding(name, dtype):
    """The losses of three steps, and the gradient, which is the momentum after the first."""
    one = run_layout(LAYOUTS["data"], devices=1, gradient=False, dtype=dtype)
    run = on_devices(8, "tests.parallel_helpers:run_layouts", [name], False, dtype)[name]
    np.testing.assert_allclose(run.losses, one.losses, rtol=BANDS[dtype] / 10)
    momentum = {key: value for key, value in one.states[0].items() if "opt_state" in key and value.ndim > 1}
    assert len(momentum) > 10
    distances = {key: far(run.states[0][key], value) for key, value in momentum.items()}
    assert max(distances.values()) < BANDS[dtype], distances
