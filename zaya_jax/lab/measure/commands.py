"""The verbs of `python -m zaya_jax.machine` that measure this machine: flags, and what is checked before jax starts."""

import argparse
from typing import Any

from zaya_jax.config import ParallelConfig, load_config
from zaya_jax.config.checks import require
from zaya_jax.config.parallel import AXES
from zaya_jax.config.stages import largest_stage, micro_batch
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset, keep_compilations
from zaya_jax.hardware.measurements import measured_preset, recorded_result
from zaya_jax.lab.verbs import add_config, add_flags, add_verb, parse_bytes, run_in_job
from zaya_jax.run.options import add_job

FAMILIES = ("square", "stride", "model", "experts", "newton_schulz", "attention")
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "permute")
_DTYPES = ("float32", "bfloat16", "float16", "int32", "int8")
_PRODUCT_DTYPES = ("bfloat16", "float32")
LEVELS = ("quick", "preflight", "full")  # of doctor
_SIZES = ("8", "16M", 2)  # of a collective: smallest, largest, factor
_SMALLEST_ARRAY = 4096  # bytes
_SMALLEST_FILE = 2**20  # bytes


def _add_collectives(verbs: Any, program: str) -> None:
    verb = add_verb(verbs, program, _collectives)
    flag, every = verb.add_argument, ", ".join(_OPERATIONS)
    listed = {"nargs": "+", "choices": _OPERATIONS, "default": _OPERATIONS, "metavar": "OPERATION"}
    flag("--operations", help=f"operations to measure (default: all): {every}", **listed)
    listed = {"nargs": "+", "choices": _DTYPES, "default": ("float32",), "metavar": "DTYPE"}
    flag("--dtypes", help=f"dtypes (default: float32): {', '.join(_DTYPES)}", **listed)
    flag("--min-bytes", default=_SIZES[0], metavar="SIZE", help="smallest size, such as 8 or 64K (default: 8)")
    flag("--max-bytes", default=_SIZES[1], metavar="SIZE", help="largest size (default: 16M)")
    flag("--factor", type=int, default=_SIZES[2], metavar="N", help="factor between sizes (default: 2)")
    text = "numbers of devices to compare, each the first N (default: all devices of the job)"
    flag("--devices", nargs="+", type=int, default=(), metavar="N", help=text)
    for axis in AXES:
        default, meaning = (None, "the rest") if axis == "data" else (1, "1")
        text = f"devices of the mesh axis {axis} (default: {meaning})"
        flag(f"--{axis}", type=int, default=default, metavar="N", help=text)
    text = "mesh axes to run over: groups of devices run side by side (default: all axes, in one group)"
    flag("--axis", nargs="+", choices=AXES, default=(), metavar="AXIS", help=text)
    text = "measure the messages that a training step of this configuration sends in its layout, instead of sizes"
    flag("--config", nargs="+", default=(), metavar=("CONFIG", "section.key=value"), help=text)
    text = "dispatch: time calls of one operation; graph: operations within one program, without the time to start each"
    flag("--mode", choices=("dispatch", "graph"), default="dispatch", help=f"{text} (default: dispatch)")
    add_job(verb)
    add_flags(verb, repeats=20, png="bus bandwidth and latency against the size")


