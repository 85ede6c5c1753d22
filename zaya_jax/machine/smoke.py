"""The smoke test of a machine: check and time operations, kernels, collectives and training, and write a JSON report.

Each part runs in its own process, so that the others still run if it fails or crashes.
"""

import functools
import math
import re
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_jax.config import Config, DataConfig, ModelConfig, from_dict, to_dict
from zaya_jax.config.stages import total_steps
from zaya_jax.errors import InputError
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset
from zaya_jax.machine import comparison, context
from zaya_jax.machine.collectives.timing import check_collectives
from zaya_jax.machine.describe import describe_machine
from zaya_jax.machine.report.tables import comparison_table
from zaya_jax.machine.result import check_request, describe_run, table_lines, write_result
from zaya_jax.machine.subprocesses import restored_environment, run_in_subprocess
from zaya_jax.machine.train_step import Layout, time_train_step
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.ops.registry import OPERATIONS, check_operations
from zaya_jax.ops.selfcheck import EXAMPLE
from zaya_jax.ops.target import current_target
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import read_rows
from zaya_jax.train.loop import run_training

STEPS = 50
FALL = 0.5  # nats/token that the loss must fall


# Times cases of kernels: their names (empty for all), repetitions, output file → result.
TimeKernels = Callable[[Sequence[str], int, str | None], dict[str, Any]]


def smoke(output: str | None, time_kernels: TimeKernels) -> dict[str, Any]:
    """Run all parts with the machine's preset, print their results, and write them to `output` after each part.

    Args:
      output: JSON file; None for `benchmarks/smoke_DEVICE.json`.
      time_kernels: `bench.kernels.bench_kernels`.

    Returns:
      What was written: results of the `parts` by name, the names of those that `failed`, and the `comparison` of
      predictions with measurements (`comparison.Row`).
    """
    check_request(1, {"--output": output or str(Path("benchmarks", "smoke.json"))})
    plugins = ("jax-rocm7-plugin", "jax-cuda12-plugin", "jax-cuda13-plugin")
    result = describe_run("smoke test", "", "double precision on the host's CPU", (*plugins, "flax", "optax"))
    with restored_environment():
        apply_preset(select_preset(None))  # like zaya_jax.main
        machine = run_part("machine", describe_machine)
        platform, slug = machine.get("platform", "cpu"), machine.get("device", "unknown").lower()
        path = output or str(Path("benchmarks", f"smoke_{re.sub(r'[^a-z0-9]+', '_', slug).strip('_')}.json"))
        result |= {"size": "small" if platform == "cpu" else "full", "parts": {"machine": machine}}
        _write(result, path)
        if platform == "cpu":
            print("JAX found no GPU: running every part on the CPU, at a small size.", flush=True)
        for name, work in parts(platform, machine.get("devices", 1), time_kernels).items():
            result["parts"][name] = run_part(name, work)
            _write(result, path)
    print("\n".join(["", *summary(result["parts"]), *table_lines(comparison_table(result["comparison"]))]))
    print(f"The results are in {path}; please post that file in an issue.")
    return result


def parts(platform: str, devices: int, time_kernels: TimeKernels) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the parts after the first, by name; each can be pickled.

    They take minutes on `devices` GPUs, or one or two on as many simulated CPU devices.
    """
    if platform == "cpu":
        model = ModelConfig(
            vocab_size=512, hidden_size=64, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=32,
            num_experts=4, expert_size=64, router_size=16, max_positions=64, rope_base=1.0e4,
        )  # fmt: skip
        # One package of the standard library: its tokenizer takes a second.
        data = DataConfig(corpus=str(Path(sysconfig.get_path("stdlib"), "asyncio")), heldout_fraction=0.2, context=64)
        run, step = (_run(model, data, sequences, "float32", 2) for sequences in (4 * devices, 4))
        operations, dtypes, cases, repeats = ("residual_norm", "momentum"), ("float32",), ("momentum",), 2
        attention = context.Sizes((512,), "float32", degrees=(1, 4))
    else:
        model = ModelConfig(
            vocab_size=16384, hidden_size=512, num_layers=8, num_query_heads=8, num_kv_heads=2, head_dim=64,
            num_experts=16, expert_size=512, router_size=128, max_positions=1024, rope_base=1.0e4,
        )  # fmt: skip
        run, step = _run(model, DataConfig(context=1024), devices * max(1, 16 // devices), "bfloat16"), None
        operations, dtypes, cases, repeats = tuple(OPERATIONS), ("float32", "bfloat16"), (), 5
        attention = context.GPU
    layouts: tuple[Layout, ...] = ("data", "fsdp") if devices > 1 else ("data",)
    # With one GPU, simulated devices would say nothing about it.
    alone = "Context parallelism needs at least two GPUs, and there is only one."
    return {
        "operations": functools.partial(_operations, dtypes, operations),
        "kernels": functools.partial(_kernels, time_kernels, cases, repeats),
        "collectives": check_collectives,
        "training": functools.partial(short_training, run),
        **{f"train step, {layout}": functools.partial(time_train_step, step, layout, repeats) for layout in layouts},
        "context": functools.partial(dict, skipped=alone) if platform != "cpu" and devices == 1
        else functools.partial(context.measure_context, attention, repeats),
    }  # fmt: skip


def summary(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return which parts passed, were skipped, and failed, as lines of text."""
    by_end: dict[str, list[str]] = {"Passed": [], "Skipped": [], "Failed": []}
    for name, part in results.items():
        by_end["Failed" if "failed" in part else "Skipped" if "skipped" in part else "Passed"].append(name)
    return [f"{end}: {'; '.join(names)}" for end, names in by_end.items() if names]


