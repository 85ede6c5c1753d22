"""Data sheets, and which of them this machine's accelerators have."""

from pathlib import Path
from typing import get_args

import pytest

from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE, peak_flops
from zaya_jax.hardware.detection import cpu_digest, cpu_name, detect_gpu_plugin, select_preset
from zaya_jax.hardware.measurements import get_hardware
from zaya_jax.hardware.presets import PRESETS, PresetName


def amd(root: Path, *targets: int) -> None:
    (root / "dev").mkdir()
    (root / "dev" / "kfd").touch()
    for node, target in enumerate(targets):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        text = f"simd_count {4 if target else 0}\ngfx_target_version {target}\nvendor_id 4098\n"
        (folder / "properties").write_text(text)


def nvidia(root: Path, model: str) -> None:
    for index in range(2):
        folder = root / f"proc/driver/nvidia/gpus/0000:{index:02}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 19\nGPU UUID: \t GPU-1\n")


def selected(root: Path, name: str | None = None, **environment: str) -> str:
    return select_preset(name, root, environment).name


def test_each_accelerator_has_a_data_sheet_and_a_preset():
    assert {*HARDWARE, "cpu"} == set(PRESETS) == set(get_args(PresetName))
    kinds = [kind for sheet in HARDWARE.values() for kind in sheet.kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("name", HARDWARE)
def test_data_sheets_are_in_bytes_and_operations(name):
    """Links are slower than memory, other nodes slower than one's own, and a byte takes hundreds of operations."""
    sheet = get_hardware(name, 1)
    assert {peak_flops(f"AMD or NVIDIA {kind} SXM") for kind in sheet.kinds} == {sheet.peak}
    assert sheet.inter_node < sheet.intra_node < sheet.bandwidth
    assert 10e9 < sheet.memory < 1e12
    assert 100 < sheet.peak / sheet.bandwidth < 1000


def test_other_devices_have_no_data_sheet():
    assert peak_flops("cpu") is None
    with pytest.raises(InputError, match=r"--hardware.*'b200'.*mi300x, mi355x, h100, h200"):
        get_hardware("b200", 1)


@pytest.mark.parametrize(("targets", "name"), [
    ((0, 0, 90402, 90402), "mi300x"),
    ((0, 90500), "mi355x"),
    ((0, 90010), "cpu"),  # MI250X
    ((0,), "cpu"),
    ((), "cpu"),
])  # fmt: skip
def test_an_amd_gpu_is_detected_by_the_kernels_topology(tmp_path, targets, name):
    amd(tmp_path, *targets)
    assert selected(tmp_path) == name
    (tmp_path / "dev" / "kfd").unlink()  # a container without the GPU's device
    assert selected(tmp_path) == "cpu"


@pytest.mark.parametrize(("model", "name"), [
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA GH200 480GB", "cpu"),
    ("NVIDIA A100-SXM4-80GB", "cpu"),
])  # fmt: skip
def test_an_nvidia_gpu_is_detected_by_the_drivers_files(tmp_path, model, name):
    nvidia(tmp_path, model)
    assert selected(tmp_path) == name
    (tmp_path / "proc/driver/nvidia/gpus/0/information").mkdir(parents=True)  # cannot be read
    assert selected(tmp_path) == name


def test_a_configured_preset_and_jax_kept_on_the_cpu_come_first(tmp_path):
    amd(tmp_path, 90402)
    assert selected(tmp_path, JAX_PLATFORMS="cpu") == "cpu"
    assert selected(tmp_path, JAX_PLATFORMS="rocm,cpu") == "mi300x"
    assert selected(tmp_path, "h100", JAX_PLATFORMS="cpu") == "h100"


@pytest.mark.parametrize(("files", "plugin"), [
    ([], None), (["null"], None), (["kfd"], "rocm"), (["nvidia0", "nvidiactl"], "cuda"), (["nvidia0", "kfd"], "rocm"),
])  # fmt: skip
def test_a_gpu_has_the_plugin_of_its_driver(tmp_path, files, plugin):
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    assert detect_gpu_plugin(tmp_path) == plugin


def test_a_processor_has_a_name(tmp_path):
    assert cpu_name(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Processor\nmodel name\t: Another\n")
    assert cpu_name(tmp_path) == "A Processor"


def test_a_digest_is_of_the_kind_of_processor_alone(tmp_path):
    (tmp_path / "proc").mkdir()

    def digest(text):
        (tmp_path / "proc/cpuinfo").write_text(text)
        return cpu_digest(tmp_path)

    one = "model name\t: A\ncpu MHz\t\t: 2000.1\nflags\t\t: avx avx2\n"
    assert digest(one) == digest(one + one.replace("2000.1", "3100.9"))  # two cores, at another frequency
    assert len({digest(one), digest(one.replace("avx2", "avx512f")), digest(one.replace(": A", ": B"))}) == 3
