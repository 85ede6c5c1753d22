"""A real run: it learns, keeps its data coming, and comes to the same loss as on a CPU."""

import contextlib
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import training_process
from benchmarks.gpu_report.runs import LARGE_EVERY, ONE_DEVICE, large_config, small_config
from zaya_jax.config import Config, to_yaml
from zaya_jax.errors import ExitCode
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.run.folder import METRICS, TIMINGS
from zaya_jax.run.metrics import read_rows

FALL = 0.5  # nats/token that the loss must fall
BOUND = 0.02  # nats/token by which the held-out loss may differ from the CPU's, in fp32
SECONDS = 100.0  # of the run on a GPU, after its first step
Rows = list[dict[str, Any]]


def measure_training(small: bool) -> dict[str, Any]:
    """Train on the source of Python's standard library: 116M parameters for 100 s, and a small model on GPU and CPU.

    On a CPU (`small`) the small model only. Returns losses, which such a device should repeat, and `figures`; `failed`:
    a sentence, if the loss does not fall, or differs from the CPU's.
    """
    config = small_config() if small else large_config()
    rows, timings, seconds = _train(config, None if small else SECONDS)
    losses = [row["loss"] for row in rows]
    heldout = {row["step"]: row["heldout_loss"] for row in rows if "heldout_loss" in row}
    result: dict[str, Any] = {
        "parameters": total_parameters(config.model),
        "tokens_per_step": config.train.batch.tokens,
        "compute_dtype": config.train.compute_dtype,
        "losses": {row["step"]: round(row["loss"], 4) for row in rows if row["step"] % 10 == 0},
        "heldout": heldout,
    }
    timings, tokens = timings[1:], config.train.batch.tokens
    waiting = sum(row["data_wait"] for row in timings) / sum(row["seconds"] for row in timings)
    speed = statistics.median(row["tokens_per_second"] for row in timings)
    result["figures"] = figures = {
        "speed without evaluation": [round(speed), "tokens/s"],
        "speed with evaluation and saves": [round(len(timings) * tokens / seconds), "tokens/s"],
        "waiting for data": [round(100 * waiting, 2), "% of the step"],
        "steps": [len(rows), ""],
    }
    for step in sorted(heldout.keys() & {LARGE_EVERY, 2 * LARGE_EVERY, 5 * LARGE_EVERY, max(heldout, default=0)}):
        figures[f"held-out loss, step {step}"] = [round(heldout[step], 4), "nats/token"]
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    if not first - last >= FALL:
        change = f"The loss went from {first:.2f} to {last:.2f}"
        result["failed"] = f"{change}, but should fall by at least {FALL:g} nats/token."
    if not small:
        runs = _train(small_config(), None), _train(small_config(), None, JAX_PLATFORMS="cpu")
        here, cpu = (rows[-1]["heldout_loss"] for rows, *_ in runs)
        result |= {"small_heldout": here, "small_heldout_on_cpu": cpu}
        figures["held-out loss, less the CPU's"] = [round(here - cpu, 6), "nats/token"]
        if not abs(here - cpu) <= BOUND:
            both = f"{here:.4f} nats/token here, and {cpu:.4f} on the CPU; they may differ by {BOUND:g}"
            result["failed"] = f"A small model in fp32 has a held-out loss of {both}."
    return result


def _train(config: Config, seconds: float | None, **environment: str) -> tuple[Rows, Rows, float]:
    """Train, and stop `seconds` after the first step; returns metrics, timings, and seconds from first to last row."""
    with tempfile.TemporaryDirectory() as folder:
        run, file = Path(folder, "run"), Path(folder, "config.yaml")
        file.write_text(to_yaml(config), encoding="utf-8")
        changes, env = (f"run_dir={run}", f"data.cache_dir={folder}/data"), {**ONE_DEVICE, **environment}
        with training_process(file, *changes, ends=(0, ExitCode.TERMINATED), **env) as process:
            while process.poll() is None and not ((run / METRICS).exists() and (run / METRICS).stat().st_size):
                time.sleep(0.05)
            first = time.time()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            process.terminate()  # it saves, and ends
            process.wait()
        last = (run / METRICS).stat().st_mtime
        return read_rows(run / METRICS), read_rows(run / TIMINGS), last - first
