"""The compiled programs that measure a collective, and the check that each contains it as often as it should."""

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zaya_jax.lab.measure.collectives.operations import COLLECTIVES, Axes, Collective, compiled_kind, pattern
from zaya_jax.lab.predict.compilers.hlo import entry_place, parse, walk
from zaya_jax.parallel.mesh import AXES, AnyMesh

IN_GRAPH = 16  # operations of a program in the mode `graph`, each of which needs the result of the one before
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


class Programs:
    """Programs of a case, each compiled when it is first used. Arrays are [elements · devices], sharded over all axes.

    A chunk is read from, or written to, its place in the buffer, like NCCL's operations in place.

    Raises:
      RuntimeError: a compiled program does not contain the collective exactly as often as it should; XLA has then
        removed or replaced it, and its time would say nothing.
    """

    def __init__(self, case: Case) -> None:
        """See `Case`."""
        self.case = case
        collective, n, chunk = case.collective, case.ranks, case.chunk
        self._numbers = pattern(n, case.dtype)
        self._sent = chunk if collective.chunked == "in" else case.elements
        self._received = chunk if collective.chunked == "out" else case.elements

    @functools.cached_property
    def fill(self) -> Callable[[], jax.Array]:
        """() → the input."""
        return self._compiled(self._own, None)

    @functools.cached_property
    def fill_buffer(self) -> Callable[[], jax.Array]:
        """() → a buffer whose own chunk holds the input."""
        return self._compiled(lambda: self._put(jnp.zeros(self.case.elements, self.case.dtype), self._own()), None)

    @functools.cached_property
    def run(self) -> Any:
        """Input → output."""
        return self._compiled(lambda x: self.case.collective.run(x, self.case.axes), self._sent, times=1)

    @functools.cached_property
    def in_place(self) -> Any:
        """(donated) buffer → the same buffer with the output in it."""
        return self._compiled(self._in_place, self.case.elements, times=1, donate=True)

    @functools.cached_property
    def in_graph(self) -> Any:
        """(donated) buffer → the same buffer after `IN_GRAPH` operations."""

        def repeated(buffer: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, IN_GRAPH, lambda _, x: self._in_place(x), buffer)

        return self._compiled(repeated, self.case.elements, times=IN_GRAPH, donate=True)

    @functools.cached_property
    def wrong(self) -> Callable[[jax.Array], jax.Array]:
        """Output → int32 [devices], number of wrong elements of each."""
        return self._compiled(self._wrong, self._received)

    @functools.cached_property
    def wrong_buffer(self) -> Callable[[jax.Array], jax.Array]:
        """Buffer after `in_place` → int32 [devices], number of wrong elements of each."""
        return self._compiled(lambda buffer: self._wrong(self._get(buffer, self._received)), self.case.elements)

    def _rank(self) -> jax.Array:
        return jax.lax.axis_index(self.case.axes)

    def _own(self) -> jax.Array:
        return self._numbers.value(self._rank(), jnp.arange(self._sent)).astype(self.case.dtype)

    def _get(self, buffer: jax.Array, size: int) -> jax.Array:
        if size == self.case.elements:
            return buffer
        return jax.lax.dynamic_slice_in_dim(buffer, self._rank() * size, size)

    def _put(self, buffer: jax.Array, x: jax.Array) -> jax.Array:
        if x.size == buffer.size:
            return x
        return jax.lax.dynamic_update_slice_in_dim(buffer, x, self._rank() * x.size, 0)

    def _in_place(self, buffer: jax.Array) -> jax.Array:
        return self._put(buffer, self.case.collective.run(self._get(buffer, self._sent), self.case.axes))

    def _wrong(self, out: jax.Array) -> jax.Array:
        case = self.case
        source = case.collective.source(self._rank(), jnp.arange(self._received), case.ranks, case.chunk)
        return (out != self._numbers.value(*source).astype(case.dtype)).sum(dtype=jnp.int32)[None]

    def _compiled(self, shard: Callable[..., jax.Array], elements: int | None, *, times: int = 0,
                  donate: bool = False) -> Callable[..., Any]:  # fmt: skip
        """Compile `shard` for an argument with so many elements per device (None: no argument)."""
        case, spec = self.case, PartitionSpec(AXES)
        mapped = jax.shard_map(shard, mesh=case.mesh, in_specs=() if elements is None else spec, out_specs=spec,
                               check_vma=False)  # fmt: skip
        arguments = []
        if elements is not None:
            sharding = NamedSharding(case.mesh, spec)
            arguments = [jax.ShapeDtypeStruct((elements * case.mesh.size,), case.dtype, sharding=sharding)]
        compiled = jax.jit(mapped, donate_argnums=(0,) if donate else ()).lower(*arguments).compile()
        counts, kind = collective_counts(compiled.as_text() or ""), compiled_kind(case.collective)
        if counts != ({kind: times} if times else {}):
            raise RuntimeError(f"The program for {case.collective.name} has the collectives {dict(counts)}, but must "
                               f"have {times} of {kind}.")  # fmt: skip
        return compiled


def collective_counts(text: str) -> Counter[str]:
    """Count how often a scheduled HLO module runs each kind of collective, loops included."""
    counts = Counter[str]()
    for place in walk(entry_place(parse(text))):
        for instruction in place.instructions:
            if (kind := instruction.opcode.removesuffix("-start")) in _KINDS:
                counts[kind] += place.times
    return counts
