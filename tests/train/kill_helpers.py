"""Runs whose processes are killed, compared with one that is not."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.compile_helpers import CHEAP
from tests.devices_helpers import ROOT
from tests.train_helpers import differing, restore, write_run
from zaya_jax.config import load_config
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import read_rows


class Moment(NamedTuple):
    """When a process is killed: `at` a part of the start-up, or of the steps of the run."""

    kind: str  # 'start', 'step' or 'save'
    at: float


def draw_moments(rng: random.Random, count: int) -> list[Moment]:
    """Moments that spread over the run in order, each kind among three and more."""
    kinds = ["start", "step", "save", *rng.choices(["start", "step", "save"], k=max(0, count - 3))]
    rng.shuffle(kinds)
    kinds = kinds[:count]
    return [
        Moment(kind, rng.random() if kind == "start" else (index + 0.2 + 0.6 * rng.random()) / count)
        for index, kind in enumerate(kinds)
    ]


def check_kills(folder: Path, steps: int, kills: int, seed: int) -> None:
    """Compare a run that is killed `kills` times, and started again with the same command, with one that is not."""
    rng = random.Random(seed)
    third = steps // 3
    phases = [
        {"name": "one", "tokens": third * 128, "schedule": {"warmup_tokens": 256}},
        {"name": "two", "tokens": third * 128, "context": 64, "rope_base": 1e3, "packing": "bins",
         "batch": {"tokens": 128, "micro_batch": 2}},
        {"name": "three", "tokens": (steps - 2 * third) * 128, "schedule": {"shape": "linear", "final": 0.0}},
    ]  # fmt: skip
    overrides = {"phases": json.dumps(phases), "train.batch.micro_batch": 4, "checkpoint.every": 4,
                 "evaluation.every": 15, "train.log_every": 10, "sample.tokens": 4}  # fmt: skip
    alone, killed = (_KilledRun(folder, run, overrides) for run in ("alone", "killed"))
    alone.finish()
    for moment in draw_moments(rng, kills):
        killed.kill(moment, steps, alone.startup, rng)
    killed.finish()

    rows = (alone.folder / METRICS).read_bytes()
    assert [row["step"] for row in read_rows(alone.folder / METRICS)] == list(range(1, steps + 1))
    assert (killed.folder / METRICS).read_bytes() == rows
    (first, first_data), (second, second_data) = (restore(run.config, steps) for run in (alone, killed))
    assert not differing(first, second)
    assert first_data == second_data
    assert (killed.folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert killed.report() == alone.report()
    assert not list((killed.folder / CHECKPOINTS).glob("*tmp*"))
    assert "Resuming after step" in killed.log.read_text(encoding="utf-8")  # else the kills came too early to matter


class _KilledRun:
    """The processes of one run."""

    def __init__(self, folder: Path, run: str, overrides: dict[str, Any]) -> None:
        self.config_path = write_run(folder, run)
        self.overrides = [
            f"data.cache_dir={folder / run}_cache",
            *(f"{key}={value}" for key, value in overrides.items()),
        ]
        self.config = load_config(self.config_path, self.overrides)
        self.folder = Path(self.config.run_dir)
        self.log = folder / f"{run}.log"
        self.startup = 0.0  # seconds until the first row
        # A separate cache, since a kill can leave a partial entry.
        self.env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "XLA_FLAGS": CHEAP}

    def start(self) -> subprocess.Popen:
        with self.log.open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "zaya_jax.main", "--config", str(self.config_path), *self.overrides],
                cwd=ROOT, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def finish(self) -> None:
        started = time.monotonic()
        with self.start() as process:
            for _ in _while_alive(process):
                if not self.startup and self.rows():
                    self.startup = time.monotonic() - started
        assert process.returncode == 0, self.log.read_text(encoding="utf-8")

    def kill(self, moment: Moment, steps: int, startup: float, rng: random.Random) -> None:
        before, started = self.rows(), time.monotonic()
        target = min(max(round(moment.at * steps), before + 1), steps - 2)
        with self.start() as process:
            for _ in _while_alive(process):
                if moment.kind == "start":
                    # A start from compiled programs is shorter than the first one was: over when rows change.
                    if time.monotonic() - started >= moment.at * startup or self.rows() != before:
                        break
                elif self.rows() >= target and (moment.kind == "step" or self.saving()):
                    time.sleep(rng.random() * 0.02)
                    break
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL, f"{moment} came too late: {self.log.read_text(encoding='utf-8')}"

    def rows(self) -> int:
        path = self.folder / METRICS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saving(self) -> bool:
        return any((self.folder / CHECKPOINTS).glob("*tmp*"))

    def report(self) -> list[str]:
        """What a finished run prints at its end, but its folder."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        starts = [index for index, line in enumerate(lines) if line.startswith("Held-out loss")]
        return [line for line in lines[starts[-1] :] if not line.startswith("Run folder")]


def _while_alive(process: subprocess.Popen) -> Iterator[None]:
    while process.poll() is None:
        yield
        time.sleep(0.001)
