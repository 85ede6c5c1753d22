"""The collectives to measure: what each sends, what it must return, and how its bandwidth is counted.

Sizes and bandwidths are those of nccl-tests and rccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the
size S is the larger of a device's input and output, the algorithm bandwidth is S / time, and the bus bandwidth corrects
it by a factor, so that an ideal ring gives the same number for any number of devices.
"""

import functools
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
    reduction: str = "none"  # nccl-tests' name of the reduction; 'none' if there is none
    root: int = -1  # rank of the root; −1 if there is none

    def elements(self, size: int, item: int, n: int) -> int:
        """Return the elements of a device's buffer for a size in bytes: at least one in each chunk."""
        return max(1, size // item // n) * n if self.whole_chunks else max(1, size // item)

    def passed(self, elements: int, n: int) -> int:
        """Return nccl-tests' column `count`: elements that a rank passes to the call."""
        return elements // n if self.whole_chunks else elements


# By operation: (rank, index of an output element, n, elements of a chunk) → (rank that it comes from, its index there);
# rank −1 for the sum over all ranks.
SOURCES = {
    "all_reduce": lambda _rank, i, _n, _chunk: (-1, i),
    "reduce_scatter": lambda rank, i, _n, chunk: (-1, rank * chunk + i),
    "all_gather": lambda _rank, i, _n, chunk: (i // chunk, i % chunk),
    "broadcast": lambda _rank, i, _n, _chunk: (0, i),
    "all_to_all": lambda rank, i, _n, chunk: (i // chunk, rank * chunk + i % chunk),
    "permute": lambda rank, i, n, _chunk: ((rank - 1) % n, i),
}


def _ring(n: int) -> float:
    """Return the share of the size that an ideal ring sends over each link."""
    return (n - 1) / n


def _permute(x: jax.Array, axes: Axes) -> jax.Array:
    n = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(rank, (rank + 1) % n) for rank in range(n)])


def _broadcast(x: jax.Array, axes: Axes) -> jax.Array:
    if jax.default_backend() == "cpu":  # for which XLA has no broadcast: a sum of zeros and the root's values
        return jax.lax.psum(jnp.where(jax.lax.axis_index(axes) == 0, x, 0), axes)
    return jax.lax.pbroadcast(x, axes, 0)


_gather, _to_all = functools.partial(jax.lax.all_gather, tiled=True), functools.partial(jax.lax.all_to_all, tiled=True)
_ALL = (
    Collective("all_reduce", "all-reduce", lambda n: 2 * _ring(n), "", False, jax.lax.psum, "sum"),
    Collective("reduce_scatter", "reduce-scatter", _ring, "out", True, lambda x, axes: sum_scatter(x, axes, 0), "sum"),
    Collective("all_gather", "all-gather", _ring, "in", True, _gather),
    Collective("broadcast", "collective-broadcast", lambda _: 1.0, "", False, _broadcast, root=0),
    Collective("all_to_all", "all-to-all", _ring, "", True, lambda x, axes: _to_all(x, axes, 0, 0)),
    Collective("permute", "collective-permute", lambda _: 1.0, "", False, _permute),
)
COLLECTIVES = {collective.name: collective for collective in _ALL}


def label(collective: Collective) -> str:
    """Return the name of a row: the operation, or what computes it on CPUs, comparable with no other."""
    if jax.default_backend() == "cpu":
        if collective.name == "broadcast":
            return "bcast_via_allreduce"
        if collective.name == "reduce_scatter" and jax.process_count() > 1:
            return "reduce_scatter_via_allreduce"
    return collective.name


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
