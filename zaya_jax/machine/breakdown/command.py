"""The verb `step` of `python -m zaya_jax.machine`."""

import argparse
from typing import Any

from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.machine.command import add_flags, add_verb


def add(verbs: Any, program: str) -> None:
    """Add the verb to the parser of `program`."""
    verb = add_verb(
        verbs, program, "step", "break down the time of a training step by part",
        "Reads the trace that a run wrote with profile.start=STEP, or traces steps of a configuration on random "
        "tokens. Measured times stand beside predicted ones, if the device has a data sheet. Collectives "
        "that overlap with computation are reported separately.", "configs/tiny.yaml --png step.png",
    )  # fmt: skip
    verb.add_argument("source", metavar="SOURCE", help="run folder with a trace, or configuration file")
    verb.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration values to override")
    verb.add_argument("--steps", type=int, default=3, metavar="N",
                      help="number of steps to trace of a configuration (default: 3)")  # fmt: skip
    verb.add_argument("--hardware", metavar="NAME", help="also print the dry run's estimate for this hardware: "
                      f"{', '.join(HARDWARE)}, or a folder with results of gemm, memory and collectives")  # fmt: skip
    add_flags(verb, png="the parts as stacked bars")
    verb.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    if parsed.steps < 1:
        raise InputError(f"--steps is {parsed.steps}, but must be at least 1.")
    from zaya_jax.machine.breakdown.measure import break_down

    return break_down(parsed.source, parsed.overrides, parsed.steps, parsed.hardware, parsed.png)
