"""Compile a collective, check its results, and time it: seconds of each call, the largest over processes."""

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zaya_jax.job.multihost import all_gather
from zaya_jax.lab.measure.collectives.operations import COLLECTIVES, SOURCES, Axes, Collective, label, pattern
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.predict.compilers.hlo import parse, walk
from zaya_jax.parallel.mesh import AXES, AnyMesh, make_mesh, nontrivial_axes

Mode = Literal["dispatch", "graph"]
IN_GRAPH = 16  # operations of a program in the mode `graph`, each of which needs the result of the one before
WARM_UP = 5  # calls before the first timed one
CHECKED = ("float32", "bfloat16", "int32")  # dtypes
_CHUNK = 64  # elements of each device, to check
_PATIENCE = 600  # seconds that processes may take until they start a case
_KINDS = tuple(collective.kind for collective in COLLECTIVES.values())


class Case(NamedTuple):
    """A collective at one size."""

    collective: Collective  # the operation
    mesh: AnyMesh  # all devices
    axes: Axes  # axes of the mesh that it runs over; one group of devices for each position on the other axes
    elements: int  # of a device's buffer, a multiple of the group's devices for an operation on whole chunks
    dtype: str  # name of the dtype

    @property
    def ranks(self) -> int:
        """Number of devices of a group."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def size(self) -> int:
        """The size in bytes, as nccl-tests counts it."""
        return self.elements * jnp.dtype(self.dtype).itemsize

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return self.elements // self.ranks

    def bandwidth(self, seconds: float) -> float:
        """Return the algorithm bandwidth in bytes/s."""
        return self.size / seconds

    def bus_bandwidth(self, seconds: float) -> float:
        """Return the bus bandwidth in bytes/s."""
        return self.bandwidth(seconds) * self.collective.factor(self.ranks)


class Programs:
    """Programs of a case, each compiled when it is first used. Arrays are [elements · devices], sharded over all axes.

    In place, input and output are chunks at their place in one buffer, which is donated, like NCCL's operations.
    RuntimeError if a program does not contain the collective exactly as often as it should: XLA has then removed or
    replaced it, and its time would say nothing.
    """

    def __init__(self, case: Case, *, in_place: bool = False) -> None:
        self.case, self.in_place, self._numbers = case, in_place, pattern(case.ranks, case.dtype)
        self._sent, self._received = (
            case.chunk if case.collective.chunked == side else case.elements for side in ("in", "out")
        )

    @functools.cached_property
    def fill(self) -> Callable[[], jax.Array]:
        """() → the input."""

        def own() -> jax.Array:
            numbers = self._numbers.value(self._rank(), jnp.arange(self._sent)).astype(self.case.dtype)
            return self._put(jnp.zeros(self.case.elements, self.case.dtype), numbers)

        return self._compiled(own, None)

    @functools.cached_property
    def run(self) -> Any:
        """Input → output."""
        return self._compiled(self._operation, self._sent, times=1, donate=self.in_place)

    @functools.cached_property
    def in_graph(self) -> Any:
        """In place: buffer → the same buffer after `IN_GRAPH` operations."""

        def loop(buffer: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, IN_GRAPH, lambda _, x: self._operation(x), buffer)

        return self._compiled(loop, self._sent, times=IN_GRAPH, donate=True)

    @functools.cached_property
    def wrong(self) -> Callable[[jax.Array], jax.Array]:
        """Output → int32 [devices], number of wrong elements of each."""
        return self._compiled(self._wrong, self._received)

    def _rank(self) -> jax.Array:
        return jax.lax.axis_index(self.case.axes)

    def _get(self, buffer: jax.Array, size: int) -> jax.Array:
        if size == buffer.size:
            return buffer
        return jax.lax.dynamic_slice_in_dim(buffer, self._rank() * size, size)

    def _put(self, buffer: jax.Array, x: jax.Array) -> jax.Array:
        if not self.in_place or x.size == buffer.size:
            return x
        return jax.lax.dynamic_update_slice_in_dim(buffer, x, self._rank() * x.size, 0)

    def _operation(self, x: jax.Array) -> jax.Array:
        return self._put(x, self.case.collective.run(self._get(x, self._sent), self.case.axes))

    def _wrong(self, out: jax.Array) -> jax.Array:
        case = self.case
        source = SOURCES[case.collective.name](self._rank(), jnp.arange(self._received), case.ranks, case.chunk)
        expected = self._numbers.value(*source).astype(case.dtype)
        return (self._get(out, self._received) != expected).sum(dtype=jnp.int32)[None]

    def _compiled(
        self, shard: Callable[..., jax.Array], elements: int | None, *, times: int = 0, donate: bool = False
    ) -> Callable[..., Any]:
        """Compile `shard` for an argument with so many elements per device, in place a buffer (None: no argument)."""
        (_, mesh, _, size, dtype), spec, arguments = self.case, PartitionSpec(AXES), []
        if elements is not None:
            elements, sharding = size if self.in_place else elements, NamedSharding(mesh, spec)
            arguments = [jax.ShapeDtypeStruct((elements * mesh.size,), dtype, sharding=sharding)]
        mapped = jax.shard_map(shard, mesh=mesh, in_specs=(spec,) * len(arguments), out_specs=spec, check_vma=False)
        compiled = jax.jit(mapped, donate_argnums=(0,) if donate else ()).lower(*arguments).compile()
        counts, collective = collective_counts(compiled.as_text() or ""), self.case.collective
        kind = collective.kind if label(collective) == collective.name else "all-reduce"
        if counts != ({kind: times} if times else {}):
            which = f"The program for {self.case.collective.name} has the collectives {dict(counts)}"
            raise RuntimeError(f"{which}, but must have {times} of {kind}.")
        return compiled


def collective_counts(text: str) -> Counter[str]:
    """Count how often a scheduled HLO module runs each kind of collective, loops included."""
    counts = Counter[str]()
    for place in walk(parse(text)):
        for instruction in place.instructions:
            if (kind := instruction.opcode.removesuffix("-start")) in _KINDS:
                counts[kind] += place.times
    return counts


class TimedCase(NamedTuple):
    """A timed case, out of place or in place."""

    case: Case
    seconds: list[float]  # of each call
    wrong: int  # number of wrong elements over all devices

    @property
    def mean(self) -> float:
        """Mean seconds of a call."""
        return statistics.fmean(self.seconds)


def time_case(case: Case, mode: Mode, repeats: int) -> dict[str, TimedCase]:
    """Check and time a collective, 'out_of_place' (not in the mode 'graph') and 'in_place'; raises like `Programs`.

    'dispatch' times calls, with what starting a program costs; 'graph' divides the time of a program of `IN_GRAPH`.
    """
    in_place, out_of_place = Programs(case, in_place=True), Programs(case)
    wrong = wrong_elements(in_place)
    if mode == "graph":
        seconds = _time(in_place, in_place.in_graph, repeats)
        return {"in_place": TimedCase(case, [second / IN_GRAPH for second in seconds], wrong)}
    first = TimedCase(case, _time(out_of_place, out_of_place.run, repeats), wrong_elements(out_of_place))
    return {"out_of_place": first, "in_place": TimedCase(case, _time(in_place, in_place.run, repeats), wrong)}


def wrong_elements(programs: Programs) -> int:
    """Run a collective once, and count the wrong elements over all devices."""
    wrong = programs.wrong(programs.run(programs.fill()))
    own = sum(int(shard.data.sum()) for shard in wrong.addressable_shards)
    return sum(all_gather("collectives", own, _PATIENCE))


def _time(programs: Programs, call: Callable[[jax.Array], jax.Array], repeats: int) -> list[float]:
    """Time calls on the same input, or, in place, on the result of the call before."""
    x = programs.fill()

    def one_call() -> None:
        nonlocal x
        out = call(x).block_until_ready()
        x = out if programs.in_place else x

    time_calls(one_call, WARM_UP, 0)
    all_gather("collectives", None, _PATIENCE)  # all processes start the timed calls together
    seconds = time_calls(one_call, repeats, 0).seconds
    return np.max(all_gather("collectives", seconds, _PATIENCE), axis=0).tolist()


def check_collectives() -> dict[str, Any]:
    """Run each collective of this job, and compare every element; `skipped` and `failed` are sentences."""
    mesh = make_mesh()
    if mesh.size < 2:
        return {"devices": mesh.size, "skipped": "There is only one device, so there are no collectives to check."}
    axes, wrong = nontrivial_axes(mesh, AXES), []
    for collective, dtype in itertools.product(COLLECTIVES.values(), CHECKED):
        case = Case(collective, mesh, axes, _CHUNK * mesh.size, dtype)
        if sum(wrong_elements(Programs(case, in_place=place)) for place in (False, True)):
            wrong.append(f"{label(collective)} in {dtype}")
    result: dict[str, Any] = {"devices": mesh.size, "dtypes": list(CHECKED)}
    if wrong:
        result["failed"] = f"Wrong results over {mesh.size} devices: {', '.join(wrong)}."
    return result
