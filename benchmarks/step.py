"""Time the forward and backward pass of a training step against `transformers`, interleaved on the same machine."""

import argparse
import os
import statistics
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.benchmark_command import run_benchmark
from benchmarks.peer import peer_step, require_peer
from zaya_jax.config import BatchConfig, Config, DataConfig, ModelConfig, PhaseConfig, TrainConfig, load_config
from zaya_jax.errors import InputError
from zaya_jax.lab.measure.timing import interleave_subprocesses
from zaya_jax.lab.measure.training_steps import describe_throughput, forward_backward, random_tokens, throughput
from zaya_jax.lab.result import describe_run, rounded
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token
from zaya_jax.ops.target import current_target
from zaya_jax.run.parser import Parser


def default_config() -> Config:
    """Make a configuration with 52.75M parameters, and four sequences of 512 tokens."""
    model = ModelConfig(
        vocab_size=16384, hidden_size=384, num_layers=8, num_query_heads=6, num_kv_heads=2, head_dim=64,
        num_experts=12, expert_size=384, router_size=64, max_positions=2048,
    )  # fmt: skip
    train = TrainConfig(batch=BatchConfig(tokens=4 * 512))  # keeps what the peer keeps
    return Config(model, (PhaseConfig(tokens=4 * 512),), data=DataConfig(context=512), train=train)


def bench_step(config: Config, dtypes: Sequence[str], repeats: int) -> dict[str, Any]:
    """Time both sides, and print tokens/s of each and the relative speed.

    Args:
      config: model, batch, context and remat are those of its first step.
      dtypes: 'float32', 'bfloat16'.
      repeats: number of timed passes of each side.

    Raises:
      InputError: PyTorch or `transformers` cannot be imported.
    """
    require_peer()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # three processes share a GPU
    tokens_bs, threads, kind = random_tokens(config), len(os.sched_getaffinity(0)), jax.devices()[0].device_kind
    device = "cpu" if current_target().platform == "cpu" else "cuda"
    batch, context = tokens_bs[:, 1:].shape
    tokens = batch * context
    flops = tokens * training_flops_per_token(config.model, context)
    result = describe_run(
        "forward and backward pass", f"{total_parameters(config.model):,} parameters, batch {batch} x {context}",
        "transformers ZayaForCausalLM (sdpa, default experts)", ("flax", "torch", "transformers"),
    )  # fmt: skip
    result["hardware"]["device"], result["results"] = kind, {}
    for dtype in dtypes:
        sides = {
            "ours": (forward_backward, config, dtype, tokens_bs),
            "peer": (peer_step, config.model, dtype, tokens_bs[:, :context], device, threads),
        }
        passes = interleave_subprocesses(sides, repeats)
        speeds = {name: throughput(statistics.median(timed.seconds), tokens, flops, kind)
                  for name, timed in passes.items()}  # fmt: skip
        ratio = speeds["ours"]["tokens_per_second"] / speeds["peer"]["tokens_per_second"]
        print(f"{dtype}: zaya_jax {describe_throughput(speeds['ours'])}, transformers "
              f"{speeds['peer']['tokens_per_second']:,.0f} tokens/s; zaya_jax is {ratio:.2f}× as fast", flush=True
              )  # fmt: skip
        result["results"][dtype] = {
            "tokens_per_second": {name: speed["tokens_per_second"] for name, speed in speeds.items()},
            "ratio": round(ratio, 3),
            "seconds": {name: rounded(timed.seconds) for name, timed in passes.items()},
        }
    return result


def main(arguments: Sequence[str]) -> int:
    """Run this benchmark; see `benchmark_command.run_benchmark`."""
    return run_benchmark(_run, arguments, _add, repeats=7)


def _add(parser: Parser) -> None:
    parser.add_argument("--whole", action="store_true",
                        help="time the whole step, with micro-batches, clipping, optimizer and balancing, and report "
                        "the optimizer's share (default: forward and backward pass only)")  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "both"), help="dtype of the forward and backward "
                        "pass (default: both); --whole uses train.compute_dtype instead")  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="configuration to take model, batch and context from, such "
                        "as configs/bench_8b.yaml on a GPU with 141 GB (default: 52.75M parameters)")  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="configuration value to override, such as model.num_layers=4")  # fmt: skip


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
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