def _collectives(parsed: argparse.Namespace) -> dict[str, Any]:
    """Check and time collectives over sizes, as nccl-tests and rccl-tests do.

    Prints their tables, and fits latency and bandwidth. Every result is compared element by element. Start it like
    training for a job of several processes.

    collectives --operations all_reduce --max-bytes 128M
    """
    first, last = parse_bytes("--min-bytes", parsed.min_bytes), parse_bytes("--max-bytes", parsed.max_bytes)
    require(first <= last, "--max-bytes", parsed.max_bytes, f"at least --min-bytes, {parsed.min_bytes}")
    require(parsed.factor >= 2, "--factor", parsed.factor, "at least 2")
    sizes = [first]
    while sizes[-1] * parsed.factor <= last:
        sizes.append(sizes[-1] * parsed.factor)
    has_layout = parsed.axis or any(getattr(parsed, axis) not in (None, 1) for axis in AXES)
    if parsed.devices and has_layout:
        raise InputError("--devices does not go with --axis and the sizes of mesh axes: remove one.")
    require(min(parsed.devices, default=2) >= 2, "--devices", min(parsed.devices, default=2), "at least 2")
    config = None
    if parsed.config:
        if parsed.devices or has_layout:
            raise InputError("--config has its own layout: leave --devices, --axis and the sizes of mesh axes out.")
        if (parsed.min_bytes, parsed.max_bytes, parsed.factor) != _SIZES:
            raise InputError("--config has its own sizes: leave --min-bytes, --max-bytes and --factor out.")
        config = load_config(parsed.config[0], parsed.config[1:])
    layout = ParallelConfig(**{axis: getattr(parsed, axis) for axis in AXES})
    preset = select_preset(None if config is None else config.preset)
    if config is not None:  # the flags decide how the step's messages are combined
        apply_preset(preset if config.measurements is None else measured_preset(preset, config.measurements))

    def work() -> dict[str, Any]:
        from zaya_jax.lab.measure.collectives.collectives_sweep import Sweep, measure_collectives

        operations, dtypes, devices, axes = map(tuple, (parsed.operations, parsed.dtypes, parsed.devices, parsed.axis))
        sweep = Sweep(operations, dtypes, tuple(sizes), devices, layout, axes, parsed.mode, parsed.repeats)
        return measure_collectives(sweep, config)

    return run_in_job(parsed, preset, work)


def _add_memory(verbs: Any, program: str) -> None:
    verb = add_verb(verbs, program, _memory)
    text = "sizes of an array; the largest should be at least four times the last-level cache (default: 256M)"
    verb.add_argument("--sizes", nargs="+", default=["256M"], metavar="SIZE", help=text)
    default = "configs/zaya1_8b.yaml"
    text = f"configuration whose widths the model's operations have (default: {default})"
    verb.add_argument("--config", default=default, metavar="FILE", help=text)
    add_flags(verb, repeats=20, png="bandwidth against the size of an array")


