"""The verb `step` of `python -m zaya_jax.machine`."""

import argparse
from typing import Any

from zaya_jax.config.checks import require
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.verbs import add_flags, add_verb


def add(verbs: Any, program: str) -> None:
    """Add the verb to the parser of `program`."""
    verb = add_verb(verbs, program, _run)
    verb.add_argument("source", metavar="SOURCE", help="run folder with a trace, or configuration file")
    verb.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration values to override")
    verb.add_argument("--steps", type=int, default=3, metavar="N",
                      help="number of steps, prompts or blocks of decode steps to trace (default: 3)")  # fmt: skip
    verb.add_argument("--work", choices=("train", "prefill", "decode"), default="train", help="trace training, the "
                      "processing of prompts, or the steps that draw tokens after them (default: train)")  # fmt: skip
    verb.add_argument("--batch", type=int, metavar="N", help="number of prompts (--work prefill or decode; default: 1)")
    verb.add_argument("--prompt", type=int, metavar="TOKENS", help="length of each (--work prefill or decode; default: "
                      "512)")  # fmt: skip
    verb.add_argument("--hardware", metavar="NAME", help="also print the dry run's estimate for this hardware: "
                      f"{', '.join(HARDWARE)}, or a folder with results of gemm, memory and collectives")  # fmt: skip
    verb.add_argument("--instructions", type=int, default=0, metavar="N",
                      help="also list the N instructions that take longest (default: 0)")  # fmt: skip
    add_flags(verb, png="the parts as stacked bars")


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Break down the time of a training step, a prefill or a decode step by part.

    Reads the trace that a run wrote with profile.start=STEP, or traces steps of a configuration on random tokens.
    Measured times stand beside predicted ones, if the device has a data sheet. Collectives that overlap with
    computation are reported separately.

    step configs/tiny.yaml --png step.png
    """
    require(parsed.steps >= 1, "--steps", parsed.steps, "at least 1")
    require(parsed.instructions >= 0, "--instructions", parsed.instructions, "at least 0")
    generation = {"--batch": parsed.batch, "--prompt": parsed.prompt}
    for flag, value in generation.items():
        if value is not None and (parsed.work == "train" or value < 1):
            raise InputError(f"{flag} is {value}, but must be at least 1, and needs --work prefill or decode.")
    if parsed.work != "train" and parsed.hardware is not None:
        raise InputError("--hardware is for --work train: the dry run estimates training steps.")
    from zaya_jax.lab.measure.breakdown.measure import break_down, break_down_generation

    if parsed.work == "train":
        return break_down(parsed.source, parsed.overrides, parsed.steps, parsed.hardware, parsed.instructions)
    return break_down_generation(parsed.source, parsed.overrides, parsed.work, parsed.batch or 1, parsed.prompt or 512,
                                 parsed.steps, parsed.instructions)  # fmt: skip
