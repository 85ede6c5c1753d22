"""Compare the results of a repeated training step bit by bit, within a process and between processes."""

import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_report.runs import ONE_DEVICE, large_config, small_config
from benchmarks.gpu_report.speed import Figures
from zaya_jax.config import Config
from zaya_jax.config.stages import stages
from zaya_jax.lab.measure.training_steps import digests, place_rows, random_tokens
from zaya_jax.lab.subprocesses import restored_environment, run_in_subprocess
from zaya_jax.ops.target import GPU_PLATFORMS, current_target
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.train.autotuning import Autotuning
from zaya_jax.train.initialization import initialize
from zaya_jax.train.program import Programs

TIMES = 10

# The digests of each tensor of the new state and of the metrics, one for each repetition.
Digests = Mapping[str, Sequence[str]]
# The value of `train.deterministic` of each process, and the folder in which XLA's choices of algorithms are kept: the
# second process resumes with the choices of the first, the third makes its own.
_SIDES = {
    "first": (False, "kept"),
    "resumed": (False, "kept"),
    "chosen again": (False, "other"),
    "deterministic": (True, "none"),
    "deterministic, again": (True, "none"),
}


def measure_determinism(small: bool) -> dict[str, Any]:
    """Repeat the same step ten times in each of several processes, which compile without a cache.

    A CPU (`small`) does not choose algorithms by time: a small model in two processes. Returns which tensors `differ`
    in each process and between them, and `figures`; `failed`: a sentence, if they differ but where XLA chose again.
    """
    config = small_config() if small else large_config()
    results, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder, restored_environment():
        os.environ |= ONE_DEVICE
        for name, (deterministic, kept) in itertools.islice(_SIDES.items(), 2 if small else None):
            Path(folder, kept).mkdir(exist_ok=True)
            changed = replace(config, train=replace(config.train, deterministic=deterministic))
            with run_in_subprocess(functools.partial, repeat_step, changed, f"{folder}/{kept}") as ask:
                results[name], seconds[name] = ask()
    differ = {name: differing([each]) for name, each in results.items()}
    for pair in (("first", "resumed"), ("first", "chosen again"), ("deterministic", "deterministic, again")):
        if pair[1] in results:
            differ["; ".join(pair)] = differing([results[name] for name in pair])
    count = f"of {len(results['first'])}"
    figures: Figures = {f"differing tensors, {name}": [len(names), count] for name, names in differ.items()}
    steps = {name: statistics.median(each) for name, each in seconds.items()}
    figures["step"] = [round(1e3 * steps["first"], 3), "ms"]
    if "deterministic" in steps:
        price = 100 * (steps["deterministic"] / steps["first"] - 1)
        figures["price of train.deterministic"] = [round(price, 2), "% of the step"]
    result = {"times": TIMES, "differ": differ, "step_seconds": seconds, "figures": figures}
    for name, names in differ.items():
        if names and "chosen again" not in name and "failed" not in result:
            tensors = f"{len(names)} tensors of a step differ ({name}), such as {names[0]}"
            result["failed"] = f"{tensors}: a resumed run would not be bitwise the uninterrupted one."
    return result


def differing(processes: Sequence[Digests]) -> list[str]:
    """Return the names of the tensors whose digests are not all equal in one process, or in several together."""
    names = dict.fromkeys(itertools.chain(*processes))
    return [name for name in names if len({digest for each in processes for digest in each.get(name, ["missing"])}) > 1]


def repeat_step(config: Config, folder: str) -> tuple[Digests, list[float]]:
    """Repeat the first step; return digests of all results, and seconds. XLA's choices are kept in `folder`."""
    jax.config.update("jax_enable_compilation_cache", False)  # each process compiles
    chooses = current_target().platform in GPU_PLATFORMS and not config.train.deterministic
    kept = Autotuning(Path(folder), chooses, True, lambda: None, print)
    program, stage = Programs(config, validated_kernels(config))[0], stages(config)[0]
    compiled = program.compile(stage)
    kept.write()
    initial, batch = initialize(program), place_rows(program, stage, random_tokens(config))
    repeated, seconds = {}, []
    for _ in range(TIMES):
        state = jax.block_until_ready(jax.tree.map(jnp.copy, initial))
        start = time.perf_counter()
        results = jax.block_until_ready(compiled(state, batch, {}))
        seconds.append(time.perf_counter() - start)
        for name, digest in digests(results).items():
            repeated.setdefault(name, []).append(digest)
    return repeated, seconds
