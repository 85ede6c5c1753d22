"""Time a training step against `transformers`: the forward and backward pass, or the whole optimizer step.

Passes are interleaved. Whole steps are timed one side after the other, since both do not fit one device. Ours is the
program that `zaya_jax.main` trains with; its optimizer is also timed alone, since several devices would share it.
"""

import argparse
import functools
import os
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.benchmark_command import OVERRIDES, command, start_result, time_sides
from benchmarks.peer import peer_device, peer_step, require_peer, time_peer
from benchmarks.train_step import estimated_bytes, reduce_to_fit
from zaya_jax.config import BatchConfig, Config, DataConfig, ModelConfig, PhaseConfig, TrainConfig, load_config
from zaya_jax.config.checks import require
from zaya_jax.config.stages import stages
from zaya_jax.errors import InputError
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.measure.training_steps import (
    describe_throughput,
    forward_backward,
    peak_memory,
    random_tokens,
    throughput,
    time_train_steps,
)
from zaya_jax.lab.predict.compilers.compiled import peak_bytes, program_memory
from zaya_jax.lab.result import describe_run, rounded, write_result
from zaya_jax.lab.subprocesses import restored_environment, run_in_subprocess
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token
from zaya_jax.optim.skippable import skippable
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.train.memory import available_memory, gigabytes
from zaya_jax.train.program import Programs

SHARED = (8, 1024)  # devices that would share the optimizer's work
_GB = 1e9
_PEER = "transformers ZayaForCausalLM (sdpa, default experts)"


