"""How kernels are proven without a GPU: lowered for both platforms, compiled for three GPUs."""

import functools

import jax
import pytest

from zaya_jax.machine.proxies.codegen import GPUS, compile_kernel, kernels_of, lower
from zaya_jax.ops.registry import KernelSelection, preferred_kernels
from zaya_jax.ops.target import Target

TARGETS = {"cuda": Target("cuda", "NVIDIA H200"), "rocm": Target("rocm", "gfx942")}
SHARED = {"gfx942": 64 * 1024, "gfx950": 64 * 1024, "sm_90": 227 * 1024}
_ALL = {**TARGETS, **{name: gpu.target for name, gpu in GPUS.items()}, "interpret": Target("interpret", "any"),
        "cpu": Target("cpu", "any")}  # fmt: skip


def kernels(platform: str) -> KernelSelection:
    """All kernels for a platform of `TARGETS`, for a GPU of `GPUS`, 'interpret'ed, or none on a 'cpu'."""
    return preferred_kernels(_ALL[platform])


def kernel(operation: str, platform: str):
    """The implementation of an operation there."""
    return kernels(platform).implementation(operation)


def shape(*sizes, dtype):
    return jax.ShapeDtypeStruct(sizes, dtype)


def equations(function, *arrays):
    """Of the traced function, and in place of calls those of the functions that it calls."""

    def inside(jaxpr):
        for one in jaxpr.eqns:
            if one.primitive.name in ("jit", "pjit"):
                yield from inside(one.params["jaxpr"].jaxpr)
            else:
                yield one

    yield from inside(jax.make_jaxpr(function)(*arrays).jaxpr)


def lowered_kernels(function, *arrays, platform):
    """The names of the kernels of `function(*arrays, platform=platform)`, in order, lowered for the platform."""
    lowered = lower(functools.partial(function, platform=platform), *arrays, target=TARGETS[platform])
    return [kernel.name for kernel in kernels_of(lowered)]


def machine_code(function, *arrays, gpu):
    """By name, what each kernel of `function(*arrays, platform=gpu)` is compiled to for `gpu`."""
    pytest.importorskip("triton")
    lowered = lower(functools.partial(function, platform=gpu), *arrays, target=GPUS[gpu].target)
    found = kernels_of(lowered)
    assert found
    return {kernel.name: compile_kernel(kernel, GPUS[gpu]) for kernel in found}


def check_machine_code(function, *arrays, gpu):
    """No kernel of `function` spills a register, or shares more memory than the GPU's smallest kin has."""
    for name, code in machine_code(function, *arrays, gpu=gpu).items():
        assert code.spills == 0, (name, code)
        assert code.shared <= SHARED[gpu], (name, code)
        assert 0 < code.registers <= 512, (name, code)
