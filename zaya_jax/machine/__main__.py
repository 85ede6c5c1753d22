"""Describe and test a machine: `python -m zaya_jax.machine VERB`."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from zaya_jax.machine.command import add_flags, add_verb, run_verb

_PROGRAM = "python -m zaya_jax.machine"
_EXAMPLES = """examples:
  python -m zaya_jax.machine describe
  python -m zaya_jax.machine smoke --output smoke.json
  python -m zaya_jax.machine context --repeats 3 --png memory.png"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit status is 0, 1 if a part of the smoke test failed, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Describe, test and time this machine's devices.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    describe = add_verb(verbs, _PROGRAM, "describe", "print devices, memory, drivers, environment and preset as JSON",
                        "The exit status is 1 if the machine has a GPU that JAX does not use.", "")  # fmt: skip
    describe.set_defaults(run=_describe)

    smoke = add_verb(
        verbs, _PROGRAM, "smoke", "test and time kernels, collectives and training, and write a report",
        "The report sets predicted times and memory beside measured ones. Takes minutes on GPUs. Without a GPU, every "
        "part runs on the CPU at a small size. Each part runs in its own process, and the exit status is 1 if one "
        "fails.", "--output smoke.json",
    )  # fmt: skip
    smoke.add_argument("--output", metavar="FILE",
                       help="write the report to FILE as JSON (default: benchmarks/smoke_DEVICE.json)")  # fmt: skip
    smoke.set_defaults(run=_smoke)

    context = add_verb(
        verbs, _PROGRAM, "context", "measure memory and time of context-parallel attention",
        "Compares ring and all-gather attention, forward and backward, on 1 to 8 devices. With a single device, "
        "CPU devices are simulated: memory is still meaningful, times are not.", "--repeats 3 --png memory.png",
    )  # fmt: skip
    add_flags(context, repeats=5, png="memory per device against the number of devices")
    context.set_defaults(run=_context)

    launches = add_verb(
        verbs, _PROGRAM, "launches", "count kernel launches and bytes moved, with and without Pallas kernels",
        "Counts them in programs lowered for ROCm, for one layer and for each operation. Needs no GPU.",
        "--output launches.json",
    )  # fmt: skip
    add_flags(launches)
    launches.set_defaults(run=_launches)

    machine_code = add_verb(
        verbs, _PROGRAM, "machine-code", "report registers, shared memory and spills of each Pallas kernel",
        "Compiles the kernels for MI300X (gfx942), MI355X (gfx950) and H200 (sm_90) with the triton package. Needs no "
        "GPU.", "--output machine_code.json",
    )  # fmt: skip
    add_flags(machine_code)
    machine_code.set_defaults(run=_machine_code)
    return run_verb(parser, arguments)


def _describe(_: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.machine.describe import describe_machine

    machine = describe_machine()
    print(json.dumps(machine, indent=2))
    return machine


def _smoke(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.bench.kernels import bench_kernels
    from zaya_jax.machine.smoke import smoke

    return smoke(parsed.output, bench_kernels)


def _context(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.machine.context import measure_context

    return measure_context(None, parsed.repeats, parsed.png)


def _launches(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.machine.proxies.launches import bench_launches

    return bench_launches(parsed.output)


def _machine_code(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.machine.proxies.machine_code import bench_machine_code

    return bench_machine_code(parsed.output)


if __name__ == "__main__":
    sys.exit(main())
