"""A real run: it learns, keeps its data coming, and comes to the same loss as on a CPU."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.figures import Figures
from benchmarks.gpu_report.tiny import ONE_DEVICE, text_folder
from zaya_jax.config import Config, DataConfig, ModelConfig, from_dict, to_dict, to_yaml
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.run.folder import METRICS, TIMINGS
from zaya_jax.run.metrics import read_rows

FALL = 0.5  # nats/token that the loss must fall
BOUND = 0.02  # nats/token by which the held-out loss may differ from the CPU's, in fp32
SECONDS = 100.0  # of the run on a GPU, after its first step
_EVERY = 100  # steps between evaluations of that run


def measure_training(small: bool) -> dict[str, Any]:
    """Train on the source of Python's standard library: 116M parameters for 100 s, and a small model on GPU and CPU.

    Args:
      small: whether this is a CPU, which trains the small model only.

    Returns:
      For JSON: losses of every tenth step and held-out losses, which are what this kind of device should repeat; the
      share of the step that waits for data; and `figures`. `failed`: a sentence, if the loss does not fall, or differs
      from the CPU's.
    """
    config = small_config() if small else large_config()
    rows, timings, seconds = _train(config, None if small else SECONDS)
    losses = [row["loss"] for row in rows]
    heldout = {row["step"]: row["heldout_loss"] for row in rows if "heldout_loss" in row}
    later = timings[1:]
    stepping = sum(row["seconds"] for row in later)
    figures: Figures = {
        "speed without evaluation": [round(statistics.median(row["tokens_per_second"] for row in later)), "tokens/s"],
        "speed with evaluation and saves": [round(len(later) * config.train.batch.tokens / seconds), "tokens/s"],
        "waiting for data": [round(100 * sum(row["data_wait"] for row in later) / stepping, 2), "% of the step"],
        "steps": [len(rows), ""],
        **{f"held-out loss, step {step}": [round(loss, 4), "nats/token"] for step, loss in heldout.items()
           if step in (_EVERY, 2 * _EVERY, 5 * _EVERY, max(heldout))},
    }  # fmt: skip
    result: dict[str, Any] = {
        "parameters": total_parameters(config.model), "tokens_per_step": config.train.batch.tokens,
        "compute_dtype": config.train.compute_dtype,
        "losses": {row["step"]: round(row["loss"], 4) for row in rows if row["step"] % 10 == 0},
        "heldout": heldout,
    }  # fmt: skip
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    if not first - last >= FALL:
        result["failed"] = (f"The loss went from {first:.2f} to {last:.2f}, but should fall by at least {FALL:g} "
                            "nats/token.")  # fmt: skip
    if not small:
        here, cpu = (_train(small_config(), None, environment)[0][-1]["heldout_loss"]
                     for environment in ({}, {"JAX_PLATFORMS": "cpu"}))  # fmt: skip
        result |= {"small_heldout": here, "small_heldout_on_cpu": cpu}
        figures["held-out loss, less the CPU's"] = [round(here - cpu, 6), "nats/token"]
        if not abs(here - cpu) <= BOUND:
            result["failed"] = (f"A small model in fp32 has a held-out loss of {here:.4f} nats/token here, and "
                                f"{cpu:.4f} on the CPU; they may differ by {BOUND:g}.")  # fmt: skip
    return result | {"figures": figures}


def small_config() -> Config:
    """Make a run of 50 steps on one package of the standard library, whose tokenizer takes a second."""
    model = ModelConfig(
        vocab_size=512, hidden_size=64, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=32,
        num_experts=4, expert_size=64, router_size=16, max_positions=64, rope_base=1.0e4,
    )  # fmt: skip
    data = DataConfig(corpus=text_folder(), heldout_fraction=0.2, context=64)
    return _run(model, data, 4, 50, "float32", 25)


def large_config() -> Config:
    """Make a run of 116M parameters in bf16 that is longer than `SECONDS`."""
    model = ModelConfig(
        vocab_size=16384, hidden_size=512, num_layers=8, num_query_heads=8, num_kv_heads=2, head_dim=64,
        num_experts=16, expert_size=512, router_size=128, max_positions=1024, rope_base=1.0e4,
    )  # fmt: skip
    return _run(model, DataConfig(context=1024), 32, 20_000, "bfloat16", _EVERY)


def _run(model: ModelConfig, data: DataConfig, sequences: int, steps: int, dtype: str, every: int) -> Config:
    batch = sequences * data.context
    return from_dict({
        "model": to_dict(model),
        "phases": [{"tokens": steps * batch, "schedule": {"shape": "constant", "warmup_tokens": 5 * batch}}],
        "data": to_dict(data),
        "optimizer": {"muon": {"learning_rate": 0.01}, "adamw": {"learning_rate": 0.006},
                      "balance": {"learning_rate": 0.02}},
        "train": {"batch": {"tokens": batch}, "compute_dtype": dtype, "remat": "dots"},
        "evaluation": {"every": every, "batches": 1, "batch_size": sequences},
        "checkpoint": {"every": 5 * every},
    })  # fmt: skip


def _train(
    config: Config, seconds: float | None, environment: Mapping[str, str] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float]:
    """Train with `zaya_jax.main`, and stop it `seconds` after its first step; None to let it end.

    Returns:
      Rows of `metrics.jsonl` and of `timings.jsonl`, and the seconds from the first row to the last.

    Raises:
      RuntimeError: training failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, file = Path(folder, "run"), Path(folder, "config.yaml")
        file.write_text(to_yaml(config), encoding="utf-8")
        command = [sys.executable, "-m", "zaya_jax.main", "--config", str(file), f"run_dir={run}",
                   f"data.cache_dir={folder}/data"]  # fmt: skip
        with open(Path(folder, "output"), "w+b") as output:
            variables = {**os.environ, **ONE_DEVICE, **(environment or {})}
            process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: S603
            while process.poll() is None and not _size(run / METRICS):
                time.sleep(0.05)
            first = time.time()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # it saves, and ends
            if process.wait() not in (0, 128 + signal.SIGTERM):
                output.seek(0)
                raise RuntimeError(f"Training failed: {output.read()[-500:].decode(errors='replace')}")
        last = (run / METRICS).stat().st_mtime
        return read_rows(run / METRICS), read_rows(run / TIMINGS), last - first


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
