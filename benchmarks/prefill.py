"""Time the attention layers of a prompt: CCA against grouped-query and full attention of the same width."""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.benchmark_command import run_benchmark
from zaya_jax.config import ModelConfig
from zaya_jax.config.checks import require
from zaya_jax.generate.placement import generation_kernels
from zaya_jax.lab.measure.timing import interleave_subprocesses
from zaya_jax.lab.result import describe_run, rounded
from zaya_jax.model.attention import Context
from zaya_jax.model.layers import rotary_table
from zaya_jax.model.zaya import ATTENTION
from zaya_jax.run.parser import Parser

# The attention of ZAYA1-8B, and attention whose heads are as wide as the residual stream.
CCA = ModelConfig(
    vocab_size=64, hidden_size=2048, num_layers=1, num_query_heads=8, num_kv_heads=2, head_dim=128, num_experts=2,
    expert_size=64, router_size=64, max_positions=131072, attention="cca",
)  # fmt: skip
KINDS = {
    "cca": CCA,
    "gqa": dataclasses.replace(CCA, attention="gqa", num_query_heads=16, num_kv_heads=4),
    "full": dataclasses.replace(CCA, attention="gqa", num_query_heads=16, num_kv_heads=16),
}


def bench_prefill(lengths: Sequence[int], dtype: str, repeats: int) -> dict[str, Any]:
    """Time one attention layer of each kind on a prompt, with its projections; prints a line for each length.

    Args:
      lengths: tokens of a prompt.
      dtype: 'float32' or 'bfloat16'.
      repeats: number of timed passes of each kind.

    Returns:
      For each length: seconds of each pass, bytes of cache per token, and how many times as long the others take.
    """
    heads = {name: f"{config.num_query_heads} query and {config.num_kv_heads} key heads"
             for name, config in KINDS.items()}  # fmt: skip
    result = describe_run(
        "prefill of one attention layer", f"width {CCA.hidden_size:,}, heads of {CCA.head_dim}, {dtype}, one prompt; "
        + "; ".join(f"{name}: {text}" for name, text in heads.items()), "grouped-query and full attention", ("flax",),
    )  # fmt: skip
    result["hardware"]["device"], result["results"] = jax.devices()[0].device_kind, {}
    size = jnp.dtype(dtype).itemsize
    for length in lengths:
        sides = {name: (make_layer, config, length, dtype) for name, config in KINDS.items()}
        passes = interleave_subprocesses(sides, repeats)
        medians = {name: statistics.median(timed.seconds) for name, timed in passes.items()}
        ratios = {name: seconds / medians["cca"] for name, seconds in medians.items()}
        print(f"{length:,} tokens: CCA {1e3 * medians['cca']:,.0f} ms, GQA {1e3 * medians['gqa']:,.0f} ms "
              f"({ratios['gqa']:.2f}×), full attention {1e3 * medians['full']:,.0f} ms ({ratios['full']:.2f}×)",
              flush=True)  # fmt: skip
        result["results"][str(length)] = {
            name: {"seconds": rounded(timed.seconds), "relative_time": round(ratios[name], 3),
                   "cache_bytes_per_token": 2 * KINDS[name].kv_size * size}
            for name, timed in passes.items()
        }  # fmt: skip
    return result


def make_layer(config: ModelConfig, length: int, dtype: str) -> Callable[[], float]:
    """Make a function that applies an attention layer to a prompt, and returns an element of the result."""
    (layer,), segments = config.layer_kinds, jnp.ones((1, length), jnp.int32)
    ops = generation_kernels(config, dtype).ops
    attention = ATTENTION[layer.attention](config, layer, jax.random.key(0))
    attention = jax.tree.map(lambda x: x.astype(dtype), attention)
    hidden = jax.random.normal(jax.random.key(1), (1, length, config.hidden_size)).astype(dtype)
    table = rotary_table(jnp.arange(length)[None], config.rotary_size, layer.rope_base)
    context = Context(segments, segments, {layer.rope_base: table})

    @jax.jit
    def apply(attention: Any, hidden: jax.Array) -> jax.Array:
        return attention(hidden, context, None, ops)[0]

    def step() -> float:
        return float(apply(attention, hidden)[0, -1, 0])

    return step


def main(arguments: Sequence[str]) -> int:
    """Run this benchmark; see `benchmark_command.run_benchmark`."""
    return run_benchmark(_run, arguments, _add, repeats=5)


def _add(parser: Parser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], metavar="TOKENS",
                        help="tokens of a prompt (default: 4096 16384)")  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time the attention of a prompt: CCA against grouped-query and full attention.

    Applies one attention layer of ZAYA1-8B, and others of the same width.

    prefill --lengths 4096
    """
    for length in parsed.lengths:
        require(1 <= length <= CCA.max_positions, "--lengths", length, f"between 1 and {CCA.max_positions}")
    return bench_prefill(parsed.lengths, parsed.dtype, parsed.repeats)