def default_config(sequences: int = 4, micro_batch: int | None = None) -> Config:
    """Make a configuration with 52.75M parameters, and sequences of 512 tokens."""
    sizes: dict[str, Any] = {"vocab_size": 16384, "hidden_size": 384, "num_layers": 8, "max_positions": 2048}
    sizes |= {"num_query_heads": 6, "num_kv_heads": 2, "head_dim": 64}
    model = ModelConfig(**sizes, num_experts=12, expert_size=384, router_size=64)
    tokens = sequences * 512
    train = TrainConfig(batch=BatchConfig(tokens=tokens, micro_batch=micro_batch))  # keeps what the peer keeps
    return Config(model, (PhaseConfig(tokens),), data=DataConfig(context=512), train=train)


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time a training step against transformers in PyTorch.

    Prints tokens/s of both on the same random tokens and the same device.

    step --dtype float32 --repeats 3
    """
    if parsed.overrides and not parsed.config:
        raise InputError(f"{parsed.overrides[0]} overrides a configuration file, but none is given: add --config FILE.")
    config = load_config(parsed.config, parsed.overrides) if parsed.config else None
    if not parsed.whole:
        dtypes = [parsed.dtype] if parsed.dtype in {"float32", "bfloat16"} else ["float32", "bfloat16"]
        return bench_step(config or default_config(), dtypes, parsed.repeats)
    if parsed.dtype:
        raise InputError("--dtype cannot be combined with --whole. Use --config FILE train.compute_dtype=bfloat16.")
    return bench_whole_step(config or default_config(sequences=16, micro_batch=4), parsed.repeats, parsed.output)


def bench_step(config: Config, dtypes: Sequence[str], repeats: int) -> dict[str, Any]:
    """Time both sides with model, batch, context and remat of the first step of `config`."""
    require_peer()
    tokens_bs, threads = random_tokens(config), len(os.sched_getaffinity(0))
    batch, context = tokens_bs[:, 1:].shape
    tokens = batch * context
    flops = tokens * training_flops_per_token(config.model, context)
    size = f"{total_parameters(config.model):,} parameters, batch {batch} x {context}"
    result = start_result("forward and backward pass", size, _PEER, ("flax", "torch", "transformers"))
    for dtype in dtypes:
        theirs = (config.model, dtype, tokens_bs[:, :context], peer_device(), threads)
        sides = {"ours": (forward_backward, config, dtype, tokens_bs), "peer": (peer_step, *theirs)}
        seconds, medians = time_sides(sides, repeats)
        kind = result["hardware"]["device"]
        ours, other = (throughput(median, tokens, flops, kind) for median in medians.values())
        speeds = {"ours": ours["tokens_per_second"], "peer": other["tokens_per_second"]}
        ratio = speeds["ours"] / speeds["peer"]
        text = f"transformers {speeds['peer']:,.0f} tokens/s; zaya_jax is {ratio:.2f}× as fast"
        print(f"{dtype}: zaya_jax {describe_throughput(ours)}, {text}", flush=True)
        result["results"][dtype] = {"tokens_per_second": speeds, "ratio": round(ratio, 3), "seconds": seconds}
    return result


# --- the whole step -------------------------------------------------------------------------------------------


def bench_whole_step(config: Config, repeats: int, output: str | None) -> dict[str, Any]:
    """Time the first step of `config` on one device; print tokens/s, MFU and memory, and write them after each side.

    MFU does not count the FLOPs of Newton–Schulz. The relative speed is reported only if both sides do the same work:
    AdamW on all parameters in fp32. InputError if a side does not fit, or `config` has adapters.
    """
    require_peer()
    require(config.lora is None, "lora", "a section", "left out, because transformers trains all parameters")
    dtype, first, cpus = config.train.compute_dtype, stages(config)[0], len(os.sched_getaffinity(0))
    require(dtype != "float64", "train.compute_dtype", dtype, "float32 or bfloat16")
    context, tokens, tokens_bs = first.context, first.tokens, random_tokens(config)
    model = f"{total_parameters(config.model):,} parameters in {config.model.num_layers} layers"
    size = f"{model}, {dtype}, {first.sequences} x {context} tokens a step"
    peer = f"{_PEER}, all in {dtype}, torch.optim.AdamW(fused=True)"
    result = describe_run("whole optimizer step", size, peer, ("flax", "optax", "torch", "transformers"))
    waiting = os.getloadavg()[0]
    result["hardware"]["load"] = f"load average over the preceding minute: {waiting:.1f} on {cpus} CPUs"
    with restored_environment():
        apply_preset(select_preset(config.preset))  # like zaya_jax.main
        with run_in_subprocess(functools.partial, time_ours, config, tokens_bs, repeats) as ask:
            measured = ask()
    kind, device = measured.pop("device"), "cpu" if measured.pop("platform") == "cpu" else "cuda"
    flops = tokens * training_flops_per_token(config.model, context)
    ours = our_figures(measured, tokens, flops, kind)
    result["hardware"]["device"], result["results"] = kind, {"ours": ours}
    write_result(result, output)
    _print_ours(ours)

    with run_in_subprocess(functools.partial, time_peer, config, tokens_bs[:, :context], device, cpus, repeats) as ask:
        measured = ask()
    peer = measured | throughput(statistics.median(measured["seconds"]["step"]), tokens, flops, kind)
    result["results"]["peer"] = peer
    settings = f"micro_batch {peer['micro_batch']}, activations {'recomputed' if peer['checkpointing'] else 'kept'}"
    print(f"transformers: {describe_throughput(peer)}, {settings}{_memory_in_words(peer)}", flush=True)
    if (config.matrices, dtype) == ("adamw", "float32"):  # otherwise the peer's step does less work
        ratio = ours["tokens_per_second"] / peer["tokens_per_second"]
        result["results"]["ratio"] = round(ratio, 3)
        print(f"zaya_jax is {ratio:.2f}× as fast as transformers", flush=True)
    write_result(result, output)
    return result


# --- our side, in its own process ------------------------------------------------------------------------------


def time_ours(config: Config, tokens_bs: np.ndarray, repeats: int) -> dict[str, Any]:
    """Time steps on the same rows, and the optimizer's part of them; InputError if the device has too little memory."""
    for platform in ("cuda", "rocm"):  # the peer has one device too
        jax.config.update(f"jax_{platform}_visible_devices", "0")
    stage, device = stages(config)[0], jax.devices()[0]
    programs = Programs(config, validated_kernels(config))
    compiled = compile_parts(programs)
    check_memory(config, max(peak_bytes(program_memory(program)) for program in compiled.values()))
    whole = compiled.pop("step")
    seconds_of_step, losses, state = time_train_steps(programs[0], whole, stage, tokens_bs, repeats)
    seconds = {"step": seconds_of_step}
    peak = peak_memory(device, whole)  # before timing the optimizer, which needs extra gradients
    params, opt_state = state.params, state.opt_state
    del state  # the calls below donate its buffers
    gradients = jax.tree.map(jnp.copy, params)

    def move(program: Any) -> None:
        nonlocal params, opt_state
        params, opt_state = jax.block_until_ready(program(params, opt_state, gradients))

    for name, program in compiled.items():
        seconds[name] = time_calls(functools.partial(move, program), repeats).seconds
    settings = {"micro_batch": config.batch_for(config.phases[0]).micro_batch or stage.sequences}
    settings |= {"remat": config.remat_for(config.phases[0])}
    timed = {name: rounded(each) for name, each in seconds.items()}
    measured = {"device": device.device_kind, "platform": programs.kernels.target.platform, **settings}
    return {**measured, "seconds": timed, "losses": [round(loss, 4) for loss in losses], **peak}


