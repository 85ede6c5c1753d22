"""Describe and test a machine: `python -m zaya_jax.machine VERB`."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from zaya_jax.machine.command import add_flags, run_verb

_EXAMPLES = """examples:
  python -m zaya_jax.machine describe
  python -m zaya_jax.machine smoke --output smoke.json
  python -m zaya_jax.machine context --repeats 3 --png memory.png"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit status is 0, 1 if a part of the smoke test failed, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m zaya_jax.machine", description="Describe, test and time this machine's devices.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True)
    describe = verbs.add_parser("describe", help="print devices, memory, drivers, environment and preset as JSON")
    describe.set_defaults(run=_describe)
    smoke = verbs.add_parser("smoke", help="test and time kernels, collectives and training; write a JSON to post")
    smoke.add_argument("--output", metavar="FILE",
                       help="write the result to FILE as JSON (default: benchmarks/smoke_DEVICE.json)")  # fmt: skip
    smoke.set_defaults(run=_smoke)
    context = verbs.add_parser("context", help="measure memory and time of ring and all-gather attention")
    add_flags(context, repeats=5, png="memory against the number of devices")
    context.set_defaults(run=_context)
    launches = verbs.add_parser("launches", help="count the kernel launches of a layer and the bytes each operation "
                                "moves, with and without Pallas kernels")  # fmt: skip
    add_flags(launches)
    launches.set_defaults(run=_launches)
    machine_code = verbs.add_parser("machine-code", help="compile each kernel for MI300X, MI355X and H200, and report "
                                    "registers, shared memory and spills (no GPU needed)")  # fmt: skip
    add_flags(machine_code)
    machine_code.set_defaults(run=_machine_code)
    return run_verb(parser, arguments)


def _describe(_: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.machine.describe import describe_machine

    machine = describe_machine()
    print(json.dumps(machine, indent=2))
    return machine


def _smoke(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.machine.smoke import smoke

    return smoke(parsed.output)


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
