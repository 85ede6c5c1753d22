"""Run the parts of the report, each in its own process: one that fails, crashes or hangs leaves the others to run."""

import functools
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.benchmark_command import share_device
from benchmarks.gpu_report import speed
from benchmarks.gpu_report.attention_cases import measure_attention
from benchmarks.gpu_report.calibration import calibration, configurations
from benchmarks.gpu_report.determinism import measure_determinism
from benchmarks.gpu_report.report_file import REPORT, figures_table, read_report, write_report
from benchmarks.gpu_report.state import measure_state
from benchmarks.gpu_report.supervisor import measure_supervisor
from benchmarks.gpu_report.training import measure_training
from zaya_jax.config.checks import require
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset
from zaya_jax.lab.measure import context_attention as context
from zaya_jax.lab.measure.installation import describe_machine
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.lab.subprocesses import restored_environment, run_in_subprocess
from zaya_jax.ops.kernel_table import own_table
from zaya_jax.ops.registry import OPERATIONS, check_operations
from zaya_jax.ops.selfcheck import EXAMPLE
from zaya_jax.ops.target import current_target
from zaya_jax.run.files import expanded, explained, read_json
from zaya_jax.run.writing import make_folder

_PACKAGES = ("jax-rocm7-plugin", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint")


class Part(NamedTuple):
    """A part of the report; `work` can be pickled."""

    seconds: float  # it is ended after them
    work: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...] = ()


_MACHINE = Part(60, describe_machine)


def make_parts(small: bool, devices: int, report: Path) -> dict[str, Part]:
    """Return the parts after `machine`, in the order in which they run.

    Sizes are `small` on a CPU; the file `report` has the recordings.
    """
    parts = {
        "operations": Part(60, _check_operations, (small,)),
        "attention": Part(150, measure_attention, (small,)),
        "determinism": Part(110, measure_determinism, (small,)),
        "step": Part(100, speed.measure_step, (small, "data")),
        "training": Part(170, measure_training, (small,)),
        "supervisor": Part(150, measure_supervisor, (small, 145)),
        "state": Part(205, measure_state, (small, 195)),
        "kernels": Part(105, speed.measure_kernels, (small,)),
        "tune": Part(270, speed.measure_tuning, (small, 240)),
        "step_tuned": Part(100, speed.measure_tuned_step, (small, report)),
        "decode": Part(70, speed.measure_decode, (small,)),
    }
    if not small:  # on a CPU it is the same program
        parts["step_deterministic"] = Part(100, speed.measure_step, (small, "data", True))
    if devices > 1:
        sizes = context.Sizes((512,), "float32", degrees=(1, 4)) if small else context.GPU
        parts["collectives"] = Part(100, speed.measure_collectives, (small,))
        parts["step_fsdp"] = Part(100, speed.measure_step, (small, "fsdp"))
        parts["context"] = Part(180, context.measure_context, (sizes, 2 if small else 5))
    return parts


def _check_operations(small: bool) -> dict[str, Any]:
    names, dtypes = (("residual_norm", "router"), ("float32",)) if small else (OPERATIONS, ("float32", "bfloat16"))
    result = check_operations(current_target(), EXAMPLE, dtypes, tuple(names))
    errors = {f"error of {name}": [row["error"], f"of {row['tolerance']:g}"] for name, row in result["errors"].items()}
    return result | {"figures": errors}


