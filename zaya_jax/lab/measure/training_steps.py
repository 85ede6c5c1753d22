"""Time passes and steps of the model on random tokens: the parts that benchmarks share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import Config
from zaya_jax.config.stages import BatchStage, stages
from zaya_jax.hardware.data_sheets import peak_flops
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.predict.compilers.compiled import peak_bytes, program_memory
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.run.digests import digest
from zaya_jax.train.initialization import initialize
from zaya_jax.train.program import PhaseProgram, Programs
from zaya_jax.train.state import TrainState, init_state
from zaya_jax.train.step import make_local_loss


def random_tokens(config: Config, stage: BatchStage | None = None) -> np.ndarray:
    """Draw random tokens [b, s + 1] in the size of a step of `stage`, or of the first step."""
    stage = stage or stages(config)[0]
    return np.random.default_rng(0).integers(0, config.model.vocab_size, (stage.sequences, stage.context + 1))


def make_rows(tokens_bs: np.ndarray) -> dict[str, np.ndarray]:
    """Make a batch from tokens [b, s + 1]: each row is one document, without padding."""
    tokens, targets = (part.astype(np.int32) for part in (tokens_bs[:, :-1], tokens_bs[:, 1:]))
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    ones = {"segment_ids": np.ones_like(tokens), "loss_mask": np.ones(tokens.shape, bool)}
    return {"tokens": tokens, "targets": targets, "positions": positions, **ones}


def forward_backward(config: Config, dtype: Any, tokens_bs: np.ndarray) -> Callable[[], float]:
    """Compile a function that runs one forward and backward pass in `dtype`, and returns the loss."""
    config = replace(config, train=replace(config.train, compute_dtype=dtype))
    program = Programs(config, validated_kernels(config), jax.devices()[:1])[0]
    state = jax.jit(lambda: init_state(program))()
    gradient = jax.jit(program.placement.gradient(make_local_loss(program), program.remat != "full"))
    batch = jax.device_put({name: rows[None] for name, rows in make_rows(tokens_bs).items()})

    def step() -> float:
        sums, _ = jax.block_until_ready(gradient(state.params, state.balance, batch))
        return float(sums["loss"] / sums["tokens"])

    return step


def place_rows(program: PhaseProgram, stage: BatchStage, tokens_bs: np.ndarray) -> dict[str, jax.Array]:
    """Place a batch of `make_rows`, all of the first source, where the training step of `stage` takes it."""
    rows = make_rows(tokens_bs)
    if len(program.config.data.source_names) > 1:
        rows["sources"] = np.zeros(rows["tokens"].shape, np.int16)
    return program.placement.place(rows, program.batch_shape(stage)[0])


def time_train_steps(
    program: PhaseProgram, step: Callable[..., Any], stage: BatchStage, tokens_bs: np.ndarray, repeats: int
) -> tuple[list[float], list[float], TrainState]:
    """Time steps of a new state on tokens [b, s + 1]; returns seconds, losses (warm-up first), and the state."""
    batch = place_rows(program, stage, tokens_bs)
    state, losses = initialize(program), []

    def one_step() -> None:
        nonlocal state
        state, metrics = step(state, batch, {})
        losses.append(float(metrics["loss"]))

    return time_calls(one_step, repeats).seconds, losses, state


def digests(results: Any) -> dict[str, str]:
    """Return by name a digest of each array's local shards."""

    def digest_leaf(leaf: jax.Array) -> str:
        values = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        shards = sorted(values.addressable_shards, key=lambda shard: shard.device.id)
        return digest(b"".join(np.asarray(shard.data).tobytes() for shard in shards))

    return {
        jax.tree_util.keystr(path): digest_leaf(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(results)
    }


def peak_memory(device: Any, program: Any) -> dict[str, Any]:
    """Return the peak memory that `device` reports, or what the compiled `program` needs, and which of the two."""
    counted = (device.memory_stats() or {}).get("peak_bytes_in_use")
    if counted is None:
        return {"peak_bytes": peak_bytes(program_memory(program)), "peak_bytes_by": "the compiled program"}
    return {"peak_bytes": counted, "peak_bytes_by": "the device"}


def throughput(seconds: float, tokens: int, flops: float, kind: str, devices: int = 1) -> dict[str, Any]:
    """Return tokens/s of all devices, and TFLOP/s and MFU (None without a data sheet) of each, from a step of all."""
    peak, flops = peak_flops(kind), flops / devices
    speed = {
        "tokens_per_second": round(tokens / seconds, 1),
        "tflops_per_second": float(f"{flops / seconds / 1e12:.4g}"),
    }
    return speed | {"mfu": None if peak is None else round(flops / seconds / peak, 4)}


def describe_throughput(speed: dict[str, Any]) -> str:
    """Format the result of `throughput`."""
    mfu = "" if speed["mfu"] is None else f", MFU {speed['mfu']:.1%}"
    return f"{speed['tokens_per_second']:,.0f} tokens/s, {speed['tflops_per_second']:.3g} TFLOP/s{mfu}"
