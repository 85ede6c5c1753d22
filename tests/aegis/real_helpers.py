"""The real trainer under supervisors, with faults of drills and those of `hooked_trainer.py`."""

import sys
from pathlib import Path
from typing import Any

from tests.aegis.aegis_helpers import Supervised
from tests.compile_helpers import CHEAP
from tests.train_helpers import ROOT, write_run
from zaya_jax.aegis.faults import MARKS
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import METRICS
from zaya_jax.run.manifest import read_manifest

HOOKED = ROOT / "tests" / "aegis" / "hooked_trainer.py"
POLICY = {"timeouts": {"data": 60.0, "dispatch": 60.0, "device_wait": 60.0, "floor": 60.0},
          "restart": {"per_hour": 1000, "delays": [0.0], "same_failure": 1000, "no_progress": 1000}}  # fmt: skip


class Run:
    """A small run of `processes` that is trained under supervisors, started as often as a test wants."""

    def __init__(self, folder: Path, processes: int, steps: int, name: str = "disturbed", *overrides: str) -> None:
        self.processes, self.steps, self.folder = processes, steps, folder / name
        self.marks = folder / f"{name}-marks"
        for path in (self.folder, self.marks):
            path.mkdir(parents=True, exist_ok=True)
        self.run_dir = self.folder / "run"
        self.arguments = ["--config", str(write_run(folder)), f"train.batch.micro_batch={2 if processes > 1 else 4}",
                          "checkpoint.every=4", "evaluation.every=5", "sample.tokens=4",
                          f"phases.0.tokens={steps * 128}", *overrides, f"run_dir={self.run_dir}"]  # fmt: skip

    def start(self, *faults: str, policy: dict[str, Any] | None = None) -> Supervised:
        """Start a supervisor of the trainer in which `faults` happen."""
        command = [sys.executable, str(HOOKED), *faults, "--", "-m", "zaya_jax.main", *self.arguments]
        return Supervised(self.folder, command, self.processes, {**POLICY, **(policy or {})},
                          {MARKS: str(self.marks), "XLA_FLAGS": CHEAP})  # fmt: skip

    @property
    def made(self) -> int:
        """Faults that have happened."""
        return len(list(self.marks.glob("*.json")))

    def results(self) -> tuple[object, bytes]:
        """The digests of the last checkpoint's arrays, and the rows of metrics."""
        return (read_manifest(self.run_dir / CHECKPOINTS / str(self.steps)).leaves,
                (self.run_dir / METRICS).read_bytes())  # fmt: skip


def undisturbed(folder: Path, processes: int, steps: int, *overrides: str) -> tuple[object, bytes]:
    """The results of the run without faults."""
    run = Run(folder, processes, steps, "undisturbed", *overrides)
    assert run.start().wait(600) == 0
    return run.results()