def gpu_report(folder: str, only: Collection[str], minutes: float, commit: str | None) -> dict[str, Any]:
    """Run the parts, print a table of their figures, and write all to `FOLDER/DEVICE.json` after each of them.

    These are the parts in `only`, or those that are not yet recorded for this code and device. No part starts that
    might end after so many minutes. Returns the recordings of all `parts`, and the names of those `failed` and `left`.
    """
    end = time.monotonic() + 60 * minutes
    require(minutes > 0, "--minutes", minutes, "above 0")
    with restored_environment():
        apply_preset(select_preset(None))  # like zaya_jax.main
        share_device()
        machine = run_part("machine", _MACHINE, _MACHINE.seconds)
        if "platform" not in machine:
            raise RunStopped(f"This machine cannot be described: {machine['failed']}")
        small, device = machine["platform"] == "cpu", machine.get("device", "unknown")
        report = expanded(folder) / own_table(device).name
        parts = {"machine": _MACHINE, **make_parts(small, machine.get("devices", 1), report)}
        if unknown := [name for name in only if name not in parts]:
            raise InputError(f"--only is {unknown[0]!r}, but must be one of {', '.join(parts)}.")
        if small:
            print("JAX found no GPU: running every part on the CPU, at a small size.", flush=True)
        header = _make_header(machine, commit)
        with explained(f"--folder ({folder}) cannot be written"):
            make_folder(report.parent)
        recordings, left = {}, []
        recorded: Mapping[str, Any] = {}
        if report.exists():
            recorded, problems = (earlier := read_report(report)).parts, earlier.problems
            print("".join(f"{report}: {problem}\n" for problem in problems), end="", flush=True)
        adopted = {path.name: read_json(path) for path in report.with_suffix("").glob("*.json")}
        origin = ("commit", "hardware", "versions", "size")
        alike = {name for name, row in recorded.items() if all(row.get(key) == header[key] for key in origin)}
        # What has failed with this code comes last, so that it keeps no time from the others.
        failed = {name for name in alike if "failed" in recorded[name]}
        is_known = not (header["commit"] or "-dirty").endswith("-dirty")
        for name in sorted(parts, key=failed.__contains__):
            part = parts[name]
            if only and name not in only:
                continue
            if name != "machine" and not only and is_known and name in alike - failed:
                print(f"== {name}: recorded before", flush=True)
                recordings[name] = recorded[name]
            elif name != "machine" and end < time.monotonic() + part.seconds:
                left.append(name)
            else:
                # The limits are those of a GPU; a CPU that others use, too, may take longer.
                result = machine if name == "machine" else run_part(name, part, 60 * minutes if small else part.seconds)
                date = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "part": name}
                recordings[name] = {**result, **date, **header}
                write_report(report, device, recorded | recordings)
    print()
    print_tables([figures_table(recordings, adopted)])
    post = f"The report is {report}: please post this file in an issue."
    print("\n".join(["", *summary(recordings, left), post]), flush=True)
    if found := configurations(recorded | recordings):
        write_report(report, device, recorded | recordings, calibration=calibration(found))
        print(f"Predictions read what was measured: --hardware {report}")
    failed = [name for name, part in recordings.items() if "failed" in part]
    return {"parts": recordings, "failed": failed, "left": left}


def _make_header(machine: Mapping[str, Any], commit: str | None) -> dict[str, Any]:
    """Return what all recordings of this code on this machine have in common."""
    header = describe_run(REPORT, "small" if machine["platform"] == "cpu" else "full", "", _PACKAGES)
    driver = " ".join(machine.get("drivers", {}).values())
    header["hardware"] |= {"device": machine.get("device", "unknown"), "driver": driver}
    return header | {"commit": commit or _commit()}


def run_part(name: str, part: Part, seconds: float) -> dict[str, Any]:
    """Run a part in its own process, which is killed after `seconds`; `failed` of its result says why it failed."""
    print(f"== {name}", flush=True)
    start = time.monotonic()
    try:
        with run_in_subprocess(functools.partial, part.work, *part.arguments, seconds=seconds) as step:
            result: dict[str, Any] = step()
    except (InputError, RuntimeError) as error:
        result = {"failed": str(error)}
    result["seconds"] = round(time.monotonic() - start, 1)
    print(f"   {result.get('failed') or result.get('skipped') or 'passed'} ({result['seconds']} s)", flush=True)
    return result


def summary(recordings: Mapping[str, Mapping[str, Any]], left: Sequence[str]) -> list[str]:
    """Return which parts passed, were skipped, failed, and are left, as lines of text."""
    by_end: dict[str, list[str]] = {"Passed": [], "Skipped": [], "Failed": []}
    for name, part in recordings.items():
        by_end["Failed" if "failed" in part else "Skipped" if "skipped" in part else "Passed"].append(name)
    lines = [f"{end}: {'; '.join(names)}" for end, names in by_end.items() if names]
    return [*lines, f"No time for: {'; '.join(left)}. Run the command again to resume."] if left else lines


def _commit() -> str | None:
    """Return the commit of the tree that this module is in; None if it is in none, or git is not installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    others = [".", ":!benchmarks/gpu"]  # without the recordings themselves
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], text=True, capture_output=True, check=True)  # noqa: S603
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *others], check=False)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("-dirty" if changed.returncode else "")
