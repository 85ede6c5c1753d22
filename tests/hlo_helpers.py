"""Collectives and matmuls of a compiled program, where they are, and how often they run."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from tests.train_helpers import fast_jit, make_batch
from zaya_jax.config import Config
from zaya_jax.lab.predict.compilers.collectives import mesh_axes, place_collectives
from zaya_jax.lab.predict.compilers.hlo import Place, arrays, parse, shape_bytes
from zaya_jax.parallel.mesh import batch_sharding, replicated
from zaya_jax.train.program import make_programs

CALLED = r"\b(?:calls|to_apply|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)"


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
      kind: as HLO has it.
      shape: of a device's arrays after it, as HLO text.
      over: axes of the mesh along which it runs.
      devices: number of devices in a group.
      loops: how often each loop around it runs, outermost first; infinity where that depends on data.
      stage: 'forward', 'backward', 'again' where the backward pass computes the forward pass again; '' for what
        stands outside of the differentiated function, or was moved out of it.
    """

    kind: str
    shape: str
    over: tuple[str, ...]
    devices: int
    loops: tuple[float, ...]
    stage: str

    @property
    def times(self) -> float:
        """How often it runs in a call of the program."""
        return math.prod(self.loops)

    @property
    def bytes(self) -> int:
        """Bytes of its results."""
        return shape_bytes(self.shape)

    @property
    def sent(self) -> float:
        """Bytes that a device of a ring sends, each time."""
        n = self.devices
        return self.bytes * {"collective-permute": 1, "all-gather": (n - 1) / n, "all-to-all": (n - 1) / n,
                             "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n}[self.kind]  # fmt: skip


def collectives(text: str, sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective of an HLO `text` that was compiled for a mesh of these `sizes`."""
    results = []
    for place, loops in _places(parse(text)):
        for call in place_collectives(place):
            first = place.instructions[call.start]
            over = mesh_axes(call.kind, call.groups, sizes)
            assert over, first
            devices = math.prod(sizes[axis] for axis in over)
            results.append(Collective(call.kind, first.shape, over, devices, loops, _stage(first.op_name)))
    return results


def product_flops(text: str) -> float:
    """Floating-point operations of a device's matrix products, each loop as often as it runs."""
    total = 0.0
    for place, loops in _places(parse(text)):
        for dot in place.instructions:
            if dot.opcode == "dot":
                ((_, left),), ((_, out),) = arrays(place.shapes[dot.operands[0]]), arrays(dot.shape)
                summed = dot.attribute(r"lhs_contracting_dims=\{([\d,]+)\}").split(",")
                total += 2 * math.prod(out) * math.prod(left[int(axis)] for axis in summed) * math.prod(loops)
    return total


def compiled_step(config: Config) -> str:
    """HLO of the training step of the first phase, compiled for the devices of this process."""
    program = make_programs(config)[0]
    mesh, state = program.placement.mesh, program.abstract_state
    batch = _placed(make_batch(config), batch_sharding(mesh, leading=1))
    out = program.placement.shardings(state), replicated(mesh)
    return text_of(fast_jit(program.train_step, out_shardings=out).lower(state, batch))


def compiled_evaluation(config: Config) -> str:
    """HLO of the evaluation step of the first phase on its first micro-batch: the forward pass alone."""
    program = make_programs(config)[0]
    mesh, state = program.placement.mesh, program.abstract_state
    batch = _placed({name: array[0] for name, array in make_batch(config).items()}, batch_sharding(mesh))
    return text_of(fast_jit(program.evaluation_step).lower(state.params, state.balance, batch))


def text_of(lowered: jax.stages.Lowered) -> str:
    """HLO of a program, compiled."""
    text = lowered.compile().as_text()
    assert text is not None
    return text


def _placed(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _places(place: Place, loops: tuple[float, ...] = ()) -> Iterator[tuple[Place, tuple[float, ...]]]:
    """A place and all that it calls, each with how often the loops around it run."""
    yield place, loops
    for instruction in place.instructions:
        if instruction.opcode == "while":
            loop = place.loop(instruction)
            yield from _places(loop, (*loops, loop.trips if loop.counted else math.inf))
        else:
            for name in re.findall(r"%([\w.\-]+)", instruction.attribute(CALLED)):
                yield from _places(Place(place.computations, name, 1, place, ""), loops)


def _stage(op_name: str) -> str:
    if "rematted_computation" in op_name:
        return "again"
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else ""
