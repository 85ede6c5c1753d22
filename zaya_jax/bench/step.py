"""Time the forward and backward pass of a training step against `transformers`, interleaved on the same machine."""

import os
import statistics
from collections.abc import Sequence
from typing import Any

import jax

from zaya_jax.bench.peer import peer_step, require_peer
from zaya_jax.config import BatchConfig, Config, DataConfig, ModelConfig, PhaseConfig, TrainConfig
from zaya_jax.machine.result import describe_run, rounded
from zaya_jax.machine.step import describe_throughput, forward_backward, random_tokens, throughput
from zaya_jax.machine.subprocesses import interleave_subprocesses
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token
from zaya_jax.ops.target import current_target


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
