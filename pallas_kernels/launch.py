"""Launch a kernel: with Pallas' Triton backend, or interpreted.

The Triton backend supports CUDA and ROCm from jax 0.10 to 0.12. Its parameters must be explicit: without them jax 0.10
uses another backend, which does not support ROCm.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.tiles import Architecture, architecture_name

WHOLE = pl.BlockSpec(memory_space=pl.ANY)  # a whole array, for masked loads and stores at any index


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
    architecture: Architecture,
) -> Any:
    """Run one program of `kernel` for each point of `grid`.

    Args:
      kernel: takes a reference to each array, then one to each output.
      arrays: inputs.
      name: name of the kernel in profilers and lowered programs.
      grid: static numbers of programs; the first axis varies fastest.
      out_shape: `jax.ShapeDtypeStruct`s of the outputs.
      warps: number of warps of 32 (NVIDIA) or 64 (AMD) threads in a program.
      stages: stages of Triton's software pipeline for loops with matmuls.
      in_specs: block of each array; None for whole arrays.
      out_specs: block of each output; None for whole arrays.
      aliases: index of an array → index of the output that reuses its memory.
      architecture: 'interpret' emulates the kernel with jax operations, on any device.

    Returns:
      Arrays of `out_shape`.
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
        interpret=architecture_name(architecture) == "interpret",
        name=name,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
    )
    # jax 0.10 does not eliminate an unused kernel call, as in the backward pass of a rematerialized layer, but it does
    # eliminate an unused jitted function.
    return jax.jit(call)(*arrays)
