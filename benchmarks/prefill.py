"""Time the attention layers of a prompt: CCA against grouped-query and full attention of the same width."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.benchmark_command import DTYPE, command, flag, start_result, time_sides
from zaya_jax.config import ModelConfig, load_config
from zaya_jax.config.checks import require
from zaya_jax.config.shipped import shipped
from zaya_jax.generate.placement import generation_kernels
from zaya_jax.model.attention import Context
from zaya_jax.model.layers import rotary_table
from zaya_jax.model.zaya import ATTENTION

# The attention of ZAYA1-8B, and attention whose heads are as wide as the residual stream.
_LAYER = {"num_layers": 1, "vocab_size": 64, "num_experts": 2, "expert_size": 64, "router_size": 64}
CCA = dataclasses.replace(load_config(shipped("zaya1_8b.yaml")).model, **_LAYER)
KINDS = {
    "cca": CCA,
    "gqa": dataclasses.replace(CCA, attention="gqa", num_query_heads=16, num_kv_heads=4),
    "full": dataclasses.replace(CCA, attention="gqa", num_query_heads=16, num_kv_heads=16),
}


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time the attention of a prompt: CCA against grouped-query and full attention.

    Applies one attention layer of ZAYA1-8B, and others of the same width.

    prefill --lengths 4096
    """
    for length in parsed.lengths:
        require(1 <= length <= CCA.max_positions, "--lengths", length, f"between 1 and {CCA.max_positions}")
    heads = "; ".join(f"{name}: {c.num_query_heads} query and {c.num_kv_heads} key heads" for name, c in KINDS.items())
    size = f"width {CCA.hidden_size:,}, heads of {CCA.head_dim}, {parsed.dtype}, one prompt; {heads}"
    result = start_result("prefill of one attention layer", size, "grouped-query and full attention", ("flax",))
    for length in parsed.lengths:
        sides = {name: (make_layer, config, length, parsed.dtype) for name, config in KINDS.items()}
        seconds, medians = time_sides(sides, parsed.repeats)
        ratios = {name: each / medians["cca"] for name, each in medians.items()}
        cca, gqa, full = (f"{1e3 * each:,.0f} ms" for each in medians.values())
        others = f"GQA {gqa} ({ratios['gqa']:.2f}×), full attention {full} ({ratios['full']:.2f}×)"
        print(f"{length:,} tokens: CCA {cca}, {others}", flush=True)
        result["results"][str(length)] = rows = dict[str, Any]()
        for name, config in KINDS.items():
            rows[name] = {"seconds": seconds[name], "relative_time": round(ratios[name], 3)}
            rows[name]["cache_bytes_per_token"] = 2 * config.kv_size * jnp.dtype(parsed.dtype).itemsize
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


main = command(run, {"--lengths": flag([4096, 16384], "TOKENS", "tokens of a prompt")} | DTYPE, repeats=5)
