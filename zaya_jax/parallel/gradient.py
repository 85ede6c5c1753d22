"""The gradient region: one `shard_map` over the batch, in which everything sees local shapes.

Parameters enter whole. Each device adds up the gradients of its micro-batches in fp32, and only then are
they summed over devices, once a leaf: left to the compiler's own partitioning, an all-reduce would stand
inside the loop for every layer of every micro-batch. Local functions return sums, which are divided once
by the count of all devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zaya_jax.parallel.mesh import BATCH_AXES, batch_spec

Sums = Any
LocalLoss = Callable[[Any, Any, Any], tuple[jax.Array, Sums]]


def summed_gradient(local_loss: LocalLoss, mesh: Mesh) -> Callable[[Any, Any, Any], tuple[Sums, Any]]:
    """Gradient of the summed loss over all micro-batches and devices.

    Args:
      local_loss: (params, constants, micro-batch) → (scalar sum to differentiate in params, further sums).
      mesh: where it runs.

    Returns:
      (params, constants, batch with leaves [micro-batches, sequences, …]) → (sums, gradient), the sums of
      `local_loss` and the fp32 gradient of its scalar, added over everything.
    """

    def region(params: Any, constants: Any, batch: Any) -> tuple[Sums, Any]:
        gradient = jax.grad(local_loss, has_aux=True)

        def one(micro: Any) -> tuple[Any, Sums]:
            grads, sums = gradient(params, constants, micro)
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums

        def add(total: Any, micro: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, one(micro)), None

        first = one(jax.tree.map(lambda x: x[0], batch))
        rest = jax.tree.map(lambda x: x[1:], batch)
        (grads, sums), _ = jax.lax.scan(add, first, rest)
        return _over_devices((sums, grads), mesh)

    return _manual(region, mesh, batch_spec(leading=1))


def summed(local_sums: Callable[[Any, Any], Sums], mesh: Mesh) -> Callable[[Any, Any], Sums]:
    """(params, batch with leaves [sequences, …]) → the sums of `local_sums` over all devices."""

    def region(params: Any, batch: Any) -> Sums:
        return _over_devices(local_sums(params, batch), mesh)

    return jax.shard_map(region, mesh=mesh, in_specs=(PartitionSpec(), batch_spec()), out_specs=PartitionSpec(),
                         check_vma=False)  # fmt: skip


def _over_devices(sums: Sums, mesh: Mesh) -> Sums:
    # A sum over one device would still be a collective, which copies every gradient.
    axes = [axis for axis in BATCH_AXES if mesh.shape[axis] > 1]
    return jax.lax.psum(sums, axes) if axes else sums


def _manual(region: Callable, mesh: Mesh, batch: PartitionSpec) -> Callable:
    # check_vma would refuse kernels, whose outputs carry no varying axes; sums therefore stay out of what is
    # differentiated, since unchecked they transpose to sums.
    whole = PartitionSpec()
    return jax.shard_map(region, mesh=mesh, in_specs=(whole, whole, batch), out_specs=whole, check_vma=False)
