import json

import pytest

from zaya_jax.machine import result
from zaya_jax.machine.__main__ import main
from zaya_jax.machine.proxies import machine_code as bench
from zaya_jax.machine.proxies.codegen import GPUS, MachineCode


@pytest.fixture
def compiled(monkeypatch):
    """What would be compiled, by GPU; nothing is."""
    seen = []

    def compile_kernel(kernel, gpu):
        seen.append((kernel.name, gpu.architecture))
        return MachineCode(128, 4096, 0)

    monkeypatch.setattr(bench, "compile_kernel", compile_kernel)
    return seen


def test_each_kernel_is_compiled_for_each_gpu_and_told_once(compiled):
    found = list(bench.rows("bfloat16", ["grouped_matmul", "grouped_matmul backward"]))
    # The second case does the product of the first too.
    assert [row["kernel"] for row in found] == ["grouped_product", "grouped_product_transposed", "grouped_outer"]
    for row in found:
        assert row["dtype"] == "bfloat16"
        assert row["gpus"].keys() == GPUS.keys()
        for code in row["gpus"].values():
            assert code.keys() == {"warps", "stages", "registers", "shared", "spills"}
    assert {architecture for _, architecture in compiled} == {gpu.architecture for gpu in GPUS.values()}


def test_the_table_goes_to_a_file(compiled, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "rows", lambda dtype, only: iter([{"kernel": f"k_{dtype}", "dtype": dtype, "gpus": {
        name: {"warps": 4, "stages": 1, "registers": 77, "shared": 512, "spills": 3} for name in GPUS}}]))  # fmt: skip
    path = tmp_path / "code.json"
    assert main(["machine-code", "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [row["kernel"] for row in found["kernels"]] == ["k_bfloat16", "k_float32"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["k_float32", "float32", *["4", "77", "512", "3"] * len(GPUS)]


def test_a_missing_compiler_is_told_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(result, "_version", lambda name: "not installed")
    assert main(["machine-code"]) == 2
    assert "pip install -e '.[test]'" in capsys.readouterr().err


@pytest.mark.soak
def test_real_machine_code_spills_nothing():
    pytest.importorskip("triton")
    (row,) = bench.rows("bfloat16", ["residual_norm"])
    assert all(code["registers"] > 0 and code["spills"] == 0 for code in row["gpus"].values())
