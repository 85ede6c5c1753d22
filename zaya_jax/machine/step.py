"""Time a forward and backward pass of the model on this machine's first device."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from zaya_jax.config import Config
from zaya_jax.config.stages import stages
from zaya_jax.hardware.data_sheets import peak_flops
from zaya_jax.machine.result import rounded
from zaya_jax.machine.subprocesses import interleave, run_in_subprocess
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token
from zaya_jax.train.kernels import validated_kernels
from zaya_jax.train.program import Programs
from zaya_jax.train.state import init_state
from zaya_jax.train.step import make_local_loss


def random_tokens(config: Config) -> np.ndarray:
    """Draw random tokens [b, s + 1] in the size of the first step."""
    first = stages(config)[0]
    return np.random.default_rng(0).integers(0, config.model.vocab_size, (first.sequences, first.context + 1))


def make_rows(tokens_bs: np.ndarray) -> dict[str, np.ndarray]:
    """Make a batch from tokens [b, s + 1]: each row is one document, without padding."""
    tokens, targets = (part.astype(np.int32) for part in (tokens_bs[:, :-1], tokens_bs[:, 1:]))
    return {
        "tokens": tokens, "targets": targets, "segment_ids": np.ones_like(tokens),
        "positions": np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape),
        "loss_mask": np.ones(tokens.shape, bool),
    }  # fmt: skip


def forward_backward(config: Config, dtype: Any, tokens_bs: np.ndarray) -> Callable[[], float]:
    """Compile a function that runs one forward and backward pass in `dtype`, and returns the loss."""
    config = replace(config, train=replace(config.train, compute_dtype=dtype))
    program = Programs(config, validated_kernels(config), jax.devices()[:1])[0]
    state = jax.jit(lambda: init_state(program))()
    gradient = jax.jit(program.placement.gradient(make_local_loss(program)))
    batch = jax.device_put({name: rows[None] for name, rows in make_rows(tokens_bs).items()})

    def step() -> float:
        sums, _ = jax.block_until_ready(gradient(state.params, state.balance, batch))
        return float(sums["loss"] / sums["tokens"])

    return step


def throughput(seconds: float, tokens: int, flops: float, kind: str) -> dict[str, Any]:
    """Return tokens/s, TFLOP/s and MFU (None without a data sheet) of a step of `tokens` and `flops` on a `kind`."""
    peak = peak_flops(kind)
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "tflops_per_second": float(f"{flops / seconds / 1e12:.4g}"),
        "mfu": None if peak is None else round(flops / seconds / peak, 4),
    }


def describe_throughput(speed: dict[str, Any]) -> str:
    """Format the result of `throughput`."""
    mfu = "" if speed["mfu"] is None else f", MFU {speed['mfu']:.1%}"
    return f"{speed['tokens_per_second']:,.0f} tokens/s, {speed['tflops_per_second']:.3g} TFLOP/s{mfu}"


def time_step(config: Config, dtypes: tuple[str, ...], repeats: int) -> dict[str, Any]:
    """Time a forward and backward pass of the first step in each dtype; prints and returns the speeds."""
    tokens_bs, kind = random_tokens(config), jax.devices()[0].device_kind
    tokens = tokens_bs[:, 1:].size
    flops = tokens * training_flops_per_token(config.model, tokens_bs.shape[1] - 1)
    result: dict[str, Any] = {"parameters": total_parameters(config.model), "tokens": tokens, "results": {}}
    for dtype in dtypes:
        with run_in_subprocess(forward_backward, config, dtype, tokens_bs) as step:
            seconds = interleave({"step": step}, repeats)["step"].seconds
        speed = throughput(statistics.median(seconds), tokens, flops, kind)
        print(f"   {dtype}: {describe_throughput(speed)}", flush=True)
        result["results"][dtype] = {**speed, "seconds": rounded(seconds)}
    return result
