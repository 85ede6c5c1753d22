"""Tile sizes of every kernel, fixed by platform and dtype: the one place where they stand."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

PLATFORMS = ("cuda", "rocm", "interpret")


class Tile(NamedTuple):
    """How a kernel is cut into programs.

    Attributes:
      sizes: of a tile's axes, as the kernel names them.
      warps: groups of threads that do a program.
      stages: of the pipeline of a loop with products.
    """

    sizes: tuple[int, ...]
    warps: int
    stages: int = 1


# Kernel → platform → bytes of an element. An interpreted kernel has tiles of its own: small, so that the shapes of
# tests have ragged ends and more than one tile.
TILES: dict[str, dict[str, dict[int, Tile]]] = {
    "residual_norm": {  # elements of a program; a longer row has as many more warps
        "cuda": {2: Tile((2048,), 4), 4: Tile((2048,), 4)},
        "rocm": {2: Tile((2048,), 4), 4: Tile((2048,), 4)},
        "interpret": {2: Tile((64,), 1), 4: Tile((64,), 1)},
    },
    "residual_norm_backward": {  # elements of a step, programs at most, rows of a program at least, lanes at most
        "cuda": {2: Tile((2048, 264, 12, 4096), 4), 4: Tile((2048, 264, 12, 2048), 4)},
        "rocm": {2: Tile((2048, 608, 12, 8192), 4), 4: Tile((2048, 608, 12, 8192), 4)},
        "interpret": {2: Tile((64, 3, 2, 64), 1), 4: Tile((64, 3, 2, 64), 1)},
    },
    "symmetric": {  # rows of a square tile, columns of a chunk
        "cuda": {2: Tile((128, 64), 8, 3), 4: Tile((64, 32), 4, 2)},
        "rocm": {2: Tile((128, 64), 4, 2), 4: Tile((64, 32), 4, 2)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    "momentum": {  # elements of a program
        "cuda": {2: Tile((2048,), 4), 4: Tile((2048,), 4)},
        "rocm": {2: Tile((2048,), 4), 4: Tile((2048,), 4)},
        "interpret": {2: Tile((64,), 1), 4: Tile((64,), 1)},
    },
    # Grouped products: rows, columns, depth of a piece; of SwiGLU columns of gate and of up, or of a half, each.
    "grouped_product": {
        "cuda": {2: Tile((128, 128, 64), 8, 3), 4: Tile((64, 64, 32), 8, 2)},
        "rocm": {2: Tile((128, 128, 64), 8, 2), 4: Tile((64, 64, 32), 4, 2)},
        "interpret": {2: Tile((16, 16, 16), 1), 4: Tile((16, 16, 16), 1)},
    },
    "grouped_swiglu": {
        "cuda": {2: Tile((128, 128, 64), 8, 3), 4: Tile((64, 32, 32), 8, 2)},
        "rocm": {2: Tile((128, 128, 64), 8, 2), 4: Tile((64, 32, 32), 4, 2)},
        "interpret": {2: Tile((16, 16, 16), 1), 4: Tile((16, 16, 16), 1)},
    },
    "grouped_swiglu_backward": {
        "cuda": {2: Tile((128, 64, 64), 8, 3), 4: Tile((64, 32, 32), 8, 2)},
        "rocm": {2: Tile((128, 64, 64), 8, 2), 4: Tile((64, 32, 32), 4, 2)},
        "interpret": {2: Tile((16, 16, 16), 1), 4: Tile((16, 16, 16), 1)},
    },
    "grouped_outer": {
        "cuda": {2: Tile((128, 128, 64), 8, 3), 4: Tile((64, 64, 32), 8, 2)},
        "rocm": {2: Tile((128, 128, 64), 8, 2), 4: Tile((64, 64, 32), 4, 2)},
        "interpret": {2: Tile((16, 16, 16), 1), 4: Tile((16, 16, 16), 1)},
    },
    # Attention: rows (queries times the heads that share a key head), keys.
    "attention": {
        "cuda": {2: Tile((128, 64), 8, 3), 4: Tile((32, 32), 8)},
        "rocm": {2: Tile((128, 64), 4), 4: Tile((64, 32), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    "attention_backward_keys": {
        "cuda": {2: Tile((64, 64), 8, 2), 4: Tile((32, 32), 8)},
        "rocm": {2: Tile((32, 128), 4), 4: Tile((16, 64), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    "attention_backward_queries": {
        "cuda": {2: Tile((128, 64), 8, 2), 4: Tile((16, 16), 8)},
        "rocm": {2: Tile((128, 32), 4), 4: Tile((64, 16), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    "decode": {  # keys, programs
        "cuda": {2: Tile((64, 512), 4, 2), 4: Tile((32, 512), 8, 2)},
        "rocm": {2: Tile((64, 1024), 4), 4: Tile((32, 1024), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    # CCA mix: tokens, channels of a step of a product.
    "cca_mix": {
        "cuda": {2: Tile((32, 64), 4), 4: Tile((16, 32), 8)},
        "rocm": {2: Tile((32, 64), 4), 4: Tile((16, 32), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    # Tokens of a tile and channels of a step of a product; the same where tokens are summed over, and there taps of a
    # program, and tokens of a part, which a cache should hold with all that is made of them (1,280 of the 8B's: 11 MB).
    "cca_mix_backward": {
        "cuda": {2: Tile((32, 128, 16, 128, 2, 1280), 8), 4: Tile((16, 32, 16, 32, 1, 1280), 8)},
        "rocm": {2: Tile((32, 64, 32, 128, 2, 1280), 4), 4: Tile((16, 32, 16, 32, 2, 1280), 4)},
        "interpret": {2: Tile((16, 16, 16, 32, 2, 16), 1), 4: Tile((16, 16, 16, 32, 2, 16), 1)},
    },
}


def tile(kernel: str, platform: str, dtype: jax.typing.DTypeLike) -> Tile:
    """The tile of `kernel` for elements of `dtype`, those of 8 bytes taking the tile of 4."""
    by_size = TILES[kernel][platform]
    return by_size[min(jnp.dtype(dtype).itemsize, max(by_size))]
