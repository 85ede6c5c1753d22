"""A training step's forward and backward pass against `transformers`, interleaved on the same machine."""

import dataclasses
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from zaya_jax.bench.peer import peer_step
from zaya_jax.config import BatchConfig, Config, DataConfig, ModelConfig, PhaseConfig, TrainConfig
from zaya_jax.config.stages import stages
from zaya_jax.machine.result import check_request, describe_run, write_result
from zaya_jax.machine.subprocesses import interleave, run_in_subprocess
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.train.state import init_state, layout_of, make_blueprint
from zaya_jax.train.step import make_local_loss


def default_config() -> Config:
    """52.75M parameters, four sequences of 512 tokens."""
    model = ModelConfig(
        vocab_size=16384, hidden_size=384, num_layers=8, num_query_heads=6, num_kv_heads=2, head_dim=64,
        num_experts=12, expert_size=384, router_size=64, max_positions=2048,
    )  # fmt: skip
    train = TrainConfig(batch=BatchConfig(tokens=4 * 512), remat="dots")
    return Config(model, (PhaseConfig(tokens=4 * 512),), data=DataConfig(context=512), train=train)


def bench_step(config: Config, dtypes: Sequence[str], repeats: int, output: str | None) -> dict[str, Any]:
    """Time both sides, print tokens/s and their ratio, and write them to `output` where given.

    Args:
      config: the model, batch, context and rematerialisation of its first step are used.
      dtypes: 'float32', 'bfloat16'.
      repeats: timed passes of each side.
      output: a JSON file.
    """
    check_request(repeats, output)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # three processes share a GPU
    first, threads = stages(config)[0], len(os.sched_getaffinity(0))
    batch, context = first.sequences, first.context
    tokens_bs = np.random.default_rng(0).integers(0, config.model.vocab_size, (batch, context + 1))
    results = describe_run(
        "forward and backward pass", f"{total_parameters(config.model):,} parameters, batch {batch} x {context}",
        "transformers ZayaForCausalLM (sdpa, default experts)",
        ("zaya-jax", "jax", "jaxlib", "flax", "torch", "transformers"),
    )  # fmt: skip
    results["hardware"]["device"] = jax.devices()[0].device_kind
    results["results"] = {}
    flops = training_flops_per_token(config.model, context)
    for dtype in dtypes:
        device = "cpu" if current_target().platform == "cpu" else "cuda"
        with (
            run_in_subprocess(our_step, config, dtype, tokens_bs) as ours,
            run_in_subprocess(peer_step, config.model, dtype, tokens_bs[:, :context], device, threads) as theirs,
        ):
            passes = interleave({"ours": ours, "peer": theirs}, repeats)
        speeds = {name: batch * context / statistics.median(timed.seconds) for name, timed in passes.items()}
        ratio = speeds["ours"] / speeds["peer"]
        print(f"{dtype}: ours {speeds['ours']:,.0f} tokens/s ({speeds['ours'] * flops / 1e12:.3g} TFLOP/s), "
              f"transformers {speeds['peer']:,.0f} tokens/s, ratio {ratio:.2f}", flush=True)  # fmt: skip
        results["results"][dtype] = {
            "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
            "ratio": round(ratio, 3),
            "seconds": {name: [round(second, 4) for second in timed.seconds] for name, timed in passes.items()},
        }
    write_result(results, output)
    return results


def our_step(config: Config, dtype: Any, tokens_bs: np.ndarray) -> Callable[[], float]:
    """A function that does one forward and backward pass, waits for it, and returns the loss."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype=dtype))
    blueprint = make_blueprint(config)
    state = jax.jit(lambda: init_state(config, blueprint))()
    layout = layout_of(config, blueprint, make_mesh(devices=jax.devices()[:1]))  # the peer has one device too
    gradient = jax.jit(layout.gradient(make_local_loss(config, blueprint)))
    tokens, context = tokens_bs.astype(np.int32)[None], tokens_bs.shape[-1] - 1
    batch = jax.device_put({
        "tokens": tokens[..., :-1], "targets": tokens[..., 1:],
        "segment_ids": np.ones_like(tokens[..., 1:]),
        "positions": np.broadcast_to(np.arange(context, dtype=np.int32), tokens[..., 1:].shape),
        "loss_mask": np.ones(tokens[..., 1:].shape, bool),
    })  # fmt: skip

    def step() -> float:
        sums, _ = jax.block_until_ready(gradient(state.params, state.balance, batch))
        return float(sums["loss"] / sums["tokens"])

    return step
