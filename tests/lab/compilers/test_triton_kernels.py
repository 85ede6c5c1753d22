"""Ports of three kernels to Triton's own language: emulated, and compiled for GPUs beside the Pallas kernels.

They need Python 3.12 and Triton, which is no part of any extra. `python -m tests.lab.compilers.test_triton_kernels`
prints the table of docs/kernels.md.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention_tiles import AttentionInputs, ranges
from pallas_kernels.grouped_matmul import CHIPLETS, TOGETHER, row_tiles
from pallas_kernels.residual_norm import backward_cut, forward_cut
from pallas_kernels.tiles import tile
from tests.helpers import seeds
from tests.kernel_helpers import lower, shape
from tests.lab.compilers.test_compiled import need_stand_ins, run
from tests.train_helpers import ROOT
from zaya_jax.lab.kernel_cases import EIGHT_B, cases, passes
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.kernels import read_program
from zaya_jax.lab.predict.compilers.resources import _amd, _nvidia
from zaya_jax.lab.predict.compilers.toolchain import compile_program, find_toolchain
from zaya_jax.ops.attention import partial_attention
from zaya_jax.ops.grouped_matmul import grouped_matmul
from zaya_jax.ops.registry import select_kernels
from zaya_jax.ops.residual_norm import MergeVectors, residual_norm

FUSION_WARNING = "ignore:TRITON_DEFAULT_FP_FUSION is unset"  # that of Triton 3.10
pytestmark = [pytest.mark.compilers, pytest.mark.soak, pytest.mark.filterwarnings(FUSION_WARNING)]
pytest.importorskip("triton", reason="pip install jax-triton, with Python 3.12")
EPS = 1e-5
MODULE = "tests.lab.compilers.test_triton_kernels"  # also where it is run as a program
TYPES = {"bfloat16": "bf16", "float32": "fp32", "int32": "i32"}  # Triton's names
WITHIN = {"float32": 1e-5, "bfloat16": 2**-6}  # the largest error over the largest value, as of the Pallas kernels


def emulate(kernel, grid, inputs, outputs, **values):
    """Run a kernel in Triton's interpreter; `outputs` are like `jax.ShapeDtypeStruct`. Returns them in float64."""
    from triton.runtime.interpreter import GridExecutor

    arrays = [np.array(x) for x in inputs] + [np.zeros(x.shape, x.dtype) for x in outputs]
    executor = GridExecutor(kernel.fn, kernel.arg_names, grid)
    # The arrays are in this process' memory; Triton would copy them as torch's.
    executor._init_args_hst, executor._restore_args_dev = lambda args, names: (args, names), lambda *_: None
    executor(*(types.SimpleNamespace(data_ptr=lambda x=x: x.ctypes.data, dtype=TYPES[x.dtype.name]) for x in arrays),
             **values)  # fmt: skip
    return [x.astype(np.float64) for x in arrays[len(inputs) :]]


def compare(ours, theirs, within):
    """Each result is near to that in double precision, relative to its largest value."""
    for a, b in zip(ours, jax.tree.leaves(theirs), strict=True):
        assert np.abs(a - np.asarray(b)).max() <= within * max(np.abs(np.asarray(b)).max(), 1e-30)


def in_float64(function, *arrays):
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays]
        return jax.tree.map(np.asarray, jax.jit(function)(*map(jnp.asarray, wide)))


EXAMPLES = settings(max_examples=8, deadline=None)


