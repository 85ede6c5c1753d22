"""Time greedy decoding against `generate` of `transformers`, interleaved on the same machine."""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.benchmark_command import run_benchmark
from benchmarks.peer import peer_decode, require_peer
from benchmarks.step import default_config
from zaya_jax.config import ModelConfig
from zaya_jax.config.checks import require
from zaya_jax.generate.decode import generate_tokens
from zaya_jax.lab.measure.timing import interleave_subprocesses, time_calls
from zaya_jax.lab.result import describe_run, rounded
from zaya_jax.lab.subprocesses import run_in_subprocess
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.model.tree import map_variables
from zaya_jax.model.zaya import Zaya, unrolled
from zaya_jax.ops.target import current_target
from zaya_jax.run.parser import Parser

PROMPT, NEW = 512, 128  # tokens


def bench_decode(batches: Sequence[int], dtype: str, repeats: int) -> dict[str, Any]:
    """Time `NEW` tokens after prompts of `PROMPT` tokens; prints a line for each batch size.

    Args:
      batches: numbers of prompts.
      dtype: 'float32' or 'bfloat16', of both sides.
      repeats: number of timed passes of each side.

    Returns:
      For each batch size: seconds of each pass, seconds of a pass of one new token (time to the first token), our
      compilation, and the relative speed.

    Raises:
      InputError: PyTorch or `transformers` cannot be imported.
    """
    require_peer()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    config, threads = default_config().model, len(os.sched_getaffinity(0))
    device = "cpu" if current_target().platform == "cpu" else "cuda"
    result = describe_run(
        "greedy decoding", f"{total_parameters(config):,} parameters, {dtype}, {PROMPT} tokens of prompt, {NEW} new",
        "transformers ZayaForCausalLM.generate (sdpa, default experts)", ("flax", "torch", "transformers"),
    )  # fmt: skip
    result["hardware"]["device"], result["results"] = jax.devices()[0].device_kind, {}
    for batch in batches:
        prompts = np.random.default_rng(0).integers(0, config.vocab_size, (batch, PROMPT))
        rows = {}
        for new in (1, NEW):
            sides = {
                "ours": (our_decode, config, dtype, prompts, new),
                "peer": (peer_decode, config, dtype, prompts, new, device, threads),
            }
            passes = interleave_subprocesses(sides, repeats)
            rows[new] = {side: rounded(timed.seconds) for side, timed in passes.items()}
        with run_in_subprocess(compile_seconds, config, dtype, prompts) as ask:
            compilation = ask()
        medians = {
            new: {side: statistics.median(seconds) for side, seconds in row.items()} for new, row in rows.items()
        }
        speeds = {side: batch * NEW / medians[NEW][side] for side in ("ours", "peer")}
        ratio = speeds["ours"] / speeds["peer"]
        first = {side: round(1e3 * seconds) for side, seconds in medians[1].items()}
        print(f"batch {batch}: zaya_jax {speeds['ours']:,.0f} new tokens/s, transformers {speeds['peer']:,.0f}; "
              f"zaya_jax is {ratio:.2f}× as fast; first token after {first['ours']} and {first['peer']} ms; "
              f"our compilation {compilation:.1f} s", flush=True)  # fmt: skip
        result["results"][str(batch)] = {
            "tokens_per_second": {side: round(speed, 1) for side, speed in speeds.items()}, "ratio": round(ratio, 3),
            "seconds": rows[NEW], "first_token_seconds": rows[1], "compile_seconds": round(compilation, 1),
        }  # fmt: skip
    return result


def our_decode(config: ModelConfig, dtype: str, prompts: np.ndarray, new: int) -> Callable[[], int]:
    """Make a function that generates, and returns the last token; the model is `unrolled`, as one that is opened."""
    model = unrolled(jax.jit(lambda: map_variables(Zaya(config, jax.random.key(0)), lambda _, x: x.astype(dtype)))())

    def step() -> int:
        return generate_tokens(model, prompts, new)[-1].tokens[-1]

    return step


def compile_seconds(config: ModelConfig, dtype: str, prompts: np.ndarray) -> Callable[[], float]:
    """Make a function that returns the time of the first call less that of the second."""
    step = our_decode(config, dtype, prompts, NEW)

    def seconds() -> float:
        first, second = time_calls(step, 2, warm_up=0).seconds
        return first - second

    return seconds


def main(arguments: Sequence[str]) -> int:
    """Run this benchmark; see `benchmark_command.run_benchmark`."""
    return run_benchmark(_run, arguments, _add, repeats=5)


def _add(parser: Parser) -> None:
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="N",
                        help="numbers of prompts (default: 1 8)")  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time greedy decoding against generate of transformers in PyTorch.

    Generates 128 tokens after prompts of 512 with a model of 52.75M parameters; prints new tokens/s of both, the time
    to the first token, and our compilation.

    decode --batch 1 8 --output decode.json
    """
    require(min(parsed.batch) >= 1, "--batch", min(parsed.batch), "at least 1")
    return bench_decode(parsed.batch, parsed.dtype, parsed.repeats)
