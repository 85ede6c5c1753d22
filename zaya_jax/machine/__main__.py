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
from zaya_jax.lab.measure.commands import VERBS
from zaya_jax.lab.predict.sizing import sizing_command
from zaya_jax.lab.verbs import add_flags, add_verb, run_verb
from zaya_jax.run.command_output import prepare_streams
from zaya_jax.run.parser import Parser

_PROGRAM = "python -m zaya_jax.machine"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit status is 0, 1 if something failed, or 2 for bad input."""
    return run_verb(_parser(), arguments)


def _parser() -> Parser:
    parser = Parser(prog=_PROGRAM, description="Describe, test and time this machine's devices.")
    verbs: Any = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_verb(verbs, _PROGRAM, _describe)
    for add in (*VERBS, sizing_command.add, _add_kernels):
        add(verbs, _PROGRAM)
    examples = (verb.epilog.removeprefix("example: ") for verb in verbs.choices.values())
    parser.epilog = "\n  ".join(["examples:", *examples])
    return parser


def _describe(_: argparse.Namespace) -> dict[str, Any]:
    """Print devices, memory, drivers, network, environment and preset as JSON.

    The exit status is 1 if the machine has a GPU that JAX does not use.

    describe
    """
    from zaya_jax.lab.measure.installation import describe_machine

    machine = describe_machine()
    print(json.dumps(machine, indent=2))
    if "failed" not in machine:
        devices = counted(machine["devices"], f"{machine['device']} device")
        print(f"OK: JAX uses {devices} with the preset {machine['preset']}.", file=sys.stderr)
    return machine


def _add_kernels(verbs: Any, program: str) -> None:
    verb = add_verb(verbs, program, _kernels)
    text = f"{', '.join(HARDWARE)} (default: all whose compilers are installed)"
    verb.add_argument("--compile-for", nargs="+", default=[], metavar="GPU", help=text)
    text = "time the implementations of each operation on this machine's device instead, at the sizes of this "
    text += "configuration, with section.key=value to override (default: configs/bench_8b.yaml)"
    verb.add_argument("--tune", nargs="*", metavar="CONFIG", help=text)
    text = "number of timed repetitions of each candidate (with --tune; default: 5)"
    verb.add_argument("--repeats", type=int, metavar="N", help=text)
    add_flags(verb)


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