@EXAMPLES
@given(
    seed=seeds(), tokens=st.integers(1, 9), width=st.sampled_from((16, 20, 40)), dtype=st.sampled_from(sorted(WITHIN))
)
def check_norm(seed, tokens, width, dtype):
    from tests.lab.compilers import triton_kernels

    rng = np.random.default_rng(seed)
    output, stream, d_new, d_normed = (rng.normal(size=(tokens, width)).astype("f") for _ in range(4))
    vectors = rng.normal(1, 1, (5, width)).astype("f")
    output, d_normed = (np.asarray(jnp.asarray(x, dtype)) for x in (output, d_normed))
    like, wide = jax.ShapeDtypeStruct((tokens, width), dtype), jax.ShapeDtypeStruct((tokens, width), "float32")
    sizes = {"width": width, "rows": 2, "lanes": int(2 ** np.ceil(np.log2(width))), "eps": EPS}
    arrays = (output, stream, *vectors)
    grid, kernel = (-(-tokens // 2),), triton_kernels.residual_norm_forward
    ours = emulate(kernel, grid, arrays, (wide, like), tokens=tokens, **sizes)
    grid, kernel = (-(-tokens // 4),), triton_kernels.residual_norm_backward
    outputs = like, wide, jax.ShapeDtypeStruct((*grid, 4, width), "float32")
    inputs = *arrays, d_new, d_normed
    *gradients, partial = emulate(kernel, grid, inputs, outputs, tokens=tokens, steps=2, **sizes)
    d_weight, d_output_scale, d_stream_scale, d_sum = partial.sum(0)

    def both(output, stream, d_new, d_normed, *vectors):
        def merged(output, stream, *vectors):
            return residual_norm(output, stream, MergeVectors(*vectors[:4]), vectors[4], EPS, output.dtype)

        out, back = jax.vjp(merged, output, stream, *vectors)
        return out, back((d_new, d_normed))

    theirs = in_float64(both, output, stream, d_new, d_normed, *vectors)
    sums = [d_output_scale, d_sum * vectors[0], d_stream_scale, d_sum * vectors[2], d_weight]
    compare([*ours, *gradients, *sums], theirs, WITHIN[dtype])


@EXAMPLES
@given(seed=seeds(), cut=st.lists(st.integers(0, 45), min_size=4, max_size=4), p=st.sampled_from((16, 20)),
       q=st.sampled_from((20, 32)))  # fmt: skip
def check_grouped_product(seed, cut, p, q):  # in fp32: Triton's interpreter multiplies bf16 tiles as integers
    from tests.lab.compilers import triton_kernels

    rng, sizes = np.random.default_rng(seed), np.diff([0, *sorted(cut)]).astype(np.int32)
    x, w = (rng.normal(size=size).astype("f") for size in ((45, p), (4, p, q)))
    tiles = np.asarray(row_tiles(jnp.asarray(sizes), 45, 16))
    values = {"tile_rows": tiles.shape[1], "groups": 4, "p": p, "q": q, "m": 16, "n": 16, "depth": 16}
    values |= {"together": TOGETHER, "chiplets": CHIPLETS}
    grid, out = (tiles.shape[1] * -(-q // 16),), [jax.ShapeDtypeStruct((45, q), "float32")]
    ours = emulate(triton_kernels.grouped_product, grid, (tiles, x, w), out, **values)
    compare(ours, in_float64(grouped_matmul, x, w, sizes), WITHIN["float32"])


@EXAMPLES
@given(seed=seeds(), s=st.integers(1, 40), before=st.integers(0, 20), window=st.sampled_from((None, 1, 7)),
       lengths=st.lists(st.integers(1, 30), min_size=6, max_size=6))  # fmt: skip
def check_attention(seed, s, before, window, lengths):
    from tests.lab.compilers import triton_kernels

    rng, t = np.random.default_rng(seed), s + before
    line = np.resize(np.repeat([1, 2, 0, 3, 4, 5], lengths), (1, t)).astype(np.int32)
    q, k, v = (rng.normal(size=(1, *size, 16)).astype("f") for size in ((s, 6), (t, 2), (t, 2)))
    x = AttentionInputs(q, k, v, line[:, before:], line, np.int32(before), window)
    bounds = np.asarray(ranges(x, (16, 16)))
    out = jax.ShapeDtypeStruct(q.shape, "float32"), jax.ShapeDtypeStruct(q.shape[:3], "float32")
    arrays = np.array([before], np.int32), bounds, q, k, v, line[:, before:].copy(), line
    ours = emulate(triton_kernels.attention, (2, bounds.shape[1]), arrays, out, s=s, t=t, heads=6, kv_heads=2, c=16,
                   rows=16, keys=16, window=window)  # fmt: skip

    def partial(q, k, v, queries, keys):
        return tuple(partial_attention(AttentionInputs(q, k, v, queries, keys, before, window)))

    compare(ours, in_float64(partial, q, k, v, line[:, before:], line), WITHIN["float32"])


@pytest.mark.parametrize("name", ["norm", "grouped_product", "attention"])
def test_emulated_ports_compute_what_the_references_do(name):
    code = f"from {MODULE} import *; check_{name}()"  # Triton's own functions are compiled or emulated when imported
    env = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# Ports at the 8B's sizes in bf16: dtypes of the pointers in order, integers, and constants but for the tile.
_VECTORS, _NORM = ["float32"] * 5, {"tokens": EIGHT_B.tokens, "width": EIGHT_B.width, "eps": EPS}
_GROUPED = {"tile_rows": 144, "groups": EIGHT_B.experts, "p": EIGHT_B.width,
            "q": 2 * EIGHT_B.expert_width, "together": TOGETHER}  # fmt: skip
_ATTENTION = {"s": EIGHT_B.sequence, "t": EIGHT_B.sequence, "heads": EIGHT_B.query_heads, "kv_heads": EIGHT_B.kv_heads,
              "c": EIGHT_B.channels, "window": None}  # fmt: skip
PORTS = {
    "residual_norm_forward": (["bfloat16", "float32", *_VECTORS, "float32", "bfloat16"], _NORM),
    "residual_norm_backward": (["bfloat16", "float32", *_VECTORS, "float32", *["bfloat16"] * 2, *["float32"] * 2],
                               {**_NORM, "steps": 12}),
    "grouped_product": (["int32", *["bfloat16"] * 3], _GROUPED),
    "attention": (["int32", "int32", *["bfloat16"] * 3, "int32", "int32", "bfloat16", "float32"], _ATTENTION),
}  # fmt: skip
CASES = ["residual_norm backward", "grouped_matmul", "attention"]  # of the Pallas kernels of the same names


def tiles_of_port(name, architecture):
    """The constants and the tile of a port: those of the Pallas kernel."""
    if name.startswith("residual_norm"):
        cut = {"residual_norm_forward": forward_cut, "residual_norm_backward": backward_cut}[name]
        found = cut(EIGHT_B.tokens, EIGHT_B.width, "bfloat16", architecture)
        return {"rows": found.rows, "lanes": found.lanes}, found.tile
    found = tile(name, architecture, "bfloat16")
    names = ("m", "n", "depth") if name == "grouped_product" else ("rows", "keys")
    own = {"chiplets": CHIPLETS if architecture.startswith("gfx") else 1} if name == "grouped_product" else {}
    return {**dict(zip(names, found.sizes, strict=True)), **own}, found


def compile_port(name, gpu, folder):
    """Compile a port with Triton; the kernel's resources, and the bytes of its code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.lab.compilers import triton_kernels

    architecture, kernel, (dtypes, values) = GPUS[gpu].architecture, getattr(triton_kernels, name), PORTS[name]
    constants, cut = tiles_of_port(name, architecture)
    values, names = values | constants, kernel.arg_names
    types = {key: f"*{TYPES[dtype]}" for key, dtype in zip((n for n in names if n not in values), dtypes, strict=True)}
    integers = dict.fromkeys({"tokens", "steps", "tile_rows", "s", "t"} & set(names), "i32")
    signature = {key: types.get(key) or integers.get(key) or "constexpr" for key in names}
    fixed = {key: value for key, value in values.items() if signature[key] == "constexpr"}
    aligned = {(index,): [["tt.divisibility", 16]] for index, key in enumerate(names) if key in types}
    amd = GPUS[gpu].platform == "rocm"
    target = GPUTarget("hip", architecture, 64) if amd else GPUTarget("cuda", 90, 32)
    options = {"num_warps": cut.warps, "num_stages": cut.stages} | ({} if amd else {"ptx_version": 88})  # of CUDA 12.9
    made = triton.compile(ASTSource(kernel, signature, fixed, aligned), target=target, options=options)
    folder.mkdir()
    if amd:
        (folder / "port.hsaco").write_bytes(made.asm["hsaco"])
        (found,) = _amd(folder)
    else:
        (folder / "0.jit_port.ptx").write_text(made.asm["ptx"])
        (found,) = _nvidia(folder, "port", find_toolchain(gpu)[1], architecture)
    threads = cut.warps * (64 if amd else 32)
    return found._replace(shared=made.metadata.shared, threads=threads), code_bytes(folder, gpu)[found.name]


def code_bytes(folder, gpu):
    """The bytes of each function in the ELF files of a folder, and of its PTX."""
    for path in (path for path in folder.rglob("*.ptx") if path.stat().st_size):
        binary, option = path.with_suffix(".cubin"), f"-arch={GPUS[gpu].architecture}a"
        subprocess.run([find_toolchain(gpu)[1], option, "-o", binary, path], check=True)
    return {
        name: size
        for kind in ("hsaco", "cubin")
        for path in folder.rglob(f"*.{kind}")
        for name, size in functions(path)
    }


def functions(binary):
    symbols = subprocess.run(["readelf", "-sW", str(binary)], capture_output=True, text=True, check=True).stdout
    return [(name, int(size)) for size, name in re.findall(r": \w+ +(\d+) FUNC .* (\w+)$", symbols, re.MULTILINE)]


def compile_pallas(gpu, folder):
    selection, every = select_kernels(GPUS[gpu].target, EIGHT_B.model, "bfloat16"), cases(EIGHT_B, "bfloat16")
    for name in CASES:
        compile_program(name.replace(" ", "_"), *passes(every[name], selection), gpu, Path(folder))


@functools.cache
def compiled(gpu):
    """Of each kernel: resources and bytes of code of the Pallas kernel, and of the port."""
    need_stand_ins(gpu)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        done = run(gpu, folder, f"from {MODULE} import *\ncompile_pallas({gpu!r}, {temporary!r})")
        assert done.returncode == 0, done.stderr
        names = [name.replace(" ", "_") for name in CASES]
        pallas = {kernel.name: kernel for name in names for kernel in read_program(name, gpu, folder).kernels}
        sizes = code_bytes(folder, gpu)
        return {name: ((pallas[name], sizes[name]), compile_port(name, gpu, folder / f"port_{name}")) for name in PORTS}


@pytest.mark.parametrize("gpu", ["mi300x", "mi355x", "h200"])
def test_ports_compile_as_the_pallas_kernels_do(gpu):
    for name, ((pallas, _), (port, size)) in compiled(gpu).items():
        spills = (gpu, name) == ("h200", "attention")
        assert spills or port.spills == port.scratch == 0, port
        assert port.shared <= GPUS[gpu].shared_per_block
        assert port.threads == pallas.threads
        assert 0 < size < 2**16, name


@pytest.mark.xfail(
    raises=TypeError, strict=True, reason="jax-triton 0.4.1 has a rule for dead code as jax 0.11 calls it"
)
def test_jax_triton_lowers_a_port_without_a_gpu():
    jax_triton = pytest.importorskip("jax_triton")
    from tests.lab.compilers import triton_kernels

    def forward(*arrays):
        out = shape(64, 128, dtype="float32"), shape(64, 128, dtype="bfloat16")
        sizes = {"tokens": 64, "width": 128, "rows": 1, "lanes": 128, "eps": EPS}
        return jax_triton.triton_call(
            *arrays, kernel=triton_kernels.residual_norm_forward, out_type=out, grid=64, **sizes
        )

    arrays = shape(64, 128, dtype="bfloat16"), shape(64, 128, dtype="float32"), *[shape(128, dtype="float32")] * 5
    assert "triton_kernel_call" in lower(forward, *arrays, platform="cuda").as_text()


def main():
    print("| GPU | kernel | registers | spills and scratch | KiB | bytes of code |\n|---|---|---|---|---|---|")
    for gpu in ("mi300x", "mi355x", "h200"):
        for name, found in compiled(gpu).items():
            cells = [
                (str(x.registers), str(x.spills + x.scratch), f"{x.shared / 1024:.3g}", f"{size:,}")
                for x, size in found
            ]
            print("|", " | ".join((gpu, f"`{name}`", *(f"{a} / {b}" for a, b in zip(*cells, strict=True)))), "|")


if __name__ == "__main__":
    main()
