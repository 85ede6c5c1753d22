"""Measure peak memory and time of context-parallel attention, ring and all-gather, each case in its own process."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zaya_jax.config import ParallelConfig
from zaya_jax.config.parallel import ContextAttention
from zaya_jax.lab.measure.timing import Passes, interleave_subprocesses
from zaya_jax.lab.predict.compilers.compiled import peak_bytes, program_memory
from zaya_jax.lab.result import describe_run, print_tables, rounded
from zaya_jax.lab.result_tables import CONTEXT, TABLES
from zaya_jax.lab.subprocesses import restored_environment
from zaya_jax.ops.registry import select_kernels
from zaya_jax.ops.selfcheck import EXAMPLE
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.mesh import SEQUENCE_AXIS, make_mesh
from zaya_jax.parallel.placement import make_placement

SIMULATED = 8  # CPU devices to simulate if the machine has only one device
# By default XLA:CPU schedules for concurrency, which doubles the temporaries.
MEMORY_FIRST = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
KINDS: tuple[ContextAttention, ...] = ("all_gather", "ring")


class Sizes(NamedTuple):
    """Sizes of the attention to measure; heads and channels are those of ZAYA1-8B."""

    lengths: tuple[int, ...]  # tokens of the sequence
    dtype: str
    query_heads: int = 8
    kv_heads: int = 2
    channels: int = 128
    degrees: tuple[int, ...] = (1, 2, 4, 8)  # numbers of devices that share the sequence


CPU = Sizes((2048, 4096, 8192), "float32")
GPU = Sizes((8192, 16384, 32768), "bfloat16")


class Case(NamedTuple):
    """One program to measure."""

    attention: ContextAttention
    devices: int
    length: int


def measure_context(sizes: Sizes | None, repeats: int) -> dict[str, Any]:
    """Measure every case, those of a length in turn, and print tables; one device simulates `SIMULATED` CPU devices."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # all processes share the devices
    simulated = jax.device_count() < 2
    kind = "cpu" if simulated else jax.devices()[0].device_kind
    devices = SIMULATED if simulated else jax.device_count()
    sizes = sizes or (CPU if simulated or jax.default_backend() == "cpu" else GPU)
    lengths, heads = ", ".join(f"{length:,}" for length in sizes.lengths), f"{sizes.query_heads} query heads"
    size = f"one sequence of {lengths} tokens, {heads}, {sizes.kv_heads} key heads of {sizes.channels} channels"
    peer = "all-gather attention, in which every device holds all keys and values"
    result = describe_run(CONTEXT, f"{size}, {sizes.dtype}, zigzag", peer, ())
    result["hardware"]["device"] = f"{devices} × {kind}{', simulated' if simulated else ''}"
    result["results"] = []
    for length in sizes.lengths:
        for case, passes in _measure(sizes, length, devices, repeats, simulated).items():
            memory = {"bytes_per_device": peak_bytes(passes.results[-1]), **passes.results[-1]}
            result["results"].append(case._asdict() | memory | {"seconds": rounded(passes.seconds)})
    print_tables(TABLES["context"](result))
    return result


def _measure(sizes: Sizes, length: int, devices: int, repeats: int, simulated: bool) -> dict[Case, Passes]:
    degrees = [degree for degree in sizes.degrees if degree <= devices]
    # On one device both kinds are the same program.
    cases = [Case(kind, n, length) for kind in KINDS for n in degrees if n > 1 or kind == KINDS[0]]
    with restored_environment():
        if simulated:
            simulate_devices()
        return interleave_subprocesses({case: (context_pass, sizes, case) for case in cases}, repeats)


def simulate_devices() -> None:
    """Make processes that start from now on use `SIMULATED` CPU devices only, with low memory use."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {MEMORY_FIRST}".strip()
    os.environ |= {"JAX_NUM_CPU_DEVICES": str(SIMULATED), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def context_pass(sizes: Sizes, case: Case) -> Callable[[], dict[str, Any]]:
    """Compile a case; returns a function that runs both passes, and returns `program_memory` and the `peak` or None."""
    config = ParallelConfig(context=case.devices, context_attention=case.attention)
    mesh, split = make_mesh(config, jax.devices()[: case.devices]), PartitionSpec(None, SEQUENCE_AXIS)
    h, k, c = sizes.query_heads, sizes.kv_heads, sizes.channels
    model = dataclasses.replace(EXAMPLE, num_query_heads=h, num_kv_heads=k, head_dim=c)
    kernels = select_kernels(current_target(), model, sizes.dtype)
    ops = make_placement(config, mesh, {}, {}, sizes.dtype, kernels).ops  # the same as in training

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        *qkv, do_bshc, segments_bs = arrays
        segments = {"query_segments_bs": segments_bs, "key_segments_bt": ops.key_segments(segments_bs)}
        out, pull = jax.vjp(functools.partial(ops.attention, **segments), *qkv)
        return out, *pull(do_bshc)

    region = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    rng, dtype = np.random.default_rng(0), jnp.dtype(sizes.dtype)
    drawn = [rng.normal(size=(1, case.length, heads, c)).astype(dtype) for heads in (h, k, k, h)]
    arrays = jax.device_put((*drawn, np.ones((1, case.length), np.int32)), NamedSharding(mesh, split))
    compiled = jax.jit(region).lower(*arrays).compile()

    def step() -> dict[str, Any]:
        jax.block_until_ready(compiled(*arrays))
        counted = jax.local_devices()[0].memory_stats() or {}
        return program_memory(compiled) | {"peak": counted.get("peak_bytes_in_use")}

    return step
