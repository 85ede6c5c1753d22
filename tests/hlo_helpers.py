"""What stands in a compiled program: collectives and products, where they stand, and how often they run."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.train_helpers import fast_jit, make_batch
from zaya_jax.config import Config
from zaya_jax.parallel.mesh import batch_sharding, replicated
from zaya_jax.train.program import make_programs

ITEM_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
KINDS = "all-reduce|all-gather|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute|collective-broadcast"
CALL = re.compile(rf" = (\(.*?\)|\S+) ({KINDS})(?:-start)?\(")
DOT = re.compile(r" = (\S+) dot\((?:\S+ )?%([\w.\-]+), .*?lhs_contracting_dims=\{([\d,]+)\}")
DEFINED = re.compile(r"%([\w.\-]+) = (\w+\[[\d,]*\])")
SHAPE = re.compile(rf"\b({'|'.join(ITEM_SIZES)})\[([\d,]*)\]")
BODY = re.compile(r" while\(.*body=%([\w.\-]+)")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
CALLED = re.compile(r" (?:calls|to_apply|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")
NAME = re.compile(r"%([\w.\-]+)")
MEMBERS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}")
NAMED_MEMBERS = re.compile(
    r"replica_groups=mesh\[([^\]]+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]+)\}"
)


class Array(NamedTuple):
    """Type and shape of an array in HLO."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
      kind: as HLO has it.
      results: a device's arrays after it.
      over: axes of the mesh along which it runs.
      devices: that take part together.
      loops: how often each loop around it runs, outermost first; infinity where that depends on data.
      stage: 'forward', 'backward', 'again' where the backward pass computes the forward pass again; '' for what
        stands outside of the differentiated function, or was moved out of it.
    """

    kind: str
    results: tuple[Array, ...]
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
        """That its results take."""
        return sum(array.bytes for array in self.results)

    @property
    def sent(self) -> float:
        """Bytes that a device of a ring sends, each time."""
        n = self.devices
        return self.bytes * {"collective-permute": 1, "all-gather": (n - 1) / n, "all-to-all": (n - 1) / n,
                             "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n}[self.kind]  # fmt: skip


def collectives(text: str, sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective of an HLO `text` that was compiled for a mesh of these `sizes`, in the order of its devices."""
    found = []
    for line, loops in _lines(text):
        if call := CALL.search(line):
            over = _over(line, sizes)
            devices = math.prod(sizes[axis] for axis in over)
            found.append(Collective(call[2], _arrays(call[1]), over, devices, loops, _stage(line)))
    return found


def product_flops(text: str) -> float:
    """Floating-point operations of a device's matrix products, each loop as often as it runs."""
    shapes = {name: _arrays(array)[0].shape for name, array in DEFINED.findall(text) if SHAPE.fullmatch(array)}
    total = 0.0
    for line, loops in _lines(text):
        if dot := DOT.search(line):
            summed = math.prod(shapes[dot[2]][int(axis)] for axis in dot[3].split(","))
            total += 2 * math.prod(_arrays(dot[1])[0].shape) * summed * math.prod(loops)
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


def _lines(text: str) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Every line that runs, and how often the loops around it do."""
    bodies = {}
    for part in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \()", text):
        name = "ENTRY" if part.startswith("ENTRY") else part.split(" ", 1)[0].lstrip("%")
        bodies[name] = part.splitlines()

    def walk(name: str, loops: tuple[float, ...]) -> Iterator[tuple[str, tuple[float, ...]]]:
        for line in bodies[name]:
            yield line, loops
            if body := BODY.search(line):
                trips = TRIPS.search(line)
                yield from walk(body[1], (*loops, int(trips[1]) if trips else math.inf))
            elif called := CALLED.search(line):
                for one in NAME.findall(called[1]):
                    yield from walk(one, loops)

    return walk("ENTRY", ())


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(Array(dtype, _numbers(shape)) for dtype, shape in SHAPE.findall(text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def _stage(line: str) -> str:
    name = re.search(r'op_name="([^"]*)"', line)
    if name is None:
        return ""
    if "rematted_computation" in name[1]:
        return "again"
    return "backward" if "transpose(" in name[1] else "forward" if "jvp(" in name[1] else ""


def _over(line: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which devices differ that exchange something."""
    shape = tuple(sizes.values())
    places = [np.stack(np.unravel_index(group, shape)) for group in _groups(line)]
    return tuple(axis for i, axis in enumerate(sizes) if any(np.ptp(place[i]) for place in places))


def _groups(line: str) -> list[tuple[int, ...]]:
    """Numbers of the devices that take part together, or of the sender and the receiver."""
    if members := MEMBERS.search(line):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", members[1])]
    # The compiler's own: axes of a mesh, which has the devices in another order, and those of them it runs along.
    named = NAMED_MEMBERS.search(line)
    assert named, f"The devices of this collective are written in an unknown way: {line.strip()[:400]}"
    lengths = {axis: int(length) for axis, length in re.findall(r"'(\w+)'=(\d+)", named[1])}
    count = math.prod(lengths.values())
    order = np.arange(count)
    if named[2]:
        order = order.reshape(_numbers(named[2])).transpose(_numbers(named[3]) if named[3] else None)
    order = order.reshape(tuple(lengths.values()))
    along = [list(lengths).index(axis) for axis in re.findall(r"'(\w+)'", named[4])]
    rest = [axis for axis in range(order.ndim) if axis not in along]
    rows = order.transpose(*rest, *along).reshape(-1, math.prod(order.shape[axis] for axis in along))
    return [tuple(row) for row in rows.tolist()]
