import types

import jax
import pytest

from pallas_kernels.tiles import TILES, tile, tiles
from zaya_jax.ops.target import Target, current_target


def test_these_tests_run_on_a_cpu():
    assert current_target() == Target("cpu", jax.devices()[0].device_kind)


@pytest.mark.parametrize(
    ("platform", "version", "capability", "expected"),
    [
        ("gpu", "PJRT C API\nrocm 60300", "gfx942:sramecc+:xnack-", ("rocm", "gfx942")),
        ("gpu", "PJRT C API\nROCm 7.0", "gfx950", ("rocm", "gfx950")),
        ("gpu", "PJRT C API\nROCm 7.0", "", ("rocm", "rocm")),
        ("gpu", "PJRT C API\ncuda 12090", "9.0", ("cuda", "sm_90")),
        ("gpu", "PJRT C API\ncuda 12090", "12.0", ("cuda", "sm_120")),
        ("gpu", "PJRT C API\ncuda 12090", "", ("cuda", "cuda")),
        ("cpu", "cpu", "", ("cpu", "cpu")),
    ],
)
def test_a_gpu_is_of_the_runtime_that_drives_it(monkeypatch, platform, version, capability, expected):
    device = types.SimpleNamespace(
        platform=platform, device_kind="kind", client=types.SimpleNamespace(platform_version=version),
        compute_capability=capability,
    )  # fmt: skip
    monkeypatch.setattr(jax, "devices", lambda: [device])
    target = current_target()
    assert (target.platform, target.device_kind, target.architecture) == (expected[0], "kind", expected[1])


def test_every_kernel_has_a_tile_for_any_architecture_that_fits_smaller_gpus():
    for name in TILES:
        for dtype in ("bfloat16", "float32"):
            listed = "cuda" if "cuda" in TILES[name] else "sm_90"
            known, other = (tile(name, architecture, dtype) for architecture in (listed, "sm_86"))
            assert (other.sizes, other.warps, other.stages) == (known.sizes, known.warps, min(known.stages, 2))
            if "gfx942" in TILES[name]:
                assert tile(name, "gfx942", dtype) == tile(name, "gfx1100", dtype) == tile(name, "rocm", dtype)


def test_tiles_are_powers_of_two_but_for_limits_of_programs_rows_and_tokens():
    limits = {"residual_norm_backward": (1, 2), "cca_mix_backward_matrices": (1,)}  # which sizes
    for name, architectures in TILES.items():
        for cut in (cut for architecture in architectures for dtype in ("bfloat16", "float32")
                    for cut in tiles(name, architecture, dtype)):  # fmt: skip
            sizes = [size for index, size in enumerate(cut.sizes) if index not in limits.get(name, ())]
            warps = cut.warps // 3 if name.startswith("attention_mosaic") else cut.warps  # three warpgroups
            assert all(size.bit_count() == 1 for size in (*sizes, warps)), (name, cut)


def test_a_target_is_a_static_value():
    assert hash(Target("cuda", "NVIDIA H200")) == hash(Target("cuda", "NVIDIA H200"))
    assert Target("cuda", "NVIDIA H200") != Target("rocm", "NVIDIA H200")
