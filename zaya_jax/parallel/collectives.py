"""Sums over devices of which each keeps its part."""

import jax


def sum_scatter(x: jax.Array, axes: str | tuple[str, ...], axis: int) -> jax.Array:
    """The sum of `x` over devices, of which each keeps its part along `axis`; inside a `shard_map`.

    Where CPUs of several processes are one job, Gloo's own leaves values at the end of a part wrong now and then (seen
    in fp64 and jax 0.10.2, a column's last elements off in the third digit): the whole sum is taken there, and cut.

    Args:
      x: the same shape on every device of `axes`.
      axes: of the mesh, in the order of the parts.
      axis: of `x`, which the devices divide.
    """
    if jax.default_backend() != "cpu" or jax.process_count() == 1:
        return jax.lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)
    size = x.shape[axis] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, axes), jax.lax.axis_index(axes) * size, size, axis)