def compile_parts(programs: Programs) -> dict[str, Any]:
    """Compile the first step, and the optimizer's part of it with and without Newton–Schulz; allocates no arrays."""
    program = programs[0]
    state, placement, optimizer = program.abstract_state, program.placement, skippable(program.optimizer)

    def compiled(on_matrices: Any) -> Any:
        def move(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
            settings = {"on_matrices": on_matrices, "ops": placement.ops}
            updates, opt_state = optimizer.update(gradients, opt_state, params, **settings)
            return jax.tree.map(jnp.add, params, updates), opt_state

        return jax.jit(move, donate_argnums=(0, 1)).lower(state.params, state.opt_state, state.params).compile()

    step = program.compile(stages(programs.config)[0])
    parts = {"optimizer": placement.on_matrices, "without_newton_schulz": _momentum_alone}
    return {"step": step} | {name: compiled(on_matrices) for name, on_matrices in parts.items()}


def _momentum_alone(name: str, leaves: Any, numbers: jax.Array, local: Any, function: Any) -> tuple[Any, Any]:
    del name, function
    return local(numbers, *leaves)


def check_memory(config: Config, needed: int) -> None:
    """Raise `InputError` if the device has less than `needed` bytes; it names a smaller step that should fit."""
    if (limit := available_memory()) is None or needed <= limit:
        return
    # The estimate must shrink by as much as memory is short.
    fitting = reduce_to_fit(config, 1, limit / needed * estimated_bytes(config, 1))
    layers, micro_batch = fitting.model.num_layers, fitting.batch_for(fitting.phases[0]).micro_batch
    step = f"A step with {config.model.num_layers} layers needs {gigabytes(needed)}"
    advice = f"Set model.num_layers={layers} and train.batch.micro_batch={micro_batch}, which should fit."
    raise InputError(f"{step}, but this device has {gigabytes(limit)}. {advice}")


# --- what follows from it --------------------------------------------------------------------------------------


def our_figures(measured: dict[str, Any], tokens: int, flops: float, kind: str) -> dict[str, Any]:
    """Add speeds and the optimizer's share to what `time_ours` measured, also for devices that share the optimizer.

    A step has so many tokens, and `flops` without the optimizer.
    """
    step, optimizer, rest = (statistics.median(seconds) for seconds in measured["seconds"].values())
    shared = {}
    for n in SHARED:
        seconds, share = step - optimizer + optimizer / n, optimizer / n
        shared[f"1/{n}"] = throughput(seconds, tokens, flops, kind) | {"optimizer_share": round(share / seconds, 5)}
    shares = {"optimizer_share": optimizer / step, "newton_schulz_share": (optimizer - rest) / step}
    figures = throughput(step, tokens, flops, kind) | {name: round(each, 4) for name, each in shares.items()}
    return {**measured, **figures, "with_part_of_the_optimizer": shared}


def _print_ours(ours: dict[str, Any]) -> None:
    settings = f"micro_batch {ours['micro_batch']}, remat {ours['remat']}{_memory_in_words(ours)}"
    print(f"zaya_jax: {describe_throughput(ours)}, {settings} (measured by {ours['peak_bytes_by']})")
    share = f"{ours['optimizer_share']:.1%} of the step, {ours['newton_schulz_share']:.1%} in Newton–Schulz"
    print(f"the optimizer takes {share}")
    for part, shared in ours["with_part_of_the_optimizer"].items():
        speed = f"{describe_throughput(shared)}, optimizer {shared['optimizer_share']:.1%}"
        print(f"if the optimizer is sharded and takes {part} of its time: {speed}", flush=True)


def _memory_in_words(side: dict[str, Any]) -> str:
    return "" if side["peak_bytes"] is None else f", peak {side['peak_bytes'] / _GB:.1f} GB"


WHOLE = (
    "time the whole step, with micro-batches, clipping, optimizer and balancing, and report the optimizer's share "
    "(default: forward and backward pass only)"
)
DTYPE = "dtype of the forward and backward pass (default: both); --whole uses train.compute_dtype instead"
CONFIG = (
    "configuration to take model, batch and context from, such as configs/bench_8b.yaml on a GPU with 141 GB "
    "(default: 52.75M parameters)"
)
FLAGS = {
    "--whole": {"action": "store_true", "help": WHOLE},
    "--dtype": {"choices": ("float32", "bfloat16", "both"), "help": DTYPE},
    "--config": {"metavar": "FILE", "help": CONFIG},
    "overrides": {**OVERRIDES, "help": "configuration value to override, such as model.num_layers=4"},
}
main = command(run, FLAGS, repeats=7)
