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

# Kernel → architecture → its tiles, sizes/warps/stages: in bfloat16 the default, then further ones to time, each of
# which compiles there without spills; after the bar the one in float32. gfx950 uses the tiles of gfx942. Interpreted
# kernels have small tiles, 16 where none is listed, so that the arrays of tests have several, some of them partial.
TILES: dict[str, dict[str, str]] = {
    "residual_norm": {  # elements per program; for longer rows, warps grow with the row
        "sm_90": "2048/4/1 4096/8/1 8192/8/1 4096/4/1 4096/16/1 | 2048/4/1",
        "gfx942": "2048/4/1 1024/2/1 4096/4/1 4096/8/1 | 2048/4/1",
        "interpret": "64/1/1 128/1/1 | 64/1/1",
    },
    "residual_norm_backward": {  # elements per step, maximum programs, minimum rows per program, maximum lanes
        "sm_90": "2048×264×12×4096/4/1 2048×132×12×4096/8/1 2048×264×12×4096/8/1 2048×264×12×2048/4/1 "
        "2048×528×6×2048/4/1 2048×264×12×4096/16/1 2048×528×6×4096/8/1 4096×132×12×4096/16/1 | 2048×264×12×2048/4/1",
        "gfx942": "2048×608×12×4096/8/1 2048×608×12×4096/4/1 2048×304×12×4096/8/1 2048×1216×6×4096/8/1 | "
        "2048×608×12×4096/8/1",
        "interpret": "64×3×2×64/1/1 | 64×3×2×64/1/1",
    },
    "symmetric": {  # rows of a square tile, columns of a chunk for the Gram matrix and for the polynomial
        "sm_90": "128×64×32/8/3 128×32×32/8/3 64×64×64/4/3 | 64×32×32/4/2",
        "gfx942": "128×64×64/8/2 128×64×64/4/2 128×32×32/4/2 64×64×64/4/2 | 64×32×32/4/2",
    },
    "class_sort": {  # tokens per program
        "sm_90": "1024/8/1 512/8/1 512/4/1 256/4/1 | 1024/8/1",
        "gfx942": "256/4/1 128/4/1 512/4/1 512/8/1 | 256/4/1",
    },
    "grouped_product": {  # rows, columns, contracted columns per step, as for all grouped kernels
        "sm_90": "128×128×64/8/3 128×256×64/8/3 128×256×64/8/4 256×128×64/8/3 128×128×64/8/4 128×128×64/4/4 "
        "64×256×64/4/4 128×128×128/8/2 | 64×64×32/8/2",
        "gfx942": "128×256×32/8/2 128×128×64/8/2 256×128×32/8/2 256×256×32/8/2 128×128×32/8/2 128×128×32/4/2 "
        "128×128×64/4/2 | 64×64×32/4/2",
    },
    "grouped_swiglu": {  # columns of gate and of up each
        "sm_90": "128×128×64/8/3 64×128×64/4/3 64×128×64/4/4 128×64×64/8/4 128×64×64/4/4 256×64×64/8/3 "
        "128×128×64/8/4 | 64×32×32/8/2",
        "gfx942": "128×128×64/8/2 128×128×32/8/2 256×64×32/8/2 128×64×64/8/2 128×64×32/4/2 64×128×32/4/2 | "
        "64×32×32/4/2",
    },
    "grouped_swiglu_backward": {  # columns of one half of the tile
        "sm_90": "128×64×64/8/3 128×64×64/8/2 128×64×64/8/4 64×64×64/8/3 128×32×64/8/3 | 64×32×32/8/2",
        "gfx942": "128×64×64/8/2 128×64×32/8/2 64×64×64/4/2 64×64×32/4/2 128×32×64/4/2 | 64×32×32/4/2",
    },
    "grouped_step": {  # for few rows, not timed; as many columns of gate and of up each
        "sm_90": "16×64×128/4/3 | 16×32×64/4/2",
        "gfx942": "16×64×128/4/2 | 16×32×64/4/2",
    },
    "grouped_outer": {  # wider tiles spill on sm_90 where they add to the sum over micro-batches
        "sm_90": "128×128×64/8/3 128×128×64/8/4 128×128×32/8/4 128×128×128/8/2 128×64×64/4/4 64×128×64/4/4 | "
        "64×64×32/8/2",
        "gfx942": "128×256×32/8/2 128×128×64/8/2 128×128×32/8/2 256×128×32/8/2 128×128×32/4/2 128×128×64/4/2 "
        "64×128×32/4/2 | 64×64×32/4/2",
    },
    # sm_90 multiplies fastest if a tile of attention has 128 columns or more, for which other NVIDIA GPUs may have too
    # little shared memory.
    "attention": {  # rows (queries times the heads that share a key head), keys
        "sm_90": "128×128/8/2 64×128/4/2 64×64/4/3 128×64/8/3 128×128/8/3 | 32×32/8/1",
        "cuda": "128×64/8/2 | 32×32/8/1",
        "gfx942": "128×32/4/1 64×32/4/1 128×16/4/1 128×32/8/1 256×32/8/1 | 64×32/8/1",
    },
    "attention_mosaic": {  # queries, as many as the rows of a matrix instruction, and keys
        "sm_90": "64×128/12/2 64×64/12/4 64×64/12/5 64×64/12/3 | 64×128/12/2",
        "interpret": "64×64/12/2 | 64×64/12/2",
    },
    "attention_mosaic_keys": {  # queries of a visited tile, keys of a block
        "sm_90": "64×128/12/4 64×128/12/2 | 64×128/12/2",
        "interpret": "64×64/12/2 | 64×64/12/2",
    },
    "attention_mosaic_queries": {  # queries of a block, keys of a visited tile
        "sm_90": "64×128/12/2 64×64/12/4 64×64/12/3 64×64/12/2 | 64×128/12/2",
        "interpret": "64×64/12/2 | 64×64/12/2",
    },
    "attention_backward_keys": {
        "sm_90": "64×128/8/2 64×64/8/3 64×128/8/3 32×128/8/2 | 32×32/8/1",
        "cuda": "64×64/8/2 | 32×32/8/1",
        "gfx942": "16×128/8/1 32×128/4/1 32×64/4/1 16×128/4/1 | 16×64/8/1",
    },
    "attention_backward_queries": {
        "sm_90": "128×128/8/2 128×64/8/3 128×64/8/2 64×128/8/2 64×64/4/3 | 16×16/8/1",
        "cuda": "128×64/8/2 | 16×16/8/1",
        "gfx942": "128×32/4/1 64×32/4/1 128×16/4/1 128×32/8/1 | 64×16/4/1",
    },
    "decode": {  # keys, programs
        "sm_90": "64×512/4/2 128×512/4/2 64×256/4/3 64×1024/4/2 32×1024/4/2 | 32×512/8/2",
        "gfx942": "64×1024/4/1 32×1024/4/1 64×512/4/1 64×2048/4/1 | 32×1024/4/1",
    },
    # tokens of a row per document, for the vendors' libraries
    "packed_documents": dict.fromkeys(("sm_90", "gfx942"), "512/1/1 1024/1/1 256/1/1 128/1/1 | 512/1/1"),
    "cca_mix": {  # tokens, channels per step of a matmul
        "sm_90": "32×64/8/1 32×128/8/1 64×64/8/1 | 16×32/8/1",
        "gfx942": "64×64/8/1 16×64/4/1 32×64/4/1 | 16×32/4/1",
    },
    "cca_mix_backward_norm": {  # tokens
        "sm_90": "32/4/1 16/4/1 64/8/1 | 16/4/1",
        "gfx942": "32/4/1 16/4/1 64/8/1 | 16/4/1",
    },
    "cca_mix_backward_rows": {  # tokens, channels per step of a matmul
        "sm_90": "64×128/8/1 64×64/8/1 32×64/4/1 | 16×64/8/1",
        "gfx942": "64×128/4/1 32×128/4/1 32×64/4/1 64×64/4/1 64×128/8/1 | 16×32/4/1",
    },
    "cca_mix_backward_matrices": {  # tokens per step of a matmul, parts of the tokens
        "sm_90": "64×13/8/2 32×13/8/2 64×26/8/2 64×13/8/3 128×13/8/2 | 16×13/8/1",
        "gfx942": "64×15/8/1 32×15/8/1 32×15/4/1 64×30/8/1 128×15/8/1 | 16×15/8/1",
        "interpret": "16×3/1/1 | 16×3/1/1",
    },
    "cca_mix_step": {  # rows of a batch, channels per step of a matmul
        "sm_90": "16×64/4/2 16×128/4/1 16×32/4/3 16×64/8/2 | 16×32/4/1",
        "gfx942": "16×64/4/1 16×128/4/1 16×32/4/1 16×64/8/1 | 16×32/4/1",
    },
    "router_step": {  # tokens, outputs of the first hidden layer per step of a matmul
        "sm_90": "16×32/4/1 16×64/8/1 16×32/8/1 16×16/4/1 | 16×16/8/1",
        "gfx942": "16×32/4/1 16×32/8/1 16×16/4/1 | 16×16/8/1",
    },
    "cca_mix_by_head": {
        "sm_90": "32×64/8/1 64×128/8/1 64×64/8/1 64×64/4/1 128×64/8/1 | 16×32/8/1",
        "gfx942": "128×64/8/1 64×128/8/1 64×64/8/1 64×64/4/1 32×64/4/1 | 16×32/4/1",
    },
}
# The down and the transposed gate and up matrices have different shapes, and so different best tiles.
TILES["grouped_product_transposed"] = TILES["grouped_product"]


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
    by_architecture, of_platform = TILES[kernel], platform(architecture)
    known = architecture in by_architecture
    other = of_platform if of_platform in by_architecture else DEFAULT.get(of_platform, "sm_90")
    bf16, fp32 = (texts.split() for texts in by_architecture[architecture if known else other].split("|"))
    entry, *further = map(_read_tile, bf16 if jnp.dtype(dtype).itemsize == 2 else fp32)
    if of_platform == "interpret" and not known:
        return (Tile((16,) * len(entry.sizes), 1),)
    if of_platform == "cuda" and not known:
        return (entry._replace(stages=min(entry.stages, 2)),)
    return (entry, *further)


def _read_tile(text: str) -> Tile:
    sizes, warps, stages = text.split("/")
    return Tile(tuple(map(int, sizes.split("×"))), int(warps), int(stages))
