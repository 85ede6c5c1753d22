"""The shipped recipe, killed at and around every boundary of its phases, is bitwise the run that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.compile_helpers import CHEAP
from tests.train_helpers import ROOT, differing, restore
from zaya_jax.config import load_config
from zaya_jax.config.stages import phase_steps, stages, total_steps
from zaya_jax.run.metrics import read_rows

# The phases of configs/recipe_tiny.yaml, shorter and on a smaller model: what is killed is the same.
SHORT = ["model.hidden_size=32", "model.expert_size=16", "model.head_dim=8", "model.vocab_size=512", "sample.tokens=4",
         "phases.pretrain_1.tokens=24_576", "phases.pretrain_1.batch.ramp_tokens=16_384",
         "phases.pretrain_1.schedule.warmup_tokens=4096", "phases.pretrain_2.tokens=16_384",
         "phases.midtrain.tokens=16_384", "phases.sft.tokens=16_384", "evaluation.batches=1", "checkpoint.every=7",
         "data.corpus=zaya_jax", "data.heldout_fraction=0.1"]  # fmt: skip


class Run:
    """One run folder and the processes that work on it."""

    def __init__(self, folder, name):
        self.overrides = [*SHORT, f"run_dir={folder / name}", f"data.cache_dir={folder / 'cache'}"]
        self.config = load_config(ROOT / "configs" / "recipe_tiny.yaml", self.overrides)
        self.folder, self.log = Path(self.config.run_dir), folder / f"{name}.log"
        self.env = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "XLA_FLAGS": CHEAP,
        }

    def start(self):
        with self.log.open("a") as log:
            command = [sys.executable, "-m", "zaya_jax.main", "--config", "configs/recipe_tiny.yaml", *self.overrides]
            return subprocess.Popen(command, cwd=ROOT, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def rows(self):
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def kill_at(self, step):
        with self.start() as process:
            while self.rows() < step:
                assert process.poll() is None, self.log.read_text()
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)

    def finish(self):
        with self.start() as process:
            process.wait()
        assert process.returncode == 0, self.log.read_text()


@pytest.mark.soak
def test_kills_around_every_boundary_change_nothing(tmp_path):
    alone, killed = Run(tmp_path, "alone"), Run(tmp_path, "killed")
    alone.finish()
    steps = total_steps(alone.config)
    boundaries = sorted({stage.end for stage in stages(alone.config)} - {steps})  # of phases and of the ramp's sizes
    assert {end for _, end in phase_steps(alone.config)} - {steps} < set(boundaries)
    moments = sorted({step for end in boundaries for step in (end - 1, end, end + 1)})
    for step in moments:
        killed.kill_at(step)
    killed.finish()

    assert [row["step"] for row in read_rows(alone.folder / "metrics.jsonl")] == list(range(1, steps + 1))
    assert (killed.folder / "metrics.jsonl").read_bytes() == (alone.folder / "metrics.jsonl").read_bytes()
    (first, first_data), (second, second_data) = (restore(run.config, steps) for run in (alone, killed))
    assert not differing(first, second)
    assert first_data == second_data
    ends = {phase.name: end for phase, (_, end) in zip(alone.config.phases, phase_steps(alone.config), strict=True)}
    assert json.loads((killed.folder / "phases.json").read_text()) == ends
    assert killed.log.read_text().count("Resuming after step") >= len(boundaries)
