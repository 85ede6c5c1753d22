"""The collectives to measure: what each sends, what it must return, and how its bandwidth is counted.

Sizes and bandwidths are those of nccl-tests and rccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the
size S is the larger of a device's input and output, the algorithm bandwidth is S / time, and the bus bandwidth corrects
it by a factor, so that an ideal ring gives the same number for any number of devices.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.parallel.collectives import sum_scatter

Axes = tuple[str, ...]


class Collective(NamedTuple):
    """A collective."""

    name: str  # of the operation
    kind: str  # of its instruction in HLO
    factor: Callable[[int], float]  # bus bandwidth over algorithm bandwidth, for n devices
    chunked: Literal["in", "out", ""]  # which buffer holds a chunk of 1 / n of the size: input, output or neither
    whole_chunks: bool  # whether the size must be a multiple of the devices
    run: Callable[[jax.Array, Axes], jax.Array]  # (x [t], axes) → result [t], inside a `shard_map`
    # (rank, index of an output element, n, elements of a chunk) → (rank that it comes from, its index there); rank −1
    # for the sum over all ranks
    source: Callable[..., tuple[jax.Array | int, jax.Array]]
    reduction: str = "none"  # nccl-tests' name of the reduction; 'none' if there is none
    root: int = -1  # rank of the root; −1 if there is none

    def elements(self, size: int, item: int, n: int) -> int:
        """Return the elements of a device's buffer for a size in bytes: at least one in each chunk."""
        return max(1, size // item // n) * n if self.whole_chunks else max(1, size // item)

    def passed(self, elements: int, n: int) -> int:
        """Return nccl-tests' column `count`: elements that a rank passes to the call."""
        return elements // n if self.whole_chunks else elements


def _permute(x: jax.Array, axes: Axes) -> jax.Array:
    n = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(rank, (rank + 1) % n) for rank in range(n)])


def _broadcast(x: jax.Array, axes: Axes) -> jax.Array:
    if broadcasts_by_sum():
        return jax.lax.psum(jnp.where(jax.lax.axis_index(axes) == 0, x, 0), axes)
    return jax.lax.pbroadcast(x, axes, 0)


def broadcasts_by_sum() -> bool:
    """True if a broadcast is a sum of zeros and the root's values, since XLA has none for CPUs."""
    return jax.default_backend() == "cpu"


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("all_reduce", "all-reduce", lambda n: 2 * (n - 1) / n, "", False,
                   jax.lax.psum, lambda _rank, i, _n, _chunk: (-1, i), "sum"),
        Collective("reduce_scatter", "reduce-scatter", lambda n: (n - 1) / n, "out", True,
                   lambda x, axes: sum_scatter(x, axes, 0), lambda rank, i, _n, chunk: (-1, rank * chunk + i), "sum"),
        Collective("all_gather", "all-gather", lambda n: (n - 1) / n, "in", True,
                   lambda x, axes: jax.lax.all_gather(x, axes, tiled=True),
                   lambda _rank, i, _n, chunk: (i // chunk, i % chunk)),
        Collective("broadcast", "collective-broadcast", lambda _: 1.0, "", False, _broadcast,
                   lambda _rank, i, _n, _chunk: (0, i), root=0),
        Collective("all_to_all", "all-to-all", lambda n: (n - 1) / n, "", True,
                   lambda x, axes: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
                   lambda rank, i, _n, chunk: (i // chunk, rank * chunk + i % chunk)),
        Collective("permute", "collective-permute", lambda _: 1.0, "", False, _permute,
                   lambda rank, i, n, _chunk: ((rank - 1) % n, i)),
    )
}  # fmt: skip


def label(collective: Collective) -> str:
    """Return the name of a row: the operation, and what it was computed by if it is not the operation itself.

    Rows with such a label must not be compared with those of another machine.
    """
    if collective.name == "broadcast" and broadcasts_by_sum():
        return "bcast_via_allreduce"
    # On CPUs, `parallel.collectives.sum_scatter` is an all-reduce and a slice.
    if collective.name == "reduce_scatter" and jax.default_backend() == "cpu" and jax.process_count() > 1:
        return "reduce_scatter_via_allreduce"
    return collective.name


def compiled_kind(collective: Collective) -> str:
    """Return the HLO instruction that the operation compiles to on this backend."""
    return "all-reduce" if label(collective) != collective.name else collective.kind


class Pattern(NamedTuple):
    """Integers that every dtype represents exactly, sums over all ranks included.

    Element i of a rank is (rank + i) mod `period`, but 0 in ranks that are no multiple of `stride`.
    """

    period: int
    stride: int
    sums: tuple[int, ...]  # over all ranks, by i mod period

    def value(self, rank: jax.Array | int, index: jax.Array) -> jax.Array:
        """Return an element; for rank −1 the sum over all ranks. int32, like `index`."""
        own = jnp.where(rank % self.stride == 0, (rank + index) % self.period, 0)
        return jnp.where(rank == -1, jnp.asarray(self.sums, jnp.int32)[index % self.period], own)


def pattern(n: int, dtype: str) -> Pattern:
    """Make the pattern for n ranks: bf16 represents all integers up to 256, int8 up to 127."""
    largest = 127 if dtype == "int8" else 256
    stride = -(-n // (largest // 2))
    ranks = range(0, n, stride)
    period = max(2, largest // len(ranks))
    return Pattern(period, stride, tuple(sum((rank + i) % period for rank in ranks) for i in range(period)))
