"""Hardware from measurements: what each file gives, and what is missing."""

import json

import pytest

from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.hardware.measurements import get_hardware

GEMM = {
    "benchmark": "matrix products", "maximum": 1000.0,
    "results": [
        {"family": "square", "flops": 10, "warm_flops_per_second": 1000.0},
        {"family": "model", "flops": 300, "warm_flops_per_second": 300.0},  # 1 s
        {"family": "model", "flops": 500, "warm_flops_per_second": 500.0},  # 1 s
        {"family": "experts", "flops": 100, "warm_flops_per_second": 100.0},
        {"family": "attention", "flops": 100, "failed": "out of memory"},
    ],
}  # fmt: skip
MEMORY = {
    "benchmark": "memory bandwidth", "hardware": {"device": "cpu", "memory_bytes": 64e9, "cpus": 4},
    "results": [
        {"operation": "triad", "bytes": 2**20, "bytes_per_second": 90e9},
        {"operation": "triad", "bytes": 2**28, "bytes_per_second": 40e9},
        {"operation": "copy", "bytes": 2**28, "bytes_per_second": 50e9},
    ],
}  # fmt: skip


def fit(operation, devices, alpha, beta):
    row = {"operation": operation, "devices": devices}
    return row | {"alpha_seconds": {"value": alpha}, "beta_bytes_per_second": {"value": beta}}


COLLECTIVES = {
    "benchmark": "collectives",
    "fits": [
        fit("all_gather", 2, 1.0, 9e9), fit("all_gather", 4, 3e-4, 2e9), fit("all_reduce", 8, 9.0, 1e9),
        {"operation": "all_gather", "devices": 8},  # no fit
    ],
}  # fmt: skip


def write(folder, **results):
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    return str(folder)


def test_measurements_replace_a_data_sheet(tmp_path):
    found = get_hardware(write(tmp_path, a=GEMM, b=MEMORY, other={"benchmark": "step"}), 1)
    assert (found.peak, found.fp32_peak, found.bandwidth, found.memory) == (1000.0, 1000.0, 40e9, 64e9)
    assert found.measured
    # Products of the model together: 800 FLOPs in 2 s.
    assert (found.reached.matmul, found.reached.kernel, found.reached.memory) == (0.4, 0.1, 1.0)
    assert get_hardware("h200", 8) is HARDWARE["h200"]


def test_a_gpu_keeps_the_rest_of_its_data_sheet(tmp_path):
    memory = MEMORY | {"hardware": MEMORY["hardware"] | {"device": "AMD Instinct MI300X"}}
    found = get_hardware(write(tmp_path, gemm=GEMM, memory=memory), 1)
    sheet = HARDWARE["mi300x"]
    assert (found.memory, found.allocatable, found.units) == (sheet.memory, sheet.allocatable, sheet.units)
    assert found.bandwidth == 40e9


def test_links_are_those_of_all_gathers_over_the_most_devices(tmp_path):
    folder = write(tmp_path, gemm=GEMM, memory=MEMORY)
    with pytest.raises(InputError, match=r"has no result of python -m zaya_jax.machine collectives --output"):
        get_hardware(folder, 2)
    found = get_hardware(write(tmp_path, collectives=COLLECTIVES), 4)
    assert found.node_size == 4
    assert found.intra_node == 2e9 * 3 / 4  # of the gathered bytes, a device sends three quarters
    assert found.reached.latency == 3e-4


@pytest.mark.parametrize(("results", "message"), [
    ({}, "has no result of python -m zaya_jax.machine gemm --output"),
    ({"gemm": GEMM}, "has no result of python -m zaya_jax.machine memory --output"),
    ({"gemm": GEMM, "memory": MEMORY | {"results": []}}, "measure again"),
    ({"gemm": {"benchmark": "matrix products"}, "memory": MEMORY}, "'maximum'"),
])  # fmt: skip
def test_missing_measurements_are_named(results, message, tmp_path):
    with pytest.raises(InputError, match=message):
        get_hardware(write(tmp_path, **results), 1)


def test_a_damaged_file_and_an_unknown_name_are_named(tmp_path):
    (tmp_path / "gemm.json").write_text("{")
    with pytest.raises(InputError, match=r"gemm\.json cannot be read as JSON"):
        get_hardware(str(tmp_path), 1)
    with pytest.raises(InputError, match=r"--hardware is 'b200', but must be one of mi300x.*, or a folder"):
        get_hardware("b200", 1)
