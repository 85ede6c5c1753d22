import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton

from pallas_kernels.launch import launch
from tests.kernel_helpers import TARGETS, shape
from zaya_jax.machine.proxies.codegen import GPUS, abstract_device, compile_kernel, kernels_of, lower

ROWS = 100
VECTOR = shape(ROWS, dtype=jnp.float32)


def add(x, y, out, *, wide):
    row = jnp.arange(128)
    inside = row < ROWS
    held = [triton.load(one.at[row], mask=inside, other=0.0) for one in (x, y)]
    for _ in range(wide):
        held.append(jnp.sin(held[-1]))
    triton.store(out.at[row], sum(held), mask=inside)


def added(x, y, platform, name="added", wide=0):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch(functools.partial(add, wide=wide), x, y, name=name, grid=(1,), out_shape=out, warps=2, stages=3,
                  architecture=platform)  # fmt: skip


def test_emulated_it_is_what_it_says():
    found = added(jnp.arange(100.0), jnp.ones(100), "interpret")
    np.testing.assert_array_equal(found, np.arange(1.0, 101.0))


@pytest.mark.parametrize("platform", TARGETS)
def test_kernels_are_found_in_their_order_with_what_they_are_compiled_with(platform):
    def twice(x, y):
        return added(added(x, y, platform, "first"), y, platform, "second")

    found = kernels_of(lower(twice, VECTOR, VECTOR, target=TARGETS[platform]))
    assert [(kernel.name, kernel.warps, kernel.stages) for kernel in found] == [("first", 2, 3), ("second", 2, 3)]


def test_a_function_that_is_called_twice_counts_twice():
    once = jax.jit(functools.partial(added, platform="rocm"))
    found = kernels_of(lower(lambda x, y: once(once(x, y), y), VECTOR, VECTOR, target=TARGETS["rocm"]))
    assert [kernel.name for kernel in found] == ["added", "added"]


def test_what_rematerialisation_has_no_use_for_is_not_there():
    def loss(x, y):
        kept = jax.ad_checkpoint.checkpoint_name(square(x, y), "kept")
        return (kept * kept).sum()

    @jax.custom_vjp
    def square(x, y):
        return added(x, y, "rocm")

    square.defvjp(lambda x, y: (square(x, y), None), lambda _, g: (g, g))
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    gradient = jax.grad(jax.checkpoint(loss, policy=policy))
    assert len(kernels_of(lower(gradient, VECTOR, VECTOR, target=TARGETS["rocm"]))) == 1


def test_a_program_without_kernels_has_none():
    assert kernels_of(lower(jnp.add, VECTOR, VECTOR, target=TARGETS["cuda"])) == []


@pytest.mark.parametrize("gpu", GPUS)
def test_machine_code_is_counted(gpu):
    pytest.importorskip("triton")
    target = GPUS[gpu].target
    (kernel,) = kernels_of(lower(functools.partial(added, platform=target.platform), VECTOR, VECTOR, target=target))
    code = compile_kernel(kernel, GPUS[gpu])
    assert 2 <= code.registers <= 64
    assert (code.shared, code.spills) == (0, 0)


def test_a_device_is_described_where_jax_wants_it():
    described = abstract_device(TARGETS["rocm"])
    assert set(described) == ({"abstract_device"} if jax.__version_info__ >= (0, 11) else set())
