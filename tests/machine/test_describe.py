import pytest

from zaya_jax.machine import describe as module
from zaya_jax.machine.describe import describe_machine, gpu_of_machine


@pytest.mark.parametrize(("files", "gpu"), [
    ([], None), (["null"], None), (["kfd"], "rocm"), (["nvidia0", "nvidiactl"], "cuda"), (["nvidia0", "kfd"], "rocm"),
])  # fmt: skip
def test_a_gpu_is_known_by_the_files_of_its_driver(tmp_path, files, gpu):
    for name in files:
        (tmp_path / name).touch()
    assert gpu_of_machine(tmp_path) == gpu


def test_a_machine_is_described_without_what_is_private(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("SECRET", "word")
    found = describe_machine()
    assert found["platform"] == "cpu"
    assert found["devices"] >= 1
    assert found["host_bytes"] > 2**28
    assert found["environment"]["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    assert "word" not in str(found)


def test_a_gpu_that_jax_does_not_use_is_a_failure(monkeypatch):
    monkeypatch.setattr(module, "gpu_of_machine", lambda: "rocm")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "failed" not in describe_machine()
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "pip install -e '.[rocm]'" in describe_machine()["failed"]
