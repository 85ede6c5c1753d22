"""Helpers of the Mosaic kernels of attention: warpgroups, shared memory, the order of tiles, masks.

A block has three warpgroups. One copies tiles to shared memory, the others compute.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from pallas_kernels.tiles import Architecture, architecture_name

COMPUTING = 2  # warpgroups of a block that compute
# Registers of a thread. At the start each has 168, and the warpgroup that copies gives 144 of them to the others.
_COPY_REGISTERS, _COMPUTE_REGISTERS = 24, 240
ACCUMULATOR: Any = gpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_INTERPRETER: Any = getattr(gpu, "InterpretGPUParams", None)  # None before jax 0.11
WHOLE = gpu.Layout.WGMMA  # the registers that hold a tile of scores or of the output
BY_AXIS = WHOLE.reduce(1), WHOLE.reduce(0)  # and those of a vector with an element for each row or column


def matrices(*sizes: int) -> Any:
    """Lay out matrices in shared memory as the tensor cores read them, in tiles with rows of 128 bytes."""
    return gpu.SMEM(sizes, jnp.bfloat16, transforms=(gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128)))


def barriers(number: int, arrivals: int) -> Any:
    """Return barriers that open when all have arrived, and close again."""
    return gpu.Barrier(num_barriers=number, num_arrivals=arrivals)


def interpreted(architecture: Architecture) -> bool:
    """Return whether jax's interpreter runs the kernels; it has no products of registers."""
    return architecture_name(architecture) == "interpret"


def launch(
    name: str, kernel: Callable[..., None], arrays: tuple[Any, ...], out: Any, shared: Any, grid: tuple[int, ...],
    architecture: Architecture,
) -> Any:  # fmt: skip
    """Run a block of `kernel` for each tile, row of the batch and head of a grid; heads vary fastest.

    The kernel takes `arrays`, `out` and `shared` memory, as references.
    """
    call = gpu.kernel(
        kernel,
        out_type=out,
        scratch_types=[shared],
        grid=grid,
        grid_names=("tile", "row", "heads"),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        interpret=_INTERPRETER(detect_races=True) if interpreted(architecture) else None,
    )
    return jax.jit(call)(*arrays)


def specialize(copy: Callable[[], None], compute: Callable[[Any], None]) -> None:
    """Run `copy` in one warpgroup, `compute(warpgroup)` in the others."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == COMPUTING)
    def _() -> None:
        gpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        copy()

    @pl.when(warpgroup < COMPUTING)
    def _() -> None:
        gpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        compute(warpgroup)


class Steps(NamedTuple):
    """The tiles that a block visits, in this order: those without a mask, those before and those after them."""

    low: Any  # of `attention_tiles.ranges`, like the next three
    start: Any
    stop: Any
    high: Any

    @property
    def unmasked(self) -> Any:
        """Number of tiles without a mask."""
        return self.stop - self.start

    @property
    def visits(self) -> Any:
        """Number of all tiles."""
        return self.high - self.low

    def tile(self, step: Any) -> Any:
        """Return the tile of a step."""
        masked = step - self.unmasked
        return jnp.where(
            masked < 0, self.start + step, self.low + jnp.where(masked < self.start - self.low, masked, step)
        )


def store(ref: Any, at: tuple[Any, ...], buffer: Any, values: jax.Array) -> None:
    """Store fp32 values [tokens, c] in `ref.at[at]`: in fp32, or in bf16 by way of `buffer` in shared memory."""
    if ref.dtype == jnp.float32:
        ref[at] = values
        return
    buffer[...] = values.astype(ref.dtype)
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(buffer, ref.at[at])
    gpu.wait_smem_to_gmem(0)


def load_vector(ref: Any, axis: int) -> jax.Array:
    """Load a vector with an element for each row (axis 0) or column (axis 1) of a tile."""
    return gpu.layout_cast(ref[...], BY_AXIS[axis])


def across(x: jax.Array, shape: tuple[int, ...], axis: int = 0) -> jax.Array:
    """Repeat the elements for each row (axis 0) or column (axis 1) across a tile."""
    return lax.broadcast_in_dim(x, shape, [axis])


def seen(
    shape: tuple[int, ...], query_axis: int, position: Any, window: int | None,
    query_segments: jax.Array | None, key_segments: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Return the mask of what queries see in a tile, bool.

    `position` is that of the tile's first query among the keys, from its first key on. Segments are None without
    documents.
    """
    layout = BY_AXIS[query_axis]
    query = position + gpu.broadcasted_iota(jnp.int32, shape[query_axis : query_axis + 1], 0, layout=layout)
    if query_segments is not None:
        query = jnp.where(query_segments != 0, query, -1)
    key = gpu.broadcasted_iota(jnp.int32, shape, 1 - query_axis, layout=WHOLE)
    query = across(query, shape, query_axis)
    # With a window one comparison, too, in which negative differences are large.
    mask = key <= query if window is None else (query - key).astype(jnp.uint32) < window
    if query_segments is not None and key_segments is not None:
        mask &= across(key_segments, shape, 1 - query_axis) == across(query_segments, shape, query_axis)
    return mask


class _Emulated:
    """An accumulator of the interpreter, which has no products of registers."""

    def __init__(self, value: jax.Array) -> None:
        self.value = value


def accumulate(
    products: Callable[..., None], starts: tuple[jax.Array, ...], interpreted: bool
) -> tuple[jax.Array, ...]:
    """Return the accumulators of `products`, which begin at `starts`."""
    if interpreted:
        emulated = [_Emulated(start) for start in starts]
        products(*emulated)
        return tuple(accumulator.value for accumulator in emulated)
    return pl.run_state(lambda refs: products(*refs))(tuple(ACCUMULATOR.init(start) for start in starts))


def add_product(accumulator: Any, a: Any, b: Any) -> None:
    """Begin to add a @ b, with `a` in registers or in shared memory, and `b` in shared memory."""
    if isinstance(accumulator, _Emulated):
        accumulator.value += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
        gpu.commit_smem()  # before a copy overwrites what was read
    else:
        gpu.wgmma(accumulator, a, b)


def load(accumulator: Any, pending: int) -> jax.Array:
    """Wait until only the last `pending` products may be unfinished, and return a sum."""
    if isinstance(accumulator, _Emulated):
        return accumulator.value
    return gpu.wgmma_accumulator_load(accumulator, wait_n=pending)
