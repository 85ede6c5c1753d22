"""The smoke test of a machine: check and time operations, collectives and training, and write a JSON report.

Each part runs in its own process, so that the others still run if it fails or crashes.
"""

import functools
import math
import os
import re
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zaya_jax.config import Config, DataConfig, ModelConfig, from_dict, to_dict
from zaya_jax.config.stages import total_steps
from zaya_jax.errors import InputError
from zaya_jax.machine import context
from zaya_jax.machine.collectives import check_collectives
from zaya_jax.machine.describe import describe_machine
from zaya_jax.machine.result import check_request, describe_run, write_result
from zaya_jax.machine.step import time_step
from zaya_jax.machine.subprocesses import run_in_subprocess
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.ops.registry import check_operations
from zaya_jax.ops.selfcheck import EXAMPLE
from zaya_jax.ops.target import current_target
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import read_rows
from zaya_jax.train.loop import run_training

STEPS = 50
FALL = 0.5  # nats/token that the loss must fall
RESUMED = 0.05  # nats/token by which a resumed run may differ on a GPU, whose sums are not deterministic


class Sizes(NamedTuple):
    """Sizes of the parts."""

    name: str
    run: Config
    dtypes: tuple[str, ...]
    context: context.Sizes | None  # None with one GPU, since simulated devices would say nothing about it
    repeats: int


def smoke(output: str | None) -> dict[str, Any]:
    """Run all parts, print their results, and write them to `output` after each part.

    Args:
      output: JSON file; None for `benchmarks/smoke_DEVICE.json`.

    Returns:
      What was written: results of the `parts` by name, and the names of those that `failed`.
    """
    check_request(1, {"--output": output or str(Path("benchmarks", "smoke.json"))})
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPUs
    plugins = ("jax-rocm7-plugin", "jax-cuda12-plugin", "jax-cuda13-plugin")
    result = describe_run("smoke test", "", "double precision on the host's CPU", (*plugins, "flax", "optax"))
    machine = run_part("machine", describe_machine)
    sizes = sizes_for(machine.get("platform", "cpu"), machine.get("devices", 1))
    path = output or str(Path("benchmarks", f"smoke_{_slug(machine.get('device', 'unknown'))}.json"))
    result |= {"size": sizes.name, "parts": {"machine": machine}}
    for name, work in parts(sizes).items():
        _write(result, path)
        result["parts"][name] = run_part(name, work)
    _write(result, path)
    ended = f"Failed: {', '.join(result['failed'])}." if result["failed"] else "All parts passed."
    print(f"{ended} The results are in {path}; please post that file in an issue.")
    return result


def parts(sizes: Sizes) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the parts after the first, by name; each can be pickled."""
    return {
        "operations": _operations,
        "collectives": check_collectives,
        "training": functools.partial(short_training, sizes.run),
        "step": functools.partial(time_step, sizes.run, sizes.dtypes, sizes.repeats),
        "context": functools.partial(_context, sizes.context, sizes.repeats),
    }


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
    result["failed"] = [name for name, part in result["parts"].items() if "failed" in part]
    write_result(result, path)


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def sizes_for(platform: str, devices: int) -> Sizes:
    """Choose sizes that take minutes on `devices` GPUs, or smaller ones on a CPU."""
    if platform == "cpu":
        print("JAX found no GPU: running everything on the CPU, at a small size.", flush=True)
        model = ModelConfig(
            vocab_size=1024, hidden_size=256, num_layers=4, num_query_heads=4, num_kv_heads=2, head_dim=64,
            num_experts=8, expert_size=128, router_size=64, max_positions=256, rope_base=1.0e4,
        )  # fmt: skip
        # One package of the standard library: its tokenizer takes a second.
        data = DataConfig(corpus=str(Path(sysconfig.get_path("stdlib"), "asyncio")), heldout_fraction=0.2, context=256)
        return Sizes("small", _run(model, data, 4 * devices, "float32"), ("float32",),
                     context.Sizes((512,), "float32", degrees=(1, 4)), 3)  # fmt: skip
    model = ModelConfig(
        vocab_size=16384, hidden_size=512, num_layers=8, num_query_heads=8, num_kv_heads=2, head_dim=64,
        num_experts=16, expert_size=512, router_size=128, max_positions=1024, rope_base=1.0e4,
    )  # fmt: skip
    sequences = devices * max(1, 16 // devices)
    return Sizes("full", _run(model, DataConfig(context=1024), sequences, "bfloat16"), ("float32", "bfloat16"),
                 context.GPU if devices > 1 else None, 7)  # fmt: skip


def _run(model: ModelConfig, data: DataConfig, sequences: int, dtype: str) -> Config:
    """Make a run of `STEPS` steps of `sequences` rows, saved half-way."""
    batch = sequences * data.context
    return from_dict({
        "model": to_dict(model),
        "phases": [{"tokens": STEPS * batch, "schedule": {"shape": "constant", "warmup_tokens": 5 * batch}}],
        "data": to_dict(data),
        "optimizer": {"muon": {"learning_rate": 0.01}, "adamw": {"learning_rate": 0.006},
                      "balance": {"learning_rate": 0.02}},
        "train": {"batch": {"tokens": batch}, "compute_dtype": dtype, "remat": "dots"},
        "evaluation": {"every": STEPS, "batches": 1, "batch_size": sequences},
        "checkpoint": {"every": STEPS // 2},
    })  # fmt: skip


def short_training(config: Config) -> dict[str, Any]:
    """Train in a temporary folder, resume from the first checkpoint in another one, and compare the losses.

    On a CPU the second half must be bitwise the same; a GPU may sum in another order.
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
    failed = check_losses(losses, difference, 0.0 if jax.default_backend() == "cpu" else RESUMED)
    return result | ({"failed": failed} if failed else {})


def check_losses(losses: list[float], difference: float, allowed: float) -> str | None:
    """Return what is wrong with a run, a sentence or None.

    Args:
      losses: loss of each step.
      difference: largest difference of the resumed run's losses.
      allowed: largest difference that is allowed.
    """
    if not all(math.isfinite(loss) for loss in losses):
        return f"The loss of step {[math.isfinite(loss) for loss in losses].index(False) + 1} is not finite."
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    if first - last < FALL:
        return f"The loss went from {first:.2f} to {last:.2f}, but should fall by at least {FALL:g} nats/token."
    if not difference <= allowed:
        return f"The resumed run differs by {difference:.2g} nats/token; at most {allowed:g} is allowed."
    return None


def _context(sizes: context.Sizes | None, repeats: int) -> dict[str, Any]:
    if sizes is None:
        return {"skipped": "Context parallelism needs at least two GPUs, and there is only one."}
    return context.measure_context(sizes, repeats, None)


def _operations() -> dict[str, Any]:
    return check_operations(current_target(), EXAMPLE)
