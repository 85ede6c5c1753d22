"""A training step's forward and backward pass against `transformers`, interleaved on the same machine."""

import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax.bench.aside import aside
from zaya_jax.bench.peer import peer_step
from zaya_jax.checkpoint.store import cpu_name
from zaya_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from zaya_jax.errors import InputError
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.gradient import summed_gradient
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.train.state import init_state, make_blueprint
from zaya_jax.train.step import make_local_loss

SETTLE = 0.5  # seconds before a timed pass, in which the other side's idle threads stop waiting on the cores


def default_config() -> Config:
    """52.75M parameters, four sequences of 512 tokens."""
    model = ModelConfig(
        vocab_size=16384, hidden_size=384, num_layers=8, num_query_heads=6, num_kv_heads=2, head_dim=64,
        num_experts=12, expert_size=384, router_size=64, max_positions=2048,
    )  # fmt: skip
    return Config(model, data=DataConfig(context=512), train=TrainConfig(steps=1, global_batch=4, remat="dots"))


def bench_step(config: Config, dtypes: Sequence[str], repeats: int, output: str | None) -> dict[str, Any]:
    """Time both sides, print tokens/s and their ratio, and write them to `output` where given.

    Args:
      config: its model, `train.global_batch`, `train.remat` and `data.context` are used.
      dtypes: 'float32', 'bfloat16'.
      repeats: timed passes of each side.
      output: a JSON file.
    """
    if repeats < 1:
        raise InputError(f"--repeats is {repeats}, but must be at least 1.")
    if output and (Path(output).is_dir() or not Path(output).resolve().parent.is_dir()):
        raise InputError(f"--output is {output!r}, but must be a file in a folder that exists.")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # three processes share a GPU
    batch, context, threads = config.train.global_batch, config.data.context, len(os.sched_getaffinity(0))
    tokens_bs = np.random.default_rng(0).integers(0, config.model.vocab_size, (batch, context + 1))
    results: dict[str, Any] = {
        "benchmark": "forward and backward pass",
        "size": f"{total_parameters(config.model):,} parameters, batch {batch} x {context}",
        "command": " ".join(["python -m zaya_jax.bench", *sys.argv[1:]]),
        "peer": "transformers ZayaForCausalLM (sdpa, default experts)",
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in ("zaya-jax", "jax", "jaxlib", "flax", "torch", "transformers")},
        "hardware": {"machine": platform.machine(), "cpu": cpu_name(), "cpus": threads,
                     "device": jax.devices()[0].device_kind},
        "results": {},
    }  # fmt: skip
    flops = training_flops_per_token(config.model, context)
    for dtype in dtypes:
        device = "cpu" if current_target().platform == "cpu" else "cuda"
        with (
            aside(our_step, config, dtype, tokens_bs) as ours,
            aside(peer_step, config.model, dtype, tokens_bs[:, :context], device, threads) as theirs,
        ):
            times = interleave({"ours": ours, "peer": theirs}, repeats)
        speeds = {name: batch * context / statistics.median(seconds) for name, seconds in times.items()}
        ratio = speeds["ours"] / speeds["peer"]
        print(f"{dtype}: ours {speeds['ours']:,.0f} tokens/s ({speeds['ours'] * flops / 1e12:.3g} TFLOP/s), "
              f"transformers {speeds['peer']:,.0f} tokens/s, ratio {ratio:.2f}", flush=True)  # fmt: skip
        results["results"][dtype] = {
            "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
            "ratio": round(ratio, 3),
            "seconds": {name: [round(second, 4) for second in seconds] for name, seconds in times.items()},
        }
    if output:
        Path(output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


def our_step(config: Config, dtype: Any, tokens_bs: np.ndarray) -> Callable[[], float]:
    """A function that does one forward and backward pass, waits for it, and returns the loss."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype=dtype))
    blueprint, mesh = make_blueprint(config), make_mesh(jax.devices()[:1])  # the peer has one device too
    state = jax.jit(lambda: init_state(config, blueprint))()
    gradient = jax.jit(summed_gradient(make_local_loss(config, blueprint), mesh))
    tokens = tokens_bs.astype(np.int32)[None]
    batch = jax.device_put({
        "tokens": tokens[..., :-1], "targets": tokens[..., 1:],
        "segment_ids": np.ones_like(tokens[..., 1:]), "loss_mask": np.ones(tokens[..., 1:].shape, bool),
    })  # fmt: skip

    def step() -> float:
        sums, _ = jax.block_until_ready(gradient(state.params, state.balance, batch))
        return float(sums["loss"] / sums["tokens"])

    return step


def interleave(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, one after the other in turn, after one pass of each to warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            time.sleep(SETTLE)
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return times


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
