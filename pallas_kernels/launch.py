"""Launch a kernel, and load and store in one: with Pallas' Triton backend, or interpreted.

jax has deprecated the backend, which only a barrier in `cca_mix_step.py` uses besides. It supports CUDA and ROCm from
jax 0.10 to 0.12. Its parameters must be explicit: without them jax 0.10 uses another one, which does not support ROCm.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.tiles import Architecture, Tile, architecture_name

Out = jax.ShapeDtypeStruct  # shape and dtype of an output
store = triton.store  # `store(ref.at[index], values, mask=mask)` stores values where `mask` is true
_WHOLE = pl.BlockSpec(memory_space=pl.ANY)  # a whole array, for masked loads and stores at any index


def load(ref: Any, mask: jax.Array | None = None, other: jax.typing.ArrayLike = 0) -> jax.Array:
    """Load `ref`, as in `load(ref.at[index])`, and `other` where `mask` is false."""
    return triton.load(ref, mask=mask, other=None if mask is None else other)


def launch(
    name: str, kernel: Callable[..., None], arrays: tuple[Any, ...], out: Any, grid: tuple[int, ...], tile: Tile,
    architecture: Architecture, aliases: Mapping[int, int] | None = None,
) -> Any:  # fmt: skip
    """Run one program of `kernel` for each point of `grid`, whose first axis varies fastest.

    The kernel takes `arrays`, pytrees, then `out`, one `Out` or several, with a reference in place of each array. None
    stands for an array that is missing, and stays None. `name` is that of the kernel in profilers and lowered programs.
    The `tile` has warps of 32 (NVIDIA) or 64 (AMD) threads in a program, and stages of Triton's software pipeline.
    `aliases` map the index of an array to that of the output that reuses its memory. The architecture 'interpret'
    emulates the kernel with jax operations, on any device.
    """
    call = pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        in_specs=jax.tree.map(lambda _: _WHOLE, arrays),
        out_specs=jax.tree.map(lambda _: _WHOLE, out),
        input_output_aliases=dict(aliases or {}),
        interpret=architecture_name(architecture) == "interpret",
        name=name,
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    )
    # jax 0.10 does not eliminate an unused kernel call, as in the backward pass of a rematerialized layer, but it does
    # eliminate an unused jitted function.
    return jax.jit(call)(*arrays)
