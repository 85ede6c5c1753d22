"""The tile sizes of all kernels, by architecture and dtype."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

PLATFORMS = ("cuda", "rocm", "interpret")
DEFAULT = {"cuda": "sm_90", "rocm": "gfx942"}  # platform → architecture whose tiles unlisted ones use


class Tile(NamedTuple):
    """The split of a kernel into programs."""

    sizes: tuple[int, ...]  # sizes of the tile's axes, in the order of the kernel
    warps: int  # warps of a program
    stages: int = 1  # stages of the software pipeline for loops with matmuls


class Tuned(NamedTuple):
    """An architecture, and the tiles that were measured to be fastest on a device."""

    name: str
    tiles: tuple[tuple[str, Tile], ...]  # by kernel; others use their defaults
    dtype: str  # of the elements; those of other dtypes use the defaults


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
    "cca_mix_backward_norm": {  # tokens
        "sm_90": {2: Tile((32,), 4), 4: Tile((16,), 4)},
        "gfx942": {2: Tile((32,), 4), 4: Tile((16,), 4)},
        "interpret": {2: Tile((16,), 1), 4: Tile((16,), 1)},
    },
    "cca_mix_backward_rows": {  # tokens, channels per step of a matmul
        "sm_90": {2: Tile((64, 128), 8), 4: Tile((16, 64), 8)},
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
# Further tiles to time, architecture → kernel → sizes/warps/stages, in bfloat16; each compiles there without spills.
ALTERNATIVES: dict[str, dict[str, str]] = {
    "sm_90": {
        "residual_norm": "4096/8/1 8192/8/1",
        "residual_norm_backward": "2048×132×12×4096/8/1 2048×264×12×4096/8/1 2048×264×12×2048/4/1 2048×528×6×2048/4/1",
        "symmetric": "128×32×32/8/3 64×64×64/4/3",
        "class_sort": "512/8/1 512/4/1 256/4/1",
        "grouped_product": "128×256×64/8/3 128×256×64/8/4 256×128×64/8/3 "
        "128×128×64/8/4 128×128×64/4/4 64×256×64/4/4 128×128×128/8/2",
        "grouped_swiglu": "64×128×64/4/3 64×128×64/4/4 128×64×64/8/4 128×64×64/4/4 256×64×64/8/3 128×128×64/8/4",
        "grouped_swiglu_backward": "128×64×64/8/2 128×64×64/8/4 64×64×64/8/3 128×32×64/8/3",
        # Wider tiles spill where they add to the sum over micro-batches.
        "grouped_outer": "128×128×64/8/4 128×128×32/8/4 128×128×128/8/2 128×64×64/4/4 64×128×64/4/4",
        "attention": "64×128/4/2 64×64/4/3 128×64/8/3 128×128/8/3",
        "attention_backward_keys": "64×64/8/3 64×128/8/3 32×128/8/2",
        "attention_backward_queries": "128×64/8/3 128×64/8/2 64×128/8/2 64×64/4/3",
        "decode": "128×512/4/2 64×256/4/3 64×1024/4/2 32×1024/4/2",
        "cca_mix": "32×128/8/1 64×64/8/1",
        "cca_mix_by_head": "64×128/8/1 64×64/8/1 64×64/4/1 128×64/8/1",
        "cca_mix_backward_norm": "16/4/1 64/8/1",
        "cca_mix_backward_rows": "64×64/8/1 32×64/4/1",
        "cca_mix_backward_matrices": "32×13/8/2 64×26/8/2 64×13/8/3 128×13/8/2",
    },
    "gfx942": {
        "residual_norm": "1024/2/1 4096/4/1 4096/8/1",
        "residual_norm_backward": "2048×304×12×4096/4/1 2048×608×12×4096/8/1 2048×1216×6×4096/4/1",
        "symmetric": "128×64×64/8/2 128×32×32/4/2 64×64×64/4/2",
        "class_sort": "128/4/1 512/4/1 512/8/1",
        "grouped_product": "128×256×32/8/2 256×128×32/8/2 256×256×32/8/2 128×128×32/8/2 128×128×32/4/2 128×128×64/4/2",
        "grouped_swiglu": "128×128×32/8/2 256×64×32/8/2 128×64×64/8/2 128×64×32/4/2 64×128×32/4/2",
        "grouped_swiglu_backward": "128×64×32/8/2 64×64×64/4/2 64×64×32/4/2 128×32×64/4/2",
        "grouped_outer": "128×128×32/8/2 128×256×32/8/2 256×128×32/8/2 128×128×32/4/2 128×128×64/4/2 64×128×32/4/2",
        "attention": "64×32/4/1 128×16/4/1 128×32/8/1 256×32/8/1",
        "attention_backward_keys": "32×64/4/1 16×128/4/1",
        "attention_backward_queries": "64×32/4/1 128×16/4/1 128×32/8/1",
        "decode": "32×1024/4/1 64×512/4/1 64×2048/4/1",
        "cca_mix": "16×64/4/1 32×32/4/1 64×64/8/1",
        "cca_mix_by_head": "64×64/4/1 64×64/8/1 64×128/8/1 128×64/8/1",
        "cca_mix_backward_norm": "16/4/1 64/8/1",
        "cca_mix_backward_rows": "32×128/4/1 32×64/4/1 64×64/4/1 64×128/8/1",
        "cca_mix_backward_matrices": "32×15/8/1 32×15/4/1 64×30/8/1 128×15/8/1",
    },
    "interpret": {
        "residual_norm": "128/1/1",
    },
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
    tuned = {}
    if isinstance(architecture, Tuned) and architecture.dtype == jnp.dtype(dtype).name:
        tuned = dict(architecture.tiles)
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
    kernel = {"grouped_product_transposed": "grouped_product"}.get(kernel, kernel)
    further = ALTERNATIVES.get(architecture if known else other, {}).get(kernel, "") if size == 2 else ""
    return (entry, *map(_read_tile, further.split()))


def _read_tile(text: str) -> Tile:
    sizes, warps, stages = text.split("/")
    return Tile(tuple(map(int, sizes.split("×"))), int(warps), int(stages))