def _memory(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure memory bandwidth, and the share of it that the model's operations reach.

    Runs BabelStream's copy, mul, add, triad and dot on the first device, then the model's memory-bound operations.

    memory --sizes 1M 16M 256M
    """
    sizes = {parse_bytes("--sizes", text): text for text in parsed.sizes}
    if min(sizes) < _SMALLEST_ARRAY:
        raise InputError(f"--sizes is {sizes[min(sizes)]}, but must be at least {_SMALLEST_ARRAY}.")
    model = load_config(parsed.config).model
    from zaya_jax.lab.measure.memory import measure_memory

    return measure_memory(sorted(sizes), model, parsed.repeats)


def _add_storage(verbs: Any, program: str) -> None:
    verb = add_verb(verbs, program, _storage)
    add_config(verb)
    verb.add_argument("--size", default="1G", help="size of the file and of the state (default: 1G)")
    text = "numbers of concurrent threads (default: 1 16)"
    verb.add_argument("--threads", nargs="+", type=int, default=[1, 16], metavar="N", help=text)
    add_flags(verb, repeats=3)


def _storage(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure reads of data, and saves and restores of checkpoints.

    Reads a file in the folder of the data, cold and warm, saves and restores a state in the folder of the run, and
    prints the shortest step that the storage can feed. Removes what it writes.

    storage configs/zaya1_8b.yaml --size 8G --threads 1 16 64
    """
    size = parse_bytes("--size", parsed.size)
    require(size >= _SMALLEST_FILE, "--size", parsed.size, "at least 1M")
    for count in parsed.threads:
        require(1 <= count <= 256, "--threads", count, "between 1 and 256")
    config = load_config(parsed.config, parsed.overrides)
    from zaya_jax.lab.measure.storage import measure_storage

    return measure_storage(config, size, parsed.threads, parsed.repeats)


def _add_gemm(verbs: Any, program: str) -> None:
    verb = add_verb(verbs, program, _gemm)
    add_config(verb)
    flag, text = verb.add_argument, f"what to measure; squares always are (default: all): {', '.join(FAMILIES)}"
    flag("--families", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="FAMILY", help=text)
    flag("--dtype", choices=_PRODUCT_DTYPES, help="of the operands (default: train.compute_dtype)")
    names, text = ("FIRST", "LAST", "STEP"), "sizes of the square matrices (default: 256 4096 256)"
    flag("--squares", nargs=3, type=int, default=[256, 4096, 256], metavar=names, help=text)
    text = "tokens of a row of attention (default: 1024 4096)"
    flag("--lengths", nargs="+", type=int, default=[1024, 4096], metavar="N", help=text)
    whole = "those of the first phase, or of its whole step if micro_batch is null"
    flag("--tokens", type=int, metavar="N", help=f"tokens of a micro-batch on one device (default: {whole})")
    text = "bytes that are overwritten before a cold call, at least the size of the last-level cache (default: 512M)"
    flag("--flush", default="512M", metavar="SIZE", help=text)
    add_flags(verb, repeats=5, png="the speeds")


def _gemm(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure matrix products: squares, and those of a configuration.

    Prints the speed of each product with its operands in the caches and without, and its share of the fastest square's
    speed.

    gemm configs/zaya1_8b.yaml --png gemm.png
    """
    first, last, step = parsed.squares
    if not (1 <= first <= last and step >= 1):
        raise InputError(f"--squares is {first} {last} {step}, but must be FIRST ≤ LAST and a STEP, all at least 1.")
    require(min(parsed.lengths) >= 1, "--lengths", min(parsed.lengths), "at least 1")
    require(parsed.tokens is None or parsed.tokens >= 1, "--tokens", parsed.tokens, "at least 1")
    flush, config = parse_bytes("--flush", parsed.flush), load_config(parsed.config, parsed.overrides)
    dtype, stage = parsed.dtype or config.train.compute_dtype, largest_stage(config, 0)
    if dtype not in _PRODUCT_DTYPES:
        known = " or ".join(_PRODUCT_DTYPES)
        raise InputError(f"train.compute_dtype is {dtype}, but products are measured in {known}: set --dtype.")
    shards = config.parallel_for(config.phases[0]).context
    tokens = parsed.tokens or micro_batch(config, stage, 1) * stage.context // shards
    from zaya_jax.lab.measure.gemm import Request, measure_gemm

    squares = list(range(first, last + 1, step))
    sizes = (squares, parsed.lengths, tokens, flush, parsed.repeats)
    return measure_gemm(config, Request(parsed.families, dtype, *sizes))


def _add_step(verbs: Any, program: str) -> None:
    verb = add_verb(verbs, program, _step)
    flag = verb.add_argument
    flag("source", metavar="SOURCE", help="run folder with a trace, or configuration file")
    flag("overrides", nargs="*", metavar="section.key=value", help="configuration values to override")
    text = "number of steps, prompts or blocks of decode steps to trace (default: 3)"
    flag("--steps", type=int, default=3, metavar="N", help=text)
    text = "trace training, the processing of prompts, or the steps that draw tokens after them (default: train)"
    flag("--work", choices=("train", "prefill", "decode"), default="train", help=text)
    flag("--batch", type=int, metavar="N", help="number of prompts (--work prefill or decode; default: 1)")
    flag("--prompt", type=int, metavar="TOKENS", help="length of each (--work prefill or decode; default: 512)")
    sources = f"{', '.join(HARDWARE)}, a file of make gpu-report, or a folder with results of gemm and memory"
    flag("--hardware", metavar="NAME", help=f"also print the dry run's estimate for this hardware: {sources}")
    text = "also list the N instructions that take longest (default: 0)"
    flag("--instructions", type=int, default=0, metavar="N", help=text)
    add_flags(verb, png="the parts as stacked bars")


def _step(parsed: argparse.Namespace) -> dict[str, Any]:
    """Break down the time of a training step, a prefill or a decode step by part.

    Reads the trace that a run wrote with profile.start=STEP, or traces steps of a configuration on random tokens.
    Measured times stand beside predicted ones, if the device has a data sheet. Collectives that overlap with
    computation are reported separately.

    step configs/tiny.yaml --png step.png
    """
    require(parsed.steps >= 1, "--steps", parsed.steps, "at least 1")
    require(parsed.instructions >= 0, "--instructions", parsed.instructions, "at least 0")
    for flag, value in (("--batch", parsed.batch), ("--prompt", parsed.prompt)):
        if value is not None and (parsed.work == "train" or value < 1):
            raise InputError(f"{flag} is {value}, but must be at least 1, and needs --work prefill or decode.")
    if parsed.work != "train" and parsed.hardware is not None:
        raise InputError("--hardware is for --work train: the dry run estimates training steps.")
    from zaya_jax.lab.measure.step_parts import break_down, break_down_generation

    source = (parsed.source, parsed.overrides)
    if parsed.work == "train":
        return break_down(*source, parsed.steps, parsed.hardware, parsed.instructions)
    prompts = (parsed.batch or 1, parsed.prompt or 512)
    return break_down_generation(*source, parsed.work, *prompts, parsed.steps, parsed.instructions)


def _add_doctor(verbs: Any, program: str) -> None:
    verb = add_verb(verbs, program, _doctor)
    verb.add_argument("config", nargs="?", metavar="CONFIG", help="configuration file of the job to check")
    verb.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration values to override")
    text = "quick: the installation; preflight: also the devices of a job; full: also one training step, run twice"
    default = "quick, or preflight with a CONFIG"
    verb.add_argument("--level", choices=LEVELS, help=f"{text} (default: {default})")
    _add_examination(verb)


def _doctor(parsed: argparse.Namespace) -> dict[str, Any]:
    """Check this machine and its installation, or with a configuration the devices of a job.

    Prints what is wrong first, and what to do about it: packages, processor, memory, disk, devices and driver, caches
    and extras. The exit status is 1 if a check fails.

    doctor configs/tiny.yaml --level full
    """
    level = parsed.level or ("quick" if parsed.config is None else "preflight")
    if (level == "quick") != (parsed.config is None):
        raise InputError(f"--level {level} {'takes no' if level == 'quick' else 'needs a'} CONFIG.")
    return _examine(parsed, level)


def _add_preflight(verbs: Any, program: str) -> None:
    verb = add_verb(verbs, program, _preflight)
    add_config(verb)
    _add_examination(verb)


def _preflight(parsed: argparse.Namespace) -> dict[str, Any]:
    """Check the devices of a job before it trains, and name slow ones.

    The same as doctor --level preflight: checks the installation of each host, the kernels that the configuration
    selects, the speed of each device, and the results and bandwidth of collectives, in about two minutes. Start it like
    training for a job of several processes. The exit status is 1 if a check fails.

    preflight configs/zaya1_8b.yaml --output preflight.json
    """
    return _examine(parsed, "preflight")


def _add_examination(verb: argparse.ArgumentParser) -> None:
    default = "that in the folder `measurements` of the configuration, if there is one"
    text = f"result of an earlier preflight to compare with (default: {default})"
    verb.add_argument("--baseline", metavar="FILE", help=text)
    text = "how much slower than the other devices, or than the baseline, a device or collective may be (default: 15)"
    verb.add_argument("--tolerance", type=float, default=15.0, metavar="PERCENT", help=text)
    add_job(verb)
    add_flags(verb)


def _examine(parsed: argparse.Namespace, level: str) -> dict[str, Any]:
    require(0 < parsed.tolerance < 100, "--tolerance", parsed.tolerance, "above 0 and below 100")
    config = None if parsed.config is None else load_config(parsed.config, parsed.overrides)
    if config is None and parsed.baseline is not None:
        raise InputError(f"--baseline {parsed.baseline} needs a CONFIG: without one, nothing is measured.")
    folder = None if config is None else config.measurements
    baseline = recorded_result("preflight", parsed.baseline, folder)
    preset = select_preset(None if config is None else config.preset)
    apply_preset(preset)
    keep_compilations()
    source = f"--baseline {parsed.baseline}" if parsed.baseline else f"The result of preflight in {folder}"

    def work() -> dict[str, Any]:
        from zaya_jax.lab.measure.doctor import examine

        return examine(config, level == "full", baseline, source, parsed.tolerance / 100)

    return run_in_job(parsed, preset, work)


def _add_context(verbs: Any, program: str) -> None:
    verb = add_verb(verbs, program, _context)
    add_flags(verb, repeats=5, png="memory per device against the number of devices")


def _context(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure memory and time of context-parallel attention.

    Compares ring and all-gather attention, forward and backward, on 1 to 8 devices. With a single device, CPU devices
    are simulated: memory is still meaningful, times are not.

    context --repeats 3 --png memory.png
    """
    from zaya_jax.lab.measure.context_attention import measure_context

    return measure_context(None, parsed.repeats)


VERBS = (_add_context, _add_collectives, _add_memory, _add_storage, _add_gemm, _add_step, _add_doctor, _add_preflight)
