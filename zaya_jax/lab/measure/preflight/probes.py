"""Measure how fast each device multiplies and copies, and how fast some of the devices communicate.

The product is a square of `gemm`, the copy that of `memory`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.job.multihost import all_gather
from zaya_jax.lab.measure.collectives.operations import COLLECTIVES
from zaya_jax.lab.measure.collectives.programs import Case, Programs
from zaya_jax.lab.measure.collectives.text import column
from zaya_jax.lab.measure.gemm.problems import squares
from zaya_jax.lab.measure.memory import ITEM, KERNELS
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.parallel.mesh import AXES, make_mesh, nontrivial_axes

PATIENCE = 600  # seconds that another process may take, which compiles
_PASSES, _WARM_UP = 15, 3


class Sizes(NamedTuple):
    """Sizes of the probes."""

    matrix: int  # rows and columns of the square matrices
    dtype: str  # of the matrices
    array: int  # bytes of the copied array
    message: int  # bytes of a collective

    def work(self, name: str) -> float:
        """Return the FLOPs of 'matmul', or the bytes that 'memory' reads and writes."""
        return 2.0 * self.matrix**3 if name == "matmul" else 2.0 * self.array


CPU = Sizes(512, "float32", 2**24, 2**20)
GPU = Sizes(8192, "bfloat16", 2**30, 2**27)


def device_speeds(name: str, sizes: Sizes) -> dict[int, float | str]:
    """Measure the devices of each process one after the other.

    Returns:
      By id of each device of the job, the FLOP/s of 'matmul', or the bytes/s that the copy of 'memory' reads and
      writes; of a device that fails, the first line of its error.

    Raises:
      TimeoutError: another process did not answer.
    """
    own = [(device.id, _speed(name, device, sizes)) for device in jax.local_devices()]
    return dict(speed for process in all_gather("preflight", own, PATIENCE) for speed in process)


def _speed(name: str, device: Any, sizes: Sizes) -> float | str:
    try:
        function, arrays = probe(name, sizes)
        return sizes.work(name) / _shortest(jax.jit(function), *jax.device_put(arrays, device))
    except jax.errors.JaxRuntimeError as error:  # such as memory that another program holds
        return str(error).splitlines()[0]


def probe(name: str, sizes: Sizes) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """Return the function of 'matmul' or 'memory', and its arrays on the default device."""
    if name == "matmul":
        (square,) = squares([sizes.matrix], sizes.dtype)
        return square.run, tuple(jnp.full(x.shape, 1 / sizes.matrix, x.dtype) for x in square.arrays)
    return lambda a: KERNELS["Copy"].run(a, a), (jnp.zeros(sizes.array // ITEM, jnp.float32),)


def bandwidth(operation: str, devices: Sequence[Any], sizes: Sizes) -> float:
    """Return the bus bandwidth of the shortest call of a collective, in bytes/s; the slowest process counts.

    All processes must call this with the same `devices`, at least two, which may belong to some of the processes.
    """
    mesh = make_mesh(devices=devices)
    probe = Case(COLLECTIVES[operation], mesh, nontrivial_axes(mesh, AXES), 1, "float32")
    case = probe._replace(elements=probe.collective.elements(sizes.message, 4, len(devices)))
    own = None
    if any(device.process_index == jax.process_index() for device in devices):
        programs = _programs(case)
        own = _shortest(programs.run, programs.fill())
    seconds = [process for process in all_gather("preflight", own, PATIENCE) if process is not None]
    return column(case, max(seconds), 0).busbw


_programs = functools.lru_cache(maxsize=16)(Programs)  # every round measures the same groups


def _shortest(call: Callable[..., Any], *arrays: jax.Array) -> float:
    """Return the seconds of the shortest call: what else runs on a host only makes calls longer."""
    return min(time_calls(lambda: jax.block_until_ready(call(*arrays)), _PASSES, _WARM_UP).seconds)