def run_part(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` in its own process; returns its result with `seconds`, and `failed`, a sentence, if it failed."""
    print(f"== {name}", flush=True)
    start = time.monotonic()
    try:
        with run_in_subprocess(functools.partial, work) as step:
            result: dict[str, Any] = step()
    except (InputError, RuntimeError) as error:
        result = {"failed": str(error)}
    result["seconds"] = round(time.monotonic() - start, 1)
    print(f"   {result.get('failed') or result.get('skipped') or 'passed'} ({result['seconds']} s)", flush=True)
    return result


def _write(result: dict[str, Any], path: str) -> None:
    """Write what there is so far."""
    try:
        rows = comparison.compare(result["parts"])
    except Exception as error:  # what was measured is written even if it cannot be compared
        print(f"The results cannot be compared with predictions ({type(error).__name__}: {error}).")
        rows = []
    result["failed"] = [name for name, part in result["parts"].items() if "failed" in part]
    result["comparison"] = comparison.as_json(rows)
    write_result(result, path)


def _run(model: ModelConfig, data: DataConfig, sequences: int, dtype: str, micro_batch: int | None = None) -> Config:
    """Make a run of `STEPS` steps of `sequences` rows, saved half-way."""
    batch = sequences * data.context
    return from_dict({
        "model": to_dict(model),
        "phases": [{"tokens": STEPS * batch, "schedule": {"shape": "constant", "warmup_tokens": 5 * batch}}],
        "data": to_dict(data),
        "optimizer": {"muon": {"learning_rate": 0.01}, "adamw": {"learning_rate": 0.006},
                      "balance": {"learning_rate": 0.02}},
        "train": {"batch": {"tokens": batch, "micro_batch": micro_batch}, "compute_dtype": dtype, "remat": "dots"},
        "evaluation": {"every": STEPS, "batches": 1, "batch_size": sequences},
        "checkpoint": {"every": STEPS // 2},
    })  # fmt: skip


def short_training(config: Config) -> dict[str, Any]:
    """Train in a temporary folder, resume from the first checkpoint in another one, and compare the losses.

    The second half must be bitwise the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted, resumed = Path(folder, "uninterrupted"), Path(folder, "resumed")
        data = replace(config.data, cache_dir=str(Path(folder, "data")))
        config = replace(config, run_dir=str(uninterrupted), data=data)
        start = time.monotonic()
        outcome = run_training(config)
        seconds = time.monotonic() - start
        shutil.copytree(uninterrupted, resumed)
        shutil.rmtree(resumed / CHECKPOINTS / str(total_steps(config)))
        run_training(replace(config, run_dir=str(resumed)))
        losses, resumed_losses = ([row["loss"] for row in read_rows(run / METRICS)] for run in (uninterrupted, resumed))
    difference = max(abs(loss - other) for loss, other in zip(losses, resumed_losses, strict=True))
    result: dict[str, Any] = {
        "parameters": total_parameters(config.model),
        "tokens_per_step": config.train.batch.tokens,
        "compute_dtype": config.train.compute_dtype,
        "train_seconds": round(seconds, 1),
        "losses": [round(loss, 4) for loss in losses],
        "heldout": round(outcome.heldout.nats_per_token, 4),
        "resumed_bitwise": resumed_losses == losses,
        "resumed_difference": difference,
    }
    failed = check_losses(losses, difference)
    return result | ({"failed": failed} if failed else {})


def check_losses(losses: list[float], difference: float) -> str | None:
    """Return what is wrong with a run, a sentence or None.

    Args:
      losses: loss of each step.
      difference: largest difference of the resumed run's losses.
    """
    if not all(math.isfinite(loss) for loss in losses):
        return f"The loss of step {[math.isfinite(loss) for loss in losses].index(False) + 1} is not finite."
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    if first - last < FALL:
        return f"The loss went from {first:.2f} to {last:.2f}, but should fall by at least {FALL:g} nats/token."
    if difference != 0:  # or is no number
        return f"The resumed run is not bitwise the uninterrupted one: losses differ by {difference:.2g} nats/token."
    return None


def _operations(dtypes: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    return check_operations(current_target(), EXAMPLE, dtypes, names)


def _kernels(time_kernels: TimeKernels, cases: Sequence[str], repeats: int) -> dict[str, Any]:
    result = time_kernels(cases, repeats, None)
    return {key: result[key] for key in ("emulated", "rooflines", "results", "failed") if key in result}
