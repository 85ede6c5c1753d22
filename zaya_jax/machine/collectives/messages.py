"""The collectives that a training step of a configuration runs, each at the size that it sends."""

from collections import Counter
from typing import NamedTuple

from zaya_jax.config import Config
from zaya_jax.config.stages import largest_stage
from zaya_jax.machine.collectives.operations import COLLECTIVES, Axes
from zaya_jax.machine.compilers.collectives import collectives, mesh_axes
from zaya_jax.machine.compilers.hlo import entry_place, parse
from zaya_jax.parallel.mesh import AnyMesh
from zaya_jax.train.kernels import validated_kernels
from zaya_jax.train.program import make_programs

_OPERATIONS = {collective.kind: name for name, collective in COLLECTIVES.items()} | {"ragged-all-to-all": "all_to_all"}


class Message(NamedTuple):
    """A collective of a step."""

    operation: str  # name in `COLLECTIVES`
    axes: Axes  # mesh axes that it runs over
    bytes: int  # its size, as nccl-tests counts it
    times: int  # how often a step runs it


def model_messages(config: Config) -> tuple[AnyMesh, list[Message]]:
    """Compile the first phase's largest step for the devices of this job, and find its collectives.

    Returns:
      The mesh of the step, and its messages, the largest first.

    Raises:
      InputError: the layout does not suit the number of devices.
    """
    programs = make_programs(config)
    programs.check()
    program = programs.with_kernels(validated_kernels(config))[0]
    mesh, counts = program.placement.mesh, Counter[tuple[str, Axes, int]]()
    compiled = program.trace(largest_stage(config, 0)).lower().compile()
    for found in collectives(entry_place(parse(compiled.as_text() or ""))):
        if axes := mesh_axes(found.kind, found.groups, mesh.shape):
            counts[_OPERATIONS[found.kind], axes, found.bytes] += found.place.times
    messages = [Message(*key, times) for key, times in counts.items()]
    return mesh, sorted(messages, key=lambda message: (-message.bytes, message))
