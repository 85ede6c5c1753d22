"""The verb `collectives` of `python -m zaya_jax.machine`."""

import argparse
from pathlib import Path
from typing import Any

from zaya_jax.config import ParallelConfig, load_config
from zaya_jax.config.checks import require
from zaya_jax.config.parallel import AXES
from zaya_jax.errors import InputError
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset
from zaya_jax.hardware.measurements import measured_preset
from zaya_jax.lab.verbs import add_flags, add_verb, parse_bytes, run_in_job
from zaya_jax.run.options import add_job

_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "permute")
_DTYPES = ("float32", "bfloat16", "float16", "int32", "int8")
_SIZES = ("8", "16M", 2)  # smallest, largest, factor


def add(verbs: Any, program: str) -> None:
    """Add the verb to the parser of `program`."""
    verb = add_verb(verbs, program, _run)
    add_flag = verb.add_argument
    add_flag("--operations", nargs="+", choices=_OPERATIONS, default=_OPERATIONS, metavar="OPERATION",
             help=f"operations to measure (default: all): {', '.join(_OPERATIONS)}")  # fmt: skip
    add_flag("--dtypes", nargs="+", choices=_DTYPES, default=("float32",), metavar="DTYPE",
             help=f"dtypes (default: float32): {', '.join(_DTYPES)}")  # fmt: skip
    add_flag("--min-bytes", default=_SIZES[0], metavar="SIZE", help="smallest size, such as 8 or 64K (default: 8)")
    add_flag("--max-bytes", default=_SIZES[1], metavar="SIZE", help="largest size (default: 16M)")
    add_flag("--factor", type=int, default=_SIZES[2], metavar="N", help="factor between sizes (default: 2)")
    add_flag("--devices", nargs="+", type=int, default=(), metavar="N", help="numbers of devices to compare, each the "
             "first N (default: all devices of the job)")  # fmt: skip
    for axis in AXES:
        default, meaning = (None, "the rest") if axis == "data" else (1, "1")
        add_flag(f"--{axis}", type=int, default=default, metavar="N",
                 help=f"devices of the mesh axis {axis} (default: {meaning})")  # fmt: skip
    add_flag("--axis", nargs="+", choices=AXES, default=(), metavar="AXIS", help="mesh axes to run over: groups of "
             "devices run side by side (default: all axes, in one group)")  # fmt: skip
    add_flag("--config", nargs="+", default=(), metavar=("CONFIG", "section.key=value"), help="measure the messages "
             "that a training step of this configuration sends in its layout, instead of sizes")  # fmt: skip
    add_flag("--mode", choices=("dispatch", "graph"), default="dispatch", help="dispatch: time calls of one operation; "
             "graph: operations within one program, without the time to start each (default: dispatch)")  # fmt: skip
    add_flag("--jsonl", metavar="FILE", help="append each row, with versions and hardware, to FILE as a line of JSON")
    add_job(verb)
    add_flags(verb, repeats=20, png="bus bandwidth and latency against the size")


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Check and time collectives over sizes, as nccl-tests and rccl-tests do.

    Prints their tables, and fits latency and bandwidth. Every result is compared element by element. Start it like
    training for a job of several processes.

    collectives --operations all_reduce --max-bytes 128M
    """
    sizes = _sizes(parsed.min_bytes, parsed.max_bytes, parsed.factor)
    if parsed.devices and (parsed.axis or any(getattr(parsed, axis) not in (None, 1) for axis in AXES)):
        raise InputError("--devices does not go with --axis and the sizes of mesh axes: remove one.")
    require(min(parsed.devices, default=2) >= 2, "--devices", min(parsed.devices, default=2), "at least 2")
    config = None
    if parsed.config:
        if parsed.devices or parsed.axis or any(getattr(parsed, axis) not in (None, 1) for axis in AXES):
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

        sweep = Sweep(tuple(parsed.operations), tuple(parsed.dtypes), sizes, tuple(parsed.devices), layout,
                      tuple(parsed.axis), parsed.mode, parsed.repeats)  # fmt: skip
        return measure_collectives(sweep, config, Path(parsed.jsonl) if parsed.jsonl else None)

    return run_in_job(parsed, preset, work)


def _sizes(least: str, most: str, factor: int) -> tuple[int, ...]:
    first, last = parse_bytes("--min-bytes", least), parse_bytes("--max-bytes", most)
    require(first <= last, "--max-bytes", most, f"at least --min-bytes, {least}")
    require(factor >= 2, "--factor", factor, "at least 2")
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)
