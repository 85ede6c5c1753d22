"""Lower programs without a GPU, for both platforms, and list their kernels."""

import dataclasses
import functools

import jax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.ops.registry import KernelSelection, preferred_kernels
from zaya_jax.ops.target import Target

TARGETS = {"cuda": Target("cuda", "NVIDIA H200"), "rocm": Target("rocm", "gfx942")}
_ALL = {**TARGETS, **{name: gpu.target for name, gpu in GPUS.items()}, "interpret": Target("interpret", "any"),
        "cpu": Target("cpu", "any")}  # fmt: skip


def kernels(platform: str) -> KernelSelection:
    """All kernels for a platform of `TARGETS`, for a GPU of `GPUS`, 'interpret'ed, or none on a 'cpu'."""
    return preferred_kernels(_ALL[platform])


def with_kernel(platform: str, operation: str, name: str) -> KernelSelection:
    """All kernels for a platform, with another one of an operation."""
    selection = kernels(platform)
    return dataclasses.replace(selection, chosen={**selection.chosen, operation: name})


def kernel(operation: str, platform: str, name: str | None = None):
    """Return the implementation of an operation on a platform: the default one, or one by name."""
    selection = kernels(platform) if name is None else with_kernel(platform, operation, name)
    return selection.implementation(operation)


def shape(*sizes, dtype):
    return jax.ShapeDtypeStruct(sizes, dtype)


def equations(function, *arrays):
    """Yield the equations of a traced function; calls are replaced by the equations of what they call."""

    def inside(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("jit", "pjit"):
                yield from inside(equation.params["jaxpr"].jaxpr)
            else:
                yield equation

    yield from inside(jax.make_jaxpr(function)(*arrays).jaxpr)


def traced_kernels(function, *arrays):
    """The names of the kernels of a traced function in order, once for each call; faster than to lower it."""

    def inside(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["name"]
            else:
                for inner in jaxprs_in_params(equation.params):
                    yield from inside(inner)

    return list(inside(jax.make_jaxpr(function)(*arrays).jaxpr))


def abstract_device(target):
    """The arguments of `AbstractMesh` that make jax 0.11 and later lower kernels for `target`."""
    if jax.__version_info__ < (0, 11):
        return {}
    device = jax.sharding.AbstractDevice(device_kind=target.device_kind, num_cores=132, platform="gpu")
    return {"abstract_device": device}


def lower(function, *arrays, platform):
    """The program of a function, for a platform of `TARGETS` that need not be here."""
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), **abstract_device(TARGETS[platform]))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,))


def kernel_names(lowered):
    """The kernels of a lowered program in order, once for each call."""
    functions = {}
    for operation in lowered.compiler_ir().operation.regions[0].blocks[0].operations:
        functions[operation.attributes["sym_name"].value] = operation.operation

    def inside(operation):
        attributes = operation.attributes
        if operation.name == "func.call":
            yield from inside(functions[attributes["callee"].value])
        elif operation.name == "stablehlo.custom_call" and "xla.gpu.triton" in str(attributes["call_target_name"]):
            config = "mhlo.backend_config" if "mhlo.backend_config" in attributes else "backend_config"
            yield attributes[config]["name"].value
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield from inside(inner.operation)

    return list(inside(functions["main"]))


def lowered_kernels(function, *arrays, platform):
    """The names of the kernels of `function(*arrays, platform=platform)`, in order, lowered for the platform."""
    return kernel_names(lower(functools.partial(function, platform=platform), *arrays, platform=platform))
