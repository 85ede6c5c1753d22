"""Time the forward and backward pass of a training step against `transformers`, interleaved on the same machine."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.benchmark_command import OVERRIDES, command, start_result, time_sides
from benchmarks.peer import peer_device, peer_step, require_peer
from zaya_jax.config import BatchConfig, Config, DataConfig, ModelConfig, PhaseConfig, TrainConfig, load_config
from zaya_jax.errors import InputError
from zaya_jax.lab.measure.step import describe_throughput, forward_backward, random_tokens, throughput
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token


def default_config() -> Config:
    """Make a configuration with 52.75M parameters, and four sequences of 512 tokens."""
    model = ModelConfig(
        vocab_size=16384, hidden_size=384, num_layers=8, num_query_heads=6, num_kv_heads=2, head_dim=64,
        num_experts=12, expert_size=384, router_size=64, max_positions=2048,
    )  # fmt: skip
    train = TrainConfig(batch=BatchConfig(tokens=4 * 512))  # keeps what the peer keeps
    return Config(model, (PhaseConfig(tokens=4 * 512),), data=DataConfig(context=512), train=train)


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time a training step against transformers in PyTorch.

    Prints tokens/s of both on the same random tokens and the same device.

    step --dtype float32 --repeats 3
    """
    from benchmarks.whole_step import bench_whole_step, default_whole_config

    if parsed.overrides and not parsed.config:
        raise InputError(f"{parsed.overrides[0]} overrides a configuration file, but none is given: add --config FILE.")
    config = load_config(parsed.config, parsed.overrides) if parsed.config else None
    if not parsed.whole:
        dtypes = [parsed.dtype] if parsed.dtype in {"float32", "bfloat16"} else ["float32", "bfloat16"]
        return bench_step(config or default_config(), dtypes, parsed.repeats)
    if parsed.dtype:
        raise InputError("--dtype cannot be combined with --whole. Use --config FILE train.compute_dtype=bfloat16.")
    return bench_whole_step(config or default_whole_config(), parsed.repeats, parsed.output)


def bench_step(config: Config, dtypes: Sequence[str], repeats: int) -> dict[str, Any]:
    """Time both sides with model, batch, context and remat of the first step of `config`.

    Raises:
      InputError: PyTorch or `transformers` cannot be imported.
    """
    require_peer()
    tokens_bs, threads = random_tokens(config), len(os.sched_getaffinity(0))
    batch, context = tokens_bs[:, 1:].shape
    tokens = batch * context
    flops = tokens * training_flops_per_token(config.model, context)
    size = f"{total_parameters(config.model):,} parameters, batch {batch} x {context}"
    peer = "transformers ZayaForCausalLM (sdpa, default experts)"
    result = start_result("forward and backward pass", size, peer, ("flax", "torch", "transformers"))
    for dtype in dtypes:
        theirs = (config.model, dtype, tokens_bs[:, :context], peer_device(), threads)
        sides = {"ours": (forward_backward, config, dtype, tokens_bs), "peer": (peer_step, *theirs)}
        seconds, medians = time_sides(sides, repeats)
        kind = result["hardware"]["device"]
        ours, other = (throughput(median, tokens, flops, kind) for median in medians.values())
        speeds = {"ours": ours["tokens_per_second"], "peer": other["tokens_per_second"]}
        ratio = speeds["ours"] / speeds["peer"]
        text = f"transformers {speeds['peer']:,.0f} tokens/s; zaya_jax is {ratio:.2f}× as fast"
        print(f"{dtype}: zaya_jax {describe_throughput(ours)}, {text}", flush=True)
        result["results"][dtype] = {"tokens_per_second": speeds, "ratio": round(ratio, 3), "seconds": seconds}
    return result


WHOLE = (
    "time the whole step, with micro-batches, clipping, optimizer and balancing, and report the optimizer's share "
    "(default: forward and backward pass only)"
)
DTYPE = "dtype of the forward and backward pass (default: both); --whole uses train.compute_dtype instead"
CONFIG = (
    "configuration to take model, batch and context from, such as configs/bench_8b.yaml on a GPU with 141 GB "
    "(default: 52.75M parameters)"
)
FLAGS = {
    "--whole": {"action": "store_true", "help": WHOLE},
    "--dtype": {"choices": ("float32", "bfloat16", "both"), "help": DTYPE},
    "--config": {"metavar": "FILE", "help": CONFIG},
    "overrides": {**OVERRIDES, "help": "configuration value to override, such as model.num_layers=4"},
}
main = command(run, FLAGS, repeats=7)
