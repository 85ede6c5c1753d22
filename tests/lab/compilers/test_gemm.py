"""The products of `machine gemm`, compiled for GPUs that are not here."""

import json

import pytest

from tests.lab.compilers.test_compiled import need_stand_ins
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.machine.__main__ import main

pytestmark = pytest.mark.compilers
COMMAND = "gemm configs/tiny.yaml --dtype bfloat16 --squares 512 1024 512 --lengths 128 --tokens 1024 --compile-for"


@pytest.mark.parametrize("gpu", ["mi300x", "h200"])
def test_every_product_compiles_and_has_a_prediction(gpu, tmp_path, capsys):
    need_stand_ins(gpu)
    assert main([*COMMAND.split(), gpu, "--output", str(tmp_path / "gemm.json")]) == 0
    rows = json.loads((tmp_path / "gemm.json").read_text())["results"]
    assert {row["family"] for row in rows} == {"square", "stride", "model", "experts", "newton_schulz", "attention"}
    assert all(row["launches"] >= 1 and row["predicted_flops_per_second"] > 0 for row in rows)
    large = next(row for row in rows if row["name"] == "1024")
    assert large["launches"] == 1
    assert 0.1 * HARDWARE[gpu].peak < large["slowest"] <= large["predicted_flops_per_second"] < HARDWARE[gpu].peak
    assert "predicted TFLOP/s" in capsys.readouterr().out
