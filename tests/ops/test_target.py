import types

import jax
import pytest

from zaya_jax.ops.target import Target, current_target


def test_these_tests_run_on_a_cpu():
    assert current_target() == Target("cpu", jax.devices()[0].device_kind)


@pytest.mark.parametrize(
    ("platform", "version", "expected"),
    [
        ("gpu", "PJRT C API\nrocm 60300", "rocm"),
        ("gpu", "PJRT C API\nROCm 7.0", "rocm"),
        ("gpu", "PJRT C API\ncuda 12090", "cuda"),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_a_gpu_is_of_the_runtime_that_drives_it(monkeypatch, platform, version, expected):
    device = types.SimpleNamespace(
        platform=platform, device_kind="kind", client=types.SimpleNamespace(platform_version=version)
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert current_target() == Target(expected, "kind")


def test_a_target_is_a_static_value():
    assert hash(Target("cuda", "NVIDIA H200")) == hash(Target("cuda", "NVIDIA H200"))
    assert Target("cuda", "NVIDIA H200") != Target("rocm", "NVIDIA H200")
