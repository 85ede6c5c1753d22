"""The verb `sizing` of `python -m zaya_jax.machine`."""

import argparse
from typing import Any

from zaya_jax.config import load_config
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.hardware.measurements import get_hardware
from zaya_jax.machine.command import add_config, add_flags, add_verb


def add(verbs: Any, program: str) -> None:
    """Add the verb to the parser of `program`."""
    verb = add_verb(
        verbs, program, "sizing", "check the sizes of a configuration against the rules for a GPU",
        "Prints PASS, WARN or FAIL for each rule and phase, with the predicted loss of time where a rule gives one; "
        "OPEN if a measurement is missing. No GPU is needed. The exit status is 1 if a rule fails.",
        "configs/zaya1_8b.yaml --devices 1024 --hardware mi300x",
    )  # fmt: skip
    add_config(verb)
    verb.add_argument("--devices", type=int, default=8, metavar="N", help="number of devices (default: 8)")
    verb.add_argument("--hardware", default="mi300x", metavar="NAME",
                      help=f"hardware (default: mi300x): {', '.join(HARDWARE)}, or a folder with results of gemm, "
                      "memory and collectives")  # fmt: skip
    verb.add_argument("--measured", metavar="FOLDER", help="folder with results of collectives and gemm on this "
                      "hardware (default: --hardware, if it is a folder)")  # fmt: skip
    add_flags(verb)
    verb.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    if parsed.devices < 1:
        raise InputError(f"--devices is {parsed.devices}, but must be at least 1.")
    config, hardware = load_config(parsed.config, parsed.overrides), get_hardware(parsed.hardware, parsed.devices)
    from zaya_jax.machine.sizing.check import check_sizing, lines, read_measured
    from zaya_jax.machine.sizing.rules import Measured

    folder = parsed.measured or (None if parsed.hardware in HARDWARE else parsed.hardware)
    measured = Measured() if folder is None else read_measured(folder)
    findings = check_sizing(config, parsed.devices, hardware, measured)
    print("\n".join(lines(findings)))
    result: dict[str, Any] = {"config": parsed.config, "overrides": parsed.overrides, "devices": parsed.devices,
                              "hardware": parsed.hardware}  # fmt: skip
    result["phases"] = {phase: [finding._asdict() for finding in found] for phase, found in findings.items()}
    if failed := [f"{phase}: {finding.rule}" for phase, found in findings.items() for finding in found
                  if finding.status == "FAIL"]:  # fmt: skip
        result["failed"] = f"Rules that fail: {', '.join(failed)}."
    return result
