"""How every kernel is called: through Pallas' Triton backend, its parameters explicit, or interpreted.

The Triton backend serves CUDA and ROCm from jax 0.10 to 0.12. Without its parameters jax 0.10 takes another
backend, which ROCm lacks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

WHOLE = pl.BlockSpec(memory_space=pl.ANY)  # an array that a kernel reads where it likes, by masked loads and stores


def launch(
    kernel: Callable[..., None],
    *arrays: jax.Array,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    warps: int,
    stages: int = 1,
    in_specs: Sequence[pl.BlockSpec] | None = None,
    out_specs: Any = None,
    aliases: Mapping[int, int] | None = None,
    architecture: str,
) -> Any:
    """Run `kernel` once a point of `grid`.

    Args:
      kernel: takes a reference for each array, then one for each output.
      arrays: what it reads.
      name: of the kernel, as profilers and lowered programs show it.
      grid: static numbers of programs, the first varying fastest on the device.
      out_shape: `jax.ShapeDtypeStruct`s of what it writes.
      warps: groups of 32 (NVIDIA) or 64 (AMD) threads of one program.
      stages: of the pipeline that Triton makes of a loop with products.
      in_specs: a block for each array; whole arrays where None.
      out_specs: a block for each output; whole arrays where None.
      aliases: from the index of an array to that of the output that takes its memory.
      architecture: as `tiles.tile` takes it; 'interpret' emulates the kernel by jax operations, on any device.

    Returns:
      Arrays as `out_shape` says.
    """
    specs = [WHOLE] * len(arrays) if in_specs is None else list(in_specs)
    out = jax.tree.map(lambda _: WHOLE, out_shape) if out_specs is None else out_specs
    call = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        in_specs=specs,
        out_specs=out,
        input_output_aliases=dict(aliases or {}),
        interpret=architecture == "interpret",
        name=name,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
    )
    # jax 0.10 keeps a kernel that rematerialisation has no use for, but not a compiled function.
    return jax.jit(call)(*arrays)
