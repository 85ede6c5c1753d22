"""Time greedy decoding against `generate` of `transformers`, interleaved on the same machine."""

import argparse
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.benchmark_command import DTYPE, command, flag, start_result, time_sides
from benchmarks.peer import peer_decode, peer_device, require_peer
from benchmarks.step import default_config
from zaya_jax.config import ModelConfig
from zaya_jax.config.checks import require
from zaya_jax.generate.decode import continuations
from zaya_jax.generate.engine import Engine
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.subprocesses import run_in_subprocess
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.model.tree import map_variables
from zaya_jax.model.zaya import Zaya, unrolled

PROMPT, NEW = 512, 128  # tokens


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time greedy decoding against generate of transformers in PyTorch.

    Generates 128 tokens after prompts of 512 with a model of 52.75M parameters; prints new tokens/s of both, the time
    to the first token, and our compilation.

    decode --batch 1 8 --output decode.json
    """
    require(min(parsed.batch) >= 1, "--batch", min(parsed.batch), "at least 1")
    require_peer()
    config, dtype, threads = default_config().model, parsed.dtype, len(os.sched_getaffinity(0))
    size = f"{total_parameters(config):,} parameters, {dtype}, {PROMPT} tokens of prompt, {NEW} new"
    peer = "transformers ZayaForCausalLM.generate (sdpa, default experts)"
    result = start_result("greedy decoding", size, peer, ("flax", "torch", "transformers"))
    for batch in parsed.batch:
        prompts, seconds, medians = np.random.default_rng(0).integers(0, config.vocab_size, (batch, PROMPT)), {}, {}
        for new in (1, NEW):
            work = config, dtype, prompts, new
            sides = {"ours": (our_decode, *work), "peer": (peer_decode, *work, peer_device(), threads)}
            seconds[new], medians[new] = time_sides(sides, parsed.repeats)
        with run_in_subprocess(our_decode, config, dtype, prompts, NEW) as step:
            first_call, second = time_calls(step, 2, warm_up=0).seconds
        compilation = first_call - second
        speeds = {side: batch * NEW / median for side, median in medians[NEW].items()}
        ratio = speeds["ours"] / speeds["peer"]
        first = {side: round(1e3 * median) for side, median in medians[1].items()}
        speed = f"zaya_jax {speeds['ours']:,.0f} new tokens/s, transformers {speeds['peer']:,.0f}"
        times = f"first token after {first['ours']} and {first['peer']} ms; our compilation {compilation:.1f} s"
        print(f"batch {batch}: {speed}; zaya_jax is {ratio:.2f}× as fast; {times}", flush=True)
        row = {"tokens_per_second": {side: round(speed, 1) for side, speed in speeds.items()}, "ratio": round(ratio, 3)}
        row |= {"seconds": seconds[NEW], "first_token_seconds": seconds[1], "compile_seconds": round(compilation, 1)}
        result["results"][str(batch)] = row
    return result


def our_decode(config: ModelConfig, dtype: str, prompts: np.ndarray, new: int) -> Callable[[], int]:
    """Make a function that generates with an engine, and returns the last token."""
    model = unrolled(jax.jit(lambda: map_variables(Zaya(config, jax.random.key(0)), lambda _, x: x.astype(dtype)))())
    engine = Engine(model, slots=len(prompts), length=prompts.shape[1] + new)

    def step() -> int:
        *_, rows = continuations(engine, prompts.tolist(), new)
        return rows[-1].tokens[-1]

    return step


main = command(run, {"--batch": flag([1, 8], "N", "numbers of prompts")} | DTYPE, repeats=5)
