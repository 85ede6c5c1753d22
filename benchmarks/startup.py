"""The time from the command to the end of the first training step, by part: the first start, and the second."""

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import OVERRIDES, command, flag, medians, training_process
from zaya_jax.config import load_config
from zaya_jax.errors import RunStopped
from zaya_jax.lab.result import describe_run, rounded
from zaya_jax.lab.subprocesses import restored_environment
from zaya_jax.run.progress_record import NAME, SIZE, VARIABLE, Phase, Progress, read_progress

_STARTS = {"cold": "nothing prepared or compiled", "warm": "data prepared, programs compiled"}
_PARTS = {
    "imports": (Phase.START, Phase.JOIN),
    "data": (Phase.OPEN, Phase.DATA),
    "parameters": (Phase.RESTORE,),
    "compilation": (Phase.COMPILE,),
}  # the first step is the rest


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time the start of training by part, with empty caches and again.

    Starts a run with empty caches, ends it after its first step, and starts it again.

    startup --config configs/tiny.yaml --output startup.json
    """
    config, overrides = parsed.config, parsed.overrides
    load_config(config, overrides)  # so that a mistake is named before anything runs
    result = describe_run("start-up", f"{config} {' '.join(overrides)}".strip(), "", ())
    starts: dict[str, list[dict[str, float]]] = {name: [] for name in _STARTS}
    for _ in range(parsed.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name in _STARTS:
                starts[name].append(_start(Path(folder), name, config, overrides))
    result["results"] = {}
    for name, rows in starts.items():
        seconds = {part: rounded([row[part] for row in rows]) for part in rows[0]}
        result["results"][name], typical = seconds, medians(seconds)
        total = typical.pop("total")
        parts = ", ".join(f"{part} {median:.1f}" for part, median in typical.items())
        print(f"{name} start ({_STARTS[name]}): {total:.1f} s to the end of the first step: {parts}")
    return result


def _start(folder: Path, name: str, config: str, overrides: Sequence[str]) -> dict[str, float]:
    """Start a run, and kill it after its first step; return the seconds of each part. RunStopped if it ends earlier."""
    changes = [*overrides, f"run_dir={folder / name}", f"data.cache_dir={folder / 'data'}"]
    # Training writes its progress to no other file than one in memory.
    with os.fdopen(os.memfd_create(NAME, os.MFD_CLOEXEC), "r+b") as record, restored_environment():
        record.truncate(SIZE)
        os.environ |= {VARIABLE: f"/proc/{os.getpid()}/fd/{record.fileno()}", "XDG_CACHE_HOME": str(folder / "cache")}
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        begun = before = time.monotonic()
        with training_process(config, *changes, ends=(0, -signal.SIGKILL)) as process:
            while process.poll() is None:
                time.sleep(0.01)
                if (progress := read_progress(record.fileno())) is None:
                    before = time.monotonic()
                elif progress.step >= 1:
                    return _parts(progress, before - begun, time.monotonic() - begun)
    raise RunStopped(f"Training with {config} ended before its first step.")


def _parts(progress: Progress, before: float, total: float) -> dict[str, float]:
    """Return the seconds of each part; `before` is the time until the process kept a record."""
    parts = {part: sum((progress.seconds[phase] for phase in phases), 0.0) for part, phases in _PARTS.items()}
    parts["imports"] += before
    return {**parts, "first step": total - sum(parts.values()), "total": total}


FLAGS = {"--config": flag("configs/tiny.yaml", "FILE", "configuration to train"), "overrides": OVERRIDES}
main = command(run, FLAGS, repeats=3)
