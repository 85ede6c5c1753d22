"""Describe and test a machine: `python -m zaya_jax.machine VERB`."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from zaya_jax.config.checks import counted
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.hardware.detection import use_huge_pages
from zaya_jax.lab.measure.breakdown import step_command as step
from zaya_jax.lab.measure.collectives import collectives_command as collectives
from zaya_jax.lab.measure.gemm import gemm_command as gemm
from zaya_jax.lab.measure.memory import memory_command as memory
from zaya_jax.lab.measure.preflight import preflight_command as preflight
from zaya_jax.lab.measure.storage import storage_command as storage
from zaya_jax.lab.predict.sizing import sizing_command as sizing
from zaya_jax.lab.report import report_command as report
from zaya_jax.lab.verbs import add_flags, add_verb, run_verb, verb_examples
from zaya_jax.run.command_output import prepare_streams
from zaya_jax.run.parser import Parser

_PROGRAM = "python -m zaya_jax.machine"
_COMMANDS = (collectives, memory, storage, gemm, step, sizing, preflight, report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit status is 0, 1 if something failed, or 2 for bad input."""
    return run_verb(_parser(), arguments)


def _parser() -> Parser:
    parser = Parser(prog=_PROGRAM, description="Describe, test and time this machine's devices.",
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_verb(verbs, _PROGRAM, _describe)
    context = add_verb(verbs, _PROGRAM, _context)
    add_flags(context, repeats=5, png="memory per device against the number of devices")
    for command in _COMMANDS:
        command.add(verbs, _PROGRAM)
    kernels = add_verb(verbs, _PROGRAM, _kernels)
    kernels.add_argument("--compile-for", nargs="+", default=[], metavar="GPU",
                         help=f"{', '.join(HARDWARE)} (default: all whose compilers are installed)")  # fmt: skip
    kernels.add_argument("--tune", nargs="*", metavar="CONFIG", help="time the implementations of each operation on "
                         "this machine's device instead, at the sizes of this configuration, with section.key=value "
                         "to override (default: configs/bench_8b.yaml)")  # fmt: skip
    kernels.add_argument("--repeats", type=int, metavar="N",
                         help="number of timed repetitions of each candidate (with --tune; default: 5)")  # fmt: skip
    add_flags(kernels)
    parser.epilog = verb_examples(verbs)
    return parser


def _describe(_: argparse.Namespace) -> dict[str, Any]:
    """Print devices, memory, drivers, network, environment and preset as JSON.

    The exit status is 1 if the machine has a GPU that JAX does not use.

    describe
    """
    from zaya_jax.lab.measure.describe import describe_machine

    machine = describe_machine()
    print(json.dumps(machine, indent=2))
    if "failed" not in machine:
        devices = counted(machine["devices"], f"{machine['device']} device")
        print(f"OK: JAX uses {devices} with the preset {machine['preset']}.", file=sys.stderr)
    return machine


def _context(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure memory and time of context-parallel attention.

    Compares ring and all-gather attention, forward and backward, on 1 to 8 devices. With a single device, CPU devices
    are simulated: memory is still meaningful, times are not.

    context --repeats 3 --png memory.png
    """
    from zaya_jax.lab.measure.context import measure_context

    return measure_context(None, parsed.repeats)


def _kernels(parsed: argparse.Namespace) -> dict[str, Any]:
    """Compile each Pallas kernel for GPUs that need not be here, or measure which are fastest on this machine's GPU.

    Reports registers, shared memory, spills and scratch memory of each kernel, and launches and bytes of each operation
    with kernels and with references, from XLA's compilers. Needs the extra compile-cuda or compile-rocm, and no GPU.
    Takes minutes for each GPU. With --tune, times XLA and each kernel with each of its tiles, and writes a table to
    ~/.cache/zaya_jax, which training on this machine reads when a run begins.

    kernels --tune configs/zaya1_8b.yaml
    """
    if parsed.tune is not None:
        if parsed.compile_for:
            raise InputError("--compile-for cannot be combined with --tune, which measures this machine's device.")
        from zaya_jax.lab.measure.tune import tune

        return tune(parsed.tune[0] if parsed.tune else None, parsed.tune[1:], parsed.repeats or 5)
    if parsed.repeats is not None:
        raise InputError("--repeats needs --tune: without it, kernels are compiled, not timed.")
    from zaya_jax.lab.predict.compilers.kernels import bench_kernels

    return bench_kernels(parsed.compile_for, parsed.output)


if __name__ == "__main__":
    prepare_streams()
    use_huge_pages()
    sys.exit(main())
