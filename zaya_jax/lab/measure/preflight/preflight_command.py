"""The verb `preflight` of `python -m zaya_jax.machine`."""

import argparse
from typing import Any

from zaya_jax.config import load_config
from zaya_jax.config.checks import require
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset, keep_compilations
from zaya_jax.hardware.measurements import recorded_result
from zaya_jax.lab.verbs import add_config, add_flags, add_verb, run_in_job
from zaya_jax.run.options import add_job

VERB = "preflight"


def add(verbs: Any, program: str) -> None:
    """Add the verb to the parser of `program`."""
    verb = add_verb(verbs, program, _run)
    add_config(verb)
    verb.add_argument("--baseline", metavar="FILE", help="result of an earlier preflight to compare with (default: "
                      "that in the folder `measurements` of the configuration, if there is one)")  # fmt: skip
    verb.add_argument("--tolerance", type=float, default=15.0, metavar="PERCENT", help="how much slower than the other "
                      "devices, or than the baseline, a device or collective may be (default: 15)")  # fmt: skip
    add_job(verb)
    add_flags(verb)


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Check the devices of a job before it trains, and name slow ones.

    Checks the kernels that the configuration selects, the speed of each device, and the results and bandwidth of
    collectives, in about two minutes. Start it like training for a job of several processes. The exit status is 1 if a
    check fails.

    preflight configs/zaya1_8b.yaml --output preflight.json
    """
    require(0 < parsed.tolerance < 100, "--tolerance", parsed.tolerance, "above 0 and below 100")
    config = load_config(parsed.config, parsed.overrides)
    baseline = recorded_result(VERB, parsed.baseline, config.measurements)
    preset = select_preset(config.preset)
    apply_preset(preset)
    keep_compilations()
    source = f"--baseline {parsed.baseline}" if parsed.baseline else f"The result of preflight in {config.measurements}"

    def work() -> dict[str, Any]:
        from zaya_jax.lab.measure.preflight.run import preflight

        return preflight(config, baseline, source, parsed.tolerance / 100)

    return run_in_job(parsed, preset, work)
