"""The tile sizes of all kernels, by architecture and dtype."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

PLATFORMS = ("cuda", "rocm", "interpret")
DEFAULT = {"cuda": "sm_90", "rocm": "gfx942"}  # platform → architecture whose tiles unlisted ones use


class Tile(NamedTuple):
    """How a kernel is split into programs."""

    sizes: tuple[int, ...]  # sizes of the tile's axes, in the order of the kernel
    warps: int  # warps of a program
    stages: int = 1  # stages of the software pipeline for loops with matmuls


class Tuned(NamedTuple):
    """An architecture, and the tiles that were measured to be fastest on a device."""

    name: str
    tiles: tuple[tuple[str, Tile], ...]  # by kernel; others use their defaults


# 'gfx942', 'gfx950', 'sm_90', …; 'rocm' or 'cuda' if it is not known; 'interpret' emulates kernels on any device.
Architecture = str | Tuned

# Kernel → architecture → bytes per element → default tile. gfx950 uses the tiles of gfx942. Interpreted
# kernels have small tiles, so that the arrays of tests have several tiles, some of them partial.
TILES: dict[str, dict[str, dict[int, Tile]]] = {
    "residual_norm": {  # elements per program; for longer rows, warps grow with the row
        "sm_90": {2: Tile((2048,), 4), 4: Tile((2048,), 4)},
        "gfx942": {2: Tile((2048,), 4), 4: Tile((2048,), 4)},
        "interpret": {2: Tile((64,), 1), 4: Tile((64,), 1)},
    },
    "residual_norm_backward": {  # elements per step, maximum programs, minimum rows per program, maximum lanes
        "sm_90": {2: Tile((2048, 264, 12, 4096), 4), 4: Tile((2048, 264, 12, 2048), 4)},
        "gfx942": {2: Tile((2048, 608, 12, 4096), 4), 4: Tile((2048, 608, 12, 4096), 4)},
        "interpret": {2: Tile((64, 3, 2, 64), 1), 4: Tile((64, 3, 2, 64), 1)},
    },
    "symmetric": {  # rows of a square tile, columns of a chunk for the Gram matrix and for the polynomial
        "sm_90": {2: Tile((128, 64, 32), 8, 3), 4: Tile((64, 32, 32), 4, 2)},
        "gfx942": {2: Tile((128, 64, 64), 4, 2), 4: Tile((64, 32, 32), 4, 2)},
        "interpret": {2: Tile((16, 16, 16), 1), 4: Tile((16, 16, 16), 1)},
    },
    "class_sort": {  # tokens per program
        "sm_90": {2: Tile((1024,), 8), 4: Tile((1024,), 8)},
        "gfx942": {2: Tile((256,), 4), 4: Tile((256,), 4)},
        "interpret": {2: Tile((16,), 1), 4: Tile((16,), 1)},
    },
    # Grouped matmuls: rows, columns, contracted columns per step. For SwiGLU, columns of gate and of up each; in its
    # backward pass, columns of one half of the tile.
    "grouped_product": {
        "sm_90": {2: Tile((128, 128, 64), 8, 3), 4: Tile((64, 64, 32), 8, 2)},
        "gfx942": {2: Tile((128, 128, 64), 8, 2), 4: Tile((64, 64, 32), 4, 2)},
        "interpret": {2: Tile((16, 16, 16), 1), 4: Tile((16, 16, 16), 1)},
    },
    "grouped_swiglu": {
        "sm_90": {2: Tile((128, 128, 64), 8, 3), 4: Tile((64, 32, 32), 8, 2)},
        "gfx942": {2: Tile((128, 128, 64), 8, 2), 4: Tile((64, 32, 32), 4, 2)},
        "interpret": {2: Tile((16, 16, 16), 1), 4: Tile((16, 16, 16), 1)},
    },
    "grouped_swiglu_backward": {
        "sm_90": {2: Tile((128, 64, 64), 8, 3), 4: Tile((64, 32, 32), 8, 2)},
        "gfx942": {2: Tile((128, 64, 64), 8, 2), 4: Tile((64, 32, 32), 4, 2)},
        "interpret": {2: Tile((16, 16, 16), 1), 4: Tile((16, 16, 16), 1)},
    },
    "grouped_outer": {
        "sm_90": {2: Tile((128, 128, 64), 8, 3), 4: Tile((64, 64, 32), 8, 2)},
        "gfx942": {2: Tile((128, 128, 64), 8, 2), 4: Tile((64, 64, 32), 4, 2)},
        "interpret": {2: Tile((16, 16, 16), 1), 4: Tile((16, 16, 16), 1)},
    },
    # Attention: rows (queries times the heads that share a key head), keys. sm_90 multiplies fastest if a tile has 128
    # columns or more, for which other NVIDIA GPUs may have too little shared memory.
    "attention": {
        "sm_90": {2: Tile((128, 128), 8, 2), 4: Tile((32, 32), 8)},
        "cuda": {2: Tile((128, 64), 8, 2), 4: Tile((32, 32), 8)},
        "gfx942": {2: Tile((128, 32), 4), 4: Tile((64, 32), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    "attention_backward_keys": {
        "sm_90": {2: Tile((64, 128), 8, 2), 4: Tile((32, 32), 8)},
        "cuda": {2: Tile((64, 64), 8, 2), 4: Tile((32, 32), 8)},
        "gfx942": {2: Tile((32, 128), 4), 4: Tile((16, 64), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    "attention_backward_queries": {
        "sm_90": {2: Tile((128, 128), 8, 2), 4: Tile((16, 16), 8)},
        "cuda": {2: Tile((128, 64), 8, 2), 4: Tile((16, 16), 8)},
        "gfx942": {2: Tile((128, 32), 4), 4: Tile((64, 16), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    "decode": {  # keys, programs
        "sm_90": {2: Tile((64, 512), 4, 2), 4: Tile((32, 512), 8, 2)},
        "gfx942": {2: Tile((64, 1024), 4), 4: Tile((32, 1024), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    # CCA mix: tokens, channels per step of a matmul.
    "cca_mix": {
        "sm_90": {2: Tile((32, 64), 8), 4: Tile((16, 32), 8)},
        "gfx942": {2: Tile((32, 64), 4), 4: Tile((16, 32), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    # Tokens and channels per step of a matmul, for the programs of a tile; the same for the programs that sum over
    # tokens; their taps per program and tokens per part, which should fit a cache (1,280 tokens of the 8B: 11 MB).
    "cca_mix_backward": {
        "sm_90": {2: Tile((32, 128, 16, 64, 2, 1280), 8), 4: Tile((16, 32, 16, 32, 1, 1280), 8)},
        "gfx942": {2: Tile((32, 64, 32, 128, 2, 1280), 4), 4: Tile((16, 32, 16, 32, 2, 1280), 4)},
        "interpret": {2: Tile((16, 16, 16, 32, 2, 16), 1), 4: Tile((16, 16, 16, 32, 2, 16), 1)},
    },
    "cca_mix_backward_norm": {  # tokens
        "sm_90": {2: Tile((32,), 4), 4: Tile((16,), 4)},
        "gfx942": {2: Tile((32,), 4), 4: Tile((16,), 4)},
        "interpret": {2: Tile((16,), 1), 4: Tile((16,), 1)},
    },
    "cca_mix_backward_rows": {  # tokens, channels per step of a matmul
        "sm_90": {2: Tile((64, 128), 8), 4: Tile((16, 32), 8)},
        "gfx942": {2: Tile((64, 128), 4), 4: Tile((16, 32), 4)},
        "interpret": {2: Tile((16, 16), 1), 4: Tile((16, 16), 1)},
    },
    "cca_mix_backward_matrices": {  # tokens per step of a matmul, parts of the tokens
        "sm_90": {2: Tile((64, 13), 8, 2), 4: Tile((16, 13), 8)},
        "gfx942": {2: Tile((64, 15), 8), 4: Tile((16, 15), 8)},
        "interpret": {2: Tile((16, 3), 1), 4: Tile((16, 3), 1)},
    },
}


# The down and the transposed gate and up matrices have different shapes, and so different best tiles.
TILES["grouped_product_transposed"] = TILES["grouped_product"]
TILES["cca_mix_by_head"] = TILES["cca_mix"]
# Further tiles to time, kernel → architecture → tiles, in bfloat16; each compiles there without spills.
ALTERNATIVES: dict[str, dict[str, tuple[Tile, ...]]] = {
    "residual_norm": {"interpret": (Tile((128,), 1),)},
}


def architecture_name(architecture: Architecture) -> str:
    """Return the name of an architecture without its tiles."""
    return architecture.name if isinstance(architecture, Tuned) else architecture


def platform(architecture: Architecture) -> str:
    """Return the platform of an architecture ('sm_90' → 'cuda', 'gfx942' → 'rocm')."""
    name = architecture_name(architecture)
    return {"sm_": "cuda", "gfx": "rocm"}.get(name[:3], name)


def tile(kernel: str, architecture: Architecture, dtype: jax.typing.DTypeLike) -> Tile:
    """Return the tile of `kernel` for elements of `dtype`: the tuned one, or the first of `tiles`."""
    tuned = dict(architecture.tiles) if isinstance(architecture, Tuned) else {}
    return tuned.get(kernel) or tiles(kernel, architecture_name(architecture), dtype)[0]


def tiles(kernel: str, architecture: str, dtype: jax.typing.DTypeLike) -> tuple[Tile, ...]:
    """Return the tiles of `kernel` for elements of `dtype`, the default first.

    8-byte elements use the tile for 4 bytes. An unlisted architecture uses the default of its platform or of `DEFAULT`,
    on NVIDIA with at most two stages, which fit 99 KiB of shared memory.
    """
    by_architecture, of_platform, size = TILES[kernel], platform(architecture), jnp.dtype(dtype).itemsize
    known = architecture in by_architecture
    other = of_platform if of_platform in by_architecture else DEFAULT.get(of_platform, "")
    by_size = by_architecture[architecture if known else other]
    entry = by_size[min(size, max(by_size))]
    if not known and of_platform == "cuda":
        return (entry._replace(stages=min(entry.stages, 2)),)
    further = ALTERNATIVES.get(kernel, {}).get(architecture if known else other, ()) if size == 2 else ()
    return (entry, *further)
