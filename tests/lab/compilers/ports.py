"""The ports of `triton_kernels` in place of the Pallas kernels of the same names, in any program that launches those.

`jax.ffi` passes XLA the intermediate code that Triton made of a port, in the custom call that Pallas' Triton backend
makes, too. XLA compiles it, for GPUs that are not here as well; neither that backend nor jax-triton takes part. As a
program this is `zaya_jax.lab.compile_worker` with the ports.
"""

import sys
import types

import jax
import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas_kernels import attention, grouped_matmul, residual_norm
from pallas_kernels.tiles import architecture_name, platform
from tests.lab.compilers import triton_kernels

SUFFIX = "_port"  # of the names of ports in compiled programs
TYPES = {"bfloat16": "bf16", "float32": "fp32", "int32": "i32"}  # Triton's names
pallas_launch = residual_norm.launch
used = {}  # what Triton itself compiles a port to, by name; of several variants the last


def _norm_forward(kernel, arrays, _out, _architecture):
    (cut, eps), (x,) = kernel.args, arrays
    tokens, width = x.stream_td.shape
    values = {"rows": cut.rows, "lanes": cut.lanes, "eps": eps, "tokens": tokens, "width": width}
    return ([x.output_td, x.stream_td, *x.vectors_d, x.weight_d], values) if x.vectors_d else None


def _norm_backward(kernel, arrays, out, architecture):
    cut, (x, *gradients) = kernel.args[0], arrays
    x = x._replace(vectors_d=x.vectors_d or [None] * 4)
    pointers, values = _norm_forward(kernel, [x], out, architecture)
    ported = cut.parts == 1 and x.layer is None  # those that read outputs of all layers are Pallas'
    return ([*pointers, *gradients], {**values, "steps": cut.steps}) if ported else None


def _grouped_product(kernel, arrays, out, architecture):
    ((m, n, depth), _), transpose = kernel.args
    (tiles, x, w), moved, kept = arrays
    if kept is not None:  # those that write to the outputs of all layers are Pallas'
        return None
    sizes = {"tile_rows": tiles.shape[1], "rows": len(x), "groups": w.shape[1], "p": x.shape[1], "q": out.shape[1]}
    chiplets = 1 if platform(architecture) == "cuda" else grouped_matmul.CHIPLETS
    order = {"transpose": transpose, "together": grouped_matmul.TOGETHER, "chiplets": chiplets}
    return [tiles, x, w, *moved], {**sizes, **order, "m": m, "n": n, "depth": depth}


def _attention(kernel, arrays, _out, _architecture):
    (offset, bounds, x), static = arrays, kernel.keywords["static"]
    (_, s, heads, c), (_, t, kv_heads, _) = x.q.shape, x.k.shape
    sizes = {"s": s, "t": t, "heads": heads, "kv_heads": kv_heads, "c": c}
    values = {**sizes, "rows": static.rows, "keys": static.keys, "window": static.window}
    pointers = [offset, bounds, x.q, x.k, x.v, x.query_segments, x.key_segments]
    return None if x.query_segments is None else (pointers, values)


# Name of a Pallas kernel → the port, and what makes its pointers and constants of a launch; None where it has no port.
PORTS = {
    "residual_norm_forward": (triton_kernels.residual_norm_forward, _norm_forward),
    "residual_norm_backward": (triton_kernels.residual_norm_backward, _norm_backward),
    "grouped_product": (triton_kernels.grouped_product, _grouped_product),
    "grouped_product_transposed": (triton_kernels.grouped_product, _grouped_product),
    "attention": (triton_kernels.attention, _attention),
}


def compile_port(kernel, pointers, values, tile, architecture):
    """Compile a port with Triton; `pointers` have a dtype, or are None, and all other arguments are constants."""
    names = [name for name in kernel.arg_names if name not in values]
    types = {name: f"*{TYPES[x.dtype.name]}" for name, x in zip(names, pointers, strict=True) if x is not None}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {name: values.get(name) for name in kernel.arg_names if name not in types}
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if name in types}
    amd = platform(architecture) == "rocm"
    target = GPUTarget("hip", architecture_name(architecture), 64) if amd else GPUTarget("cuda", 90, 32)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, **({} if amd else {"ptx_version": 88})}  # CUDA 12.9
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)


def compiled(name, port, pointers, results, values, grid, tile, architecture):
    """Make the call of a port."""
    used[name] = compile_port(port, [*pointers, *results], values, tile, architecture)
    code = used[name].asm["ttir"].replace(f"@{port.__name__}(", f"@{name}{SUFFIX}(")
    numbers = {"num_warps": tile.warps, "num_stages": tile.stages, "grid_x": grid[0], "grid_y": grid[1], "grid_z": 1}
    config = {"name": f"{name}{SUFFIX}", "ir": code, "debug": False, **{k: np.int32(v) for k, v in numbers.items()}}
    call = jax.ffi.ffi_call("__gpu$xla.gpu.triton", [x for x in results if x is not None])
    return lambda *arrays: call(*arrays, **config)


def emulated(name, port, pointers, results, values, grid, _tile, _architecture):
    """Run a port in Triton's interpreter, with fp32 for bf16, of which it multiplies tiles as integers."""
    from triton.runtime.interpreter import GridExecutor

    def wide(x):
        return np.array(x, np.float32 if x.dtype.name == "bfloat16" else x.dtype)

    def pointer(x):
        return x if x is None else types.SimpleNamespace(data_ptr=lambda: x.ctypes.data, dtype=TYPES[x.dtype.name])

    def run(*arrays):
        rest = iter(arrays)
        memory = [x if x is None else wide(next(rest)) for x in pointers]
        memory += [x if x is None else wide(np.empty(x.shape, x.dtype)) for x in results]
        executor = GridExecutor(port.fn, port.arg_names, grid)
        # The arrays are in this process' memory; Triton would copy them as torch's.
        executor._init_args_hst, executor._restore_args_dev = lambda args, names: (args, names), lambda *_: None
        executor(*map(pointer, memory), **values)
        written = zip(memory[len(pointers) :], results, strict=True)
        return [ours.astype(like.dtype) for ours, like in written if like is not None]

    used[name] = port
    return lambda *arrays: jax.pure_callback(run, [x for x in results if x is not None], *arrays)


def install(how=compiled):
    """Replace, in this process, all Pallas kernels that have a port, which is `compiled` or `emulated`."""
    pallas_launch = residual_norm.launch

    def launch(name, kernel, arrays, out, grid, tile, architecture, aliases=None):
        port, arguments = PORTS.get(name, (None, lambda *_: None))
        if (given := arguments(kernel, arrays, out, architecture)) is None:
            return pallas_launch(name, kernel, arrays, out, grid, tile, architecture, aliases)
        pointers, values = given
        results = jax.tree.leaves(out, is_leaf=lambda x: x is None)
        grid = grid[1:] if name == "residual_norm_backward" else grid  # without its axis of one part
        call = how(name, port, pointers, results, values, (*grid, 1)[:2], tile, architecture)
        ours = iter(jax.jit(call)(*(x for x in pointers if x is not None)))
        return jax.tree.map(lambda _: next(ours), out)

    for module in (attention, grouped_matmul, residual_norm):
        module.launch = launch


if __name__ == "__main__":
    from zaya_jax.lab import compile_worker

    install()
    compile_worker.main(*sys.argv[1:])
