"""Tile sizes of every kernel, fixed by platform and dtype: the one place where they stand."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

PLATFORMS = ("cuda", "rocm", "interpret")


class Tile(NamedTuple):
    """How a kernel is cut into programs.

    Attributes:
      sizes: of a tile's axes, as the kernel names them; powers of two.
      warps: groups of threads that do a program.
      stages: of the pipeline of a loop with products.
    """

    sizes: tuple[int, ...]
    warps: int
    stages: int = 1


# Kernel → platform → bytes of an element. An interpreted kernel has tiles of its own: small, so that the shapes of
# tests have ragged ends and more than one tile.
TILES: dict[str, dict[str, dict[int, Tile]]] = {
    "residual_norm": {
        "cuda": {2: Tile((1,), 8), 4: Tile((1,), 8)},
        "rocm": {2: Tile((1,), 4), 4: Tile((1,), 4)},
        "interpret": {2: Tile((1,), 1), 4: Tile((1,), 1)},
    },
}


def tile(kernel: str, platform: str, dtype: jax.typing.DTypeLike) -> Tile:
    """The tile of `kernel` for elements of `dtype`, those of 8 bytes taking the tile of 4."""
    by_size = TILES[kernel][platform]
    return by_size[min(jnp.dtype(dtype).itemsize, max(by_size))]
