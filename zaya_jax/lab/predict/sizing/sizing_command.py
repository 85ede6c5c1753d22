"""The verb `sizing` of `python -m zaya_jax.machine`."""

import argparse
import gc
from typing import Any

from zaya_jax.config import Config, load_config
from zaya_jax.config.checks import require
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.verbs import add_config, add_flags, add_verb


def add(verbs: Any, program: str) -> None:
    """Add the verb to the parser of `program`."""
    verb = add_verb(verbs, program, _run)
    add_config(verb)
    names = f"{', '.join(HARDWARE)}, a file of make gpu-report, or a folder with results of gemm and memory"
    flag, only = verb.add_argument, "--suggest only; default:"
    flag("--devices", type=int, default=8, metavar="N", help="number of devices (default: 8)")
    flag("--hardware", default="mi300x", metavar="NAME", help=f"hardware (default: mi300x): {names}")
    measured = "folder with results of collectives and gemm on this hardware (default: --hardware, if it is a folder)"
    flag("--measured", metavar="FOLDER", help=measured)
    searched = "widths, experts, layers, layout, remat and micro-batch for fast training and decoding; takes minutes"
    flag("--suggest", action="store_true", help=f"search {searched}")
    flag("--phase", metavar="NAME", help=f"phase to train ({only} the first)")
    band = f"largest difference from the configuration's parameters, total and active ({only} 5)"
    flag("--band", type=float, metavar="PERCENT", help=band)
    depths = f"range of the number of layers ({only} half to twice the configuration's)"
    flag("--layers", type=int, nargs=2, metavar=("LOW", "HIGH"), help=depths)
    add_flags(verb, png="the Pareto front (--suggest only)")


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Check the sizes of a configuration against the rules for a GPU.

    Prints PASS, WARN or FAIL for each rule and phase, with the predicted loss of time where a rule gives one; OPEN if a
    measurement is missing. No GPU is needed. The exit status is 1 if a rule fails. With --suggest it prints other
    widths with about as many parameters instead: those that no others beat in both training throughput and decode
    latency.

    sizing configs/zaya1_8b.yaml --devices 1024 --hardware mi300x
    """
    require(parsed.devices >= 1, "--devices", parsed.devices, "at least 1")
    for flag in ("phase", "band", "layers", "png"):
        if getattr(parsed, flag) is not None and not parsed.suggest:
            raise InputError(f"--{flag} needs --suggest.")
    config = load_config(parsed.config, parsed.overrides)
    request = _check_request(parsed, config) if parsed.suggest else None
    from zaya_jax.lab.predict.calibration import get_device
    from zaya_jax.lab.predict.sizing.rules import Measured, check_sizing, read_measured
    from zaya_jax.lab.predict.sizing.shapes import lines, suggest_shapes
    from zaya_jax.lab.predict.step_time import basis
    from zaya_jax.lab.result import print_tables
    from zaya_jax.lab.result_tables import TABLES

    hardware = get_device(parsed.hardware, parsed.devices)
    folder = parsed.measured or (None if parsed.hardware in HARDWARE or hardware.rated else parsed.hardware)
    source = "--measured" if parsed.measured else "--hardware"
    measured = Measured() if folder is None else read_measured(folder, source, config.model)
    print(basis(hardware, parsed.hardware))
    result: dict[str, Any] = {key: getattr(parsed, key) for key in ("config", "overrides", "devices", "hardware")}
    if request is not None:
        gc.freeze()  # tracing makes many objects: a search for garbage should not visit all that was imported
        result |= suggest_shapes(config, parsed.devices, hardware, measured, *request)
        print("\n".join(lines(result, parsed.devices, parsed.hardware)))
        return result
    findings = check_sizing(config, parsed.devices, hardware, measured)
    result["phases"] = {phase: [finding._asdict() for finding in found] for phase, found in findings.items()}
    print(f"Sizing rules for training on {parsed.devices:,} × {parsed.hardware}\n")
    print_tables(TABLES["sizing"](result))
    failed = [f"{phase}: {x.rule}" for phase, found in findings.items() for x in found if x.status == "FAIL"]
    if failed:
        result["failed"] = f"Rules that fail: {', '.join(failed)}."
    return result


def _check_request(parsed: argparse.Namespace, config: Config) -> tuple[int, float, tuple[int, int]]:
    """Return the index of the phase, the band as a fraction, and the range of layers."""
    names, depth = [phase.name for phase in config.phases], config.model.num_layers
    phase = names[0] if parsed.phase is None else parsed.phase
    band = 5.0 if parsed.band is None else parsed.band
    low, high = parsed.layers or (max(1, depth // 2), 2 * depth)
    require(phase in names, "--phase", phase, f"one of {', '.join(names)}")
    require(0 < band <= 100, "--band", band, "above 0 and at most 100")
    require(1 <= low <= high, "--layers", f"{low} {high}", "LOW, at least 1, and HIGH, at least LOW")
    for key in ("init_from", "resume_from"):
        if (source := getattr(config, key)) is not None:
            fixed = f"those of {key}={source} are fixed: set {key}=null"
            raise InputError(f"--suggest changes the widths of the model, but {fixed}.")
    return names.index(phase), band / 100, (low, high)
