"""The cost of supervision for a healthy run: the progress record per step, and the step time under a supervisor."""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import TRAINING, command, medians, training_process
from zaya_jax.config import load_config
from zaya_jax.lab.result import describe_run, rounded
from zaya_jax.run.folder import TIMINGS
from zaya_jax.run.metrics import read_rows
from zaya_jax.run.progress_record import SIZE, Phase, ProgressRecord

_WRITES = 20_000  # steps for which the record is timed
_WARM_UP = 10  # steps of a run that are not timed


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time training under a supervisor against training without one.

    Trains a configuration with and without `aegis run`, in turn, and times the progress record.

    supervision --config configs/tiny.yaml phases.0.tokens=122_880 --output supervision.json
    """
    config, overrides, repeats = parsed.config, parsed.overrides, parsed.repeats
    load_config(config, overrides)  # so that a mistake is named before anything runs
    result = describe_run("supervision", f"{config} {' '.join(overrides)}", "the same run without a supervisor", ())
    record = [_time_record() for _ in range(repeats)]
    seconds: dict[str, list[float]] = {"alone": [], "supervised": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats):
            for side in sorted(seconds, reverse=turn % 2 == 1):
                run_dir = Path(folder, f"{side}-{turn}")
                seconds[side].append(_train(run_dir, side == "supervised", config, overrides))
    step = medians(seconds)
    ratio = step["supervised"] / step["alone"]
    spread = (max(seconds["alone"]) - min(seconds["alone"])) / step["alone"]
    print(
        f"The progress record takes {statistics.median(record):.2f} µs per step. A step takes "
        f"{1000 * step['supervised']:.3f} ms under a supervisor and {1000 * step['alone']:.3f} ms without: "
        f"{ratio:.3f}× (runs without a supervisor differ by {spread:.1%})."
    )
    steps = {side: rounded(each) for side, each in seconds.items()}
    ratios = {"ratio": round(ratio, 4), "spread": round(spread, 4)}
    return result | {"results": {"record_microseconds": rounded(record), **ratios, "step_seconds": steps}}


def _time_record() -> float:
    """Return the microseconds of all writes of one step."""
    file = os.memfd_create("record")
    os.truncate(file, SIZE)
    record = ProgressRecord(Path(f"/proc/{os.getpid()}/fd/{file}"))
    begun = time.perf_counter()
    for step in range(_WRITES):
        record.enter(Phase.DATA)
        record.enter(Phase.DISPATCH)
        record.enter(Phase.DEVICE_WAIT)
        record.complete_step(step, 1.0, 1.0)
    os.close(file)
    return 1e6 * (time.perf_counter() - begun) / _WRITES


def _train(run_dir: Path, supervised: bool, config: str, overrides: Sequence[str]) -> float:
    """Train once, and return the median seconds of a step; RunStopped if the run failed."""
    supervisor = ("-m", "zaya_jax.aegis", "run", "--", sys.executable) if supervised else ()
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(run_dir.parent / "compiled"))
    settings: dict[str, Any] = {"program": (*supervisor, "-m", "zaya_jax.main"), "JAX_COMPILATION_CACHE_DIR": kept}
    with training_process(config, *overrides, f"run_dir={run_dir}", **settings) as process:
        process.wait()
    return statistics.median(row["seconds"] for row in read_rows(run_dir / TIMINGS)[_WARM_UP:])


main = command(run, TRAINING, repeats=3)
