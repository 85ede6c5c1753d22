"""Ports of four kernels to Triton's own language: emulated, and compiled for GPUs beside the Pallas kernels.

They need Python 3.12 and Triton, which the extra `ports` installs. `python -m tests.lab.compilers.test_triton_kernels`
prints the table of docs/kernels.md.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.lab.compilers.test_compiled import need_stand_ins, run
from tests.train_helpers import ROOT
from zaya_jax.lab.kernel_cases import EIGHT_B, cases, passes
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.kernels import read_program
from zaya_jax.lab.predict.compilers.resources import _amd, _nvidia
from zaya_jax.lab.predict.compilers.toolchain import compile_program, find_toolchain
from zaya_jax.ops.registry import select_kernels

FUSION_WARNING = "ignore:TRITON_DEFAULT_FP_FUSION is unset"  # that of Triton 3.10
pytestmark = [pytest.mark.compilers, pytest.mark.filterwarnings(FUSION_WARNING)]
pytest.importorskip("triton", reason="the extra ports, with Python 3.12")
MODULE = "tests.lab.compilers.test_triton_kernels"  # also where it is run as a program
# Tests of the Pallas kernels, and the kernels whose ports pass them, too.
OF_PALLAS = {
    "residual_norm": ("residual_norm_forward", "residual_norm_backward"),
    "grouped_matmul": ("grouped_product", "grouped_product_transposed"),
    "experts": ("grouped_product", "grouped_product_transposed"),
    "attention": ("attention",),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", OF_PALLAS)
def test_emulated_ports_pass_the_tests_of_the_pallas_kernels(name):
    tests = [f"tests/ops/test_{name}_kernel.py", "-k", "equal or any_rows or of_the_reference or parts_of_the_keys"]
    code = f"""
from tests.lab.compilers import ports
ports.install(ports.emulated)
import pytest
status = pytest.main([*{tests}, "-q", "-p", "no:cacheprovider"])
print("used", *ports.used)
raise SystemExit(status)"""
    # Triton's own functions are compiled or emulated when imported.
    env = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert {*done.stdout.split("used ")[-1].split()} == {*OF_PALLAS[name]}


CASES = ["residual_norm backward", "grouped_matmul", "attention"]  # at the 8B's sizes in bf16
PORTS = ["residual_norm_forward", "residual_norm_backward", "grouped_product", "attention"]  # that they launch


def compile_cases(gpu, folder, with_ports):
    """Compile the cases; with ports also write what Triton itself compiled these to."""
    if with_ports:
        from tests.lab.compilers import ports

        ports.install()
    selection, every = select_kernels(GPUS[gpu].target, EIGHT_B.model, "bfloat16"), cases(EIGHT_B, "bfloat16")
    for name in CASES:
        compile_program(name.replace(" ", "_"), *passes(every[name], selection), gpu, Path(folder))
    for name, compiled in (ports.used if with_ports else {}).items():
        file = Path(folder, f"port_{name}", "0.jit_port." + ("hsaco" if "hsaco" in compiled.asm else "ptx"))
        file.parent.mkdir()
        code = compiled.asm[file.suffix[1:]]
        file.write_bytes(code if isinstance(code, bytes) else code.encode())
        (file.parent / "shared").write_text(str(compiled.metadata.shared))


def port(name, gpu, folder):
    """A port's resources as Triton compiled it, and the bytes of its code."""
    objects, assembler = folder / f"port_{name}", find_toolchain(gpu)[1]
    found = _amd(objects) if assembler is None else _nvidia(objects, "port", objects, assembler, GPUS[gpu].architecture)
    (kernel,) = found
    shared = int((objects / "shared").read_text())
    return kernel._replace(shared=shared), code_bytes(objects, gpu)[kernel.name]


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


@functools.cache
def compiled(gpu):
    """Of each kernel: resources and bytes of code of the Pallas kernel, and of the port."""
    need_stand_ins(gpu)
    with tempfile.TemporaryDirectory() as temporary:
        folders = Path(temporary, "pallas"), Path(temporary, "ports")
        for folder in folders:
            folder.mkdir()
            code = f"from {MODULE} import *\ncompile_cases({gpu!r}, {str(folder)!r}, {folder.name == 'ports'})"
            done = run(gpu, folder, code)
            assert done.returncode == 0, done.stderr
        names = [name.replace(" ", "_") for name in CASES]
        kernels = {kernel.name: kernel for name in names for kernel in read_program(name, gpu, folders[0]).kernels}
        sizes = code_bytes(folders[0], gpu)
        return {name: ((kernels[name], sizes[name]), port(name, gpu, folders[1])) for name in PORTS}


@pytest.mark.parametrize("gpu", ["mi300x", "mi355x", "h200"])
def test_ports_compile_as_the_pallas_kernels_do(gpu):
    for name, (_, (port, size)) in compiled(gpu).items():
        assert port.spills == port.scratch == 0, port
        assert port.shared <= GPUS[gpu].shared_per_block
        assert 0 < size < 2**16, name


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
