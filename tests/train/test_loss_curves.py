"""The losses of a run do not change unnoticed: data order, initialization, schedules and updates all shape them.

`loss_curves/DEVICE.json` has the curve of one kind of device. After an intended change, write it again:

    python -m tests.train.test_loss_curves tests/train/loss_curves/cpu.json
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import pytest

from tests.train_helpers import small_run
from zaya_jax.train.fit import run_training

CURVES = Path(__file__).parent / "loss_curves"
STEPS, TOKENS = 40, 128
OVERRIDES = (
    "seed=3",
    f"phases.0.tokens={STEPS * TOKENS}",
    "evaluation.every=20",
    "checkpoint.every=40",
    "sample.tokens=0",
)


def curve(folder: Path) -> dict[str, list[float]]:
    result = run_training(small_run(folder, *OVERRIDES))
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"loss": [row["loss"] for row in rows], "grad_norm": [row["grad_norm"] for row in rows],
            "heldout_loss": [row["heldout_loss"] for row in rows if "heldout_loss" in row]}  # fmt: skip


def test_the_losses_of_a_run_are_those_of_this_kind_of_device(tmp_path: Path):
    path = CURVES / f"{jax.devices()[0].device_kind.lower().replace(' ', '_')}.json"
    assert curve(tmp_path) == {
        name: pytest.approx(values, rel=1e-5) for name, values in json.loads(path.read_text()).items()
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(json.dumps(curve(Path(scratch)), indent=1) + "\n", encoding="utf-8")
