"""Hardware from measurements: what each file gives, and what is missing."""

import json

import pytest

from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.hardware.environment import apply_preset
from zaya_jax.hardware.measurements import get_hardware, measured_preset
from zaya_jax.hardware.presets import PRESETS

GEMM = {
    "benchmark": "matrix products", "maximum": 1000.0, "dtype": "float32", "hardware": {"device": "cpu"},
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
    folder.mkdir(exist_ok=True)
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    return str(folder)


def test_measurements_replace_a_data_sheet(tmp_path):
    measured = get_hardware(write(tmp_path, a=GEMM, b=MEMORY, other={"benchmark": "step"}), 1)
    assert (measured.peak, measured.fp32_peak, measured.bandwidth, measured.memory) == (1000.0, 1000.0, 40e9, 64e9)
    assert measured.measured
    # Products of the model together: 800 FLOPs in 2 s.
    assert (measured.reached.matmul, measured.reached.kernel, measured.reached.memory) == (0.4, 0.1, 1.0)
    assert get_hardware("h200", 8) is HARDWARE["h200"]


def test_a_gpu_keeps_the_rest_of_its_data_sheet(tmp_path):
    device = {"hardware": MEMORY["hardware"] | {"device": "AMD Instinct MI300X"}}
    files = {"gemm": GEMM | device, "memory": MEMORY | device, "collectives": COLLECTIVES}
    measured, sheet = get_hardware(write(tmp_path, **files), 1024), HARDWARE["mi300x"]
    assert (measured.memory, measured.allocatable, measured.units) == (sheet.memory, sheet.allocatable, sheet.units)
    assert (measured.bandwidth, measured.fp32_peak, measured.peak) == (40e9, 1000.0, sheet.peak)
    # Links within the node are measured, adapters between nodes are not.
    assert (measured.inter_node, measured.links.adapter) == (sheet.inter_node, sheet.links.adapter)
    assert measured.link / measured.intra_node == pytest.approx(sheet.link / sheet.intra_node)
    assert (measured.intra_node, measured.links.xgmi, measured.node_size) == (1.5e9, 1.0, 8)


def test_links_are_those_of_all_gathers_over_the_most_devices(tmp_path):
    folder = write(tmp_path, gemm=GEMM, memory=MEMORY)
    with pytest.raises(InputError, match=r"has no result of python -m zaya_jax.machine collectives --output"):
        get_hardware(folder, 2)
    measured = get_hardware(write(tmp_path, collectives=COLLECTIVES), 4)
    assert measured.node_size == 4
    assert measured.intra_node == 2e9 * 3 / 4  # of the gathered bytes, a device sends three quarters


@pytest.mark.parametrize(("results", "message"), [
    ({}, "has no result of python -m zaya_jax.machine gemm --output"),
    ({"gemm": GEMM}, "has no result of python -m zaya_jax.machine memory --output"),
    ({"gemm": GEMM, "memory": MEMORY | {"results": []}}, "measure again"),
    ({"gemm": {"benchmark": "matrix products"}, "memory": MEMORY}, "'maximum'"),
    ({"gemm": GEMM | {"hardware": {"device": "H200"}}, "memory": MEMORY}, "gemm is of H200, memory of cpu"),
    ({"gemm": GEMM, "memory": MEMORY, "other": MEMORY}, r"other\.json is a second result of machine memory"),
])  # fmt: skip
def test_missing_measurements_are_named(results, message, tmp_path):
    with pytest.raises(InputError, match=message):
        get_hardware(write(tmp_path, **results), 1)


def test_a_damaged_file_and_an_unknown_name_are_named(tmp_path):
    (tmp_path / "gemm.json").write_text("{")
    with pytest.raises(InputError, match=r"gemm\.json is not JSON"):
        get_hardware(str(tmp_path), 1)
    with pytest.raises(InputError, match=r"--hardware is 'b200', but must be one of mi300x.*, or a folder"):
        get_hardware("b200", 1)


def knees(device="8 × AMD Instinct MI300X", /, **bytes_by_operation):
    fits = [{"operation": name, "devices": devices, "knee_bytes": knee * devices}
            for name, knee in bytes_by_operation.items() for devices in (2, 8)]  # fmt: skip
    rows = [{"operation": name, "bytes": 10_000_000} for name in bytes_by_operation]
    return {"benchmark": "collectives", "hardware": {"device": device}, "fits": fits, "results": rows}


def test_the_preset_combines_messages_up_to_the_measured_size(tmp_path):
    folder = write(tmp_path, collectives=knees(all_gather=1000.0, reduce_scatter=3000.0))
    environment: dict[str, str] = {}
    apply_preset(measured_preset(PRESETS["mi300x"], folder), environment)
    flags = environment["XLA_FLAGS"].split()
    # Over 8 devices; XLA counts what a reduce-scatter puts out, an eighth of what it takes in.
    assert "--xla_gpu_all_gather_combine_threshold_bytes=8000" in flags
    assert "--xla_gpu_reduce_scatter_combine_threshold_bytes=3000" in flags
    assert len(flags) == sum(setting.is_flag for setting in PRESETS["mi300x"].settings)
    assert measured_preset(PRESETS["cpu"], "missing") is PRESETS["cpu"]  # whose compiler combines nothing


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({}, "has no fit of all_gather"),
        ({"collectives": knees("8 × NVIDIA H200", all_gather=1.0)}, "has no fit of reduce_scatter"),
        ({"collectives": knees("8 × NVIDIA H200", all_gather=0.0)}, "saturates at 0 bytes"),
        (
            {"collectives": knees("8 × NVIDIA H200", all_gather=9e6)},
            "saturates at 72,000,000 bytes, but sizes up to 10",
        ),
        (
            {"collectives": {"benchmark": "collectives", "hardware": {"device": "NVIDIA H200"}, "fits": [{}]}},
            "KeyError",
        ),
        ({"collectives": knees("8 × cpu", all_gather=1.0, reduce_scatter=1.0)}, "of 8 × cpu, but the preset is h200"),
    ],
)
def test_measurements_without_what_a_preset_needs_are_refused(results, message, tmp_path):
    with pytest.raises(InputError, match=message):
        measured_preset(PRESETS["h200"], write(tmp_path, **results))
    with pytest.raises(InputError, match="measurements is 'missing', but must be a folder"):
        measured_preset(PRESETS["h200"], "missing")
