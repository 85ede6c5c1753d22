"""A digest of named parameters that does not depend on their sharding or on the parts they are read in."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Sums = np.ndarray  # uint32 [2]


def fingerprint(arrays: Mapping[str, jax.Array]) -> str:
    """Compute a digest of all bits of parameters, independent of their sharding; 32 hexadecimal digits.

    For each array it sums the bits of each element times a hash of its index, in integers, so that the order of
    summation does not matter. It detects mistakes, not deliberate forgery.
    """
    return combine_sums(jax.device_get(_sums(dict(arrays), np.uint32(0))))


def combine_sums(sums: Mapping[str, Sums]) -> str:
    """Compute the `fingerprint` of arrays from their `part_sums`."""
    digest = hashlib.sha256()
    for name in sorted(sums):
        digest.update(f"{name} {sums[name].tolist()}\n".encode())
    return digest.hexdigest()[:32]


def part_sums(parts: Iterable[tuple[int, Any]]) -> Sums:
    """Compute the sums of an array from (first index along the leading axis, part) pairs."""
    total = np.zeros(2, np.uint32)
    for first, part in parts:
        total += np.asarray(_sums(jnp.asarray(part), np.uint32(first)))
    return total


@jax.jit
def _sums(arrays: Any, first: Any) -> Any:
    """Return the sums of each array of a pytree."""
    return jax.tree.map(lambda x: jnp.stack([_sum(x, first, 1), _sum(x, first, 2)]), arrays)


def _sum(x: jax.Array, first: Any, seed: int) -> jax.Array:
    kinds = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
    bits = jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.full(bits.shape, seed * 0x9E3779B9 & 0xFFFFFFFF, jnp.uint32)
    for axis in range(bits.ndim):  # the finalizer of MurmurHash3, over one index after another
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        place = place * jnp.uint32(0x01000193) + (index + first if axis == 0 else index)
        place = (place ^ (place >> 16)) * jnp.uint32(0x85EBCA6B)
        place = (place ^ (place >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum((bits + 1) * (place | 1), dtype=jnp.uint32)
