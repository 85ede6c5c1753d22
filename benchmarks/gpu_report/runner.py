"""Run the parts of the report, each in its own process, and write a JSON file for each as it ends.

A part that fails, crashes or hangs leaves the others to run. A second call goes on with the parts that the first one
left.
"""

import functools
import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_report.parts import Part, make_parts
from zaya_jax.config.checks import require
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset
from zaya_jax.lab.measure.describe import describe_machine
from zaya_jax.lab.result import describe_run, print_tables, write_result
from zaya_jax.lab.subprocesses import restored_environment, run_in_subprocess
from zaya_jax.run.files import expanded, read_json
from zaya_jax.run.table import Table, make_table, number
from zaya_jax.run.writing import make_folder

_PACKAGES = ("jax-rocm7-plugin", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint")
_MACHINE = Part(60.0, describe_machine)


class Origin(NamedTuple):
    """The code, device and size of a recording; the same origin is not measured again."""

    commit: str | None
    device: str
    driver: str
    versions: Mapping[str, str]
    size: str


def gpu_report(folder: str, only: Collection[str], minutes: float, commit: str | None) -> dict[str, Any]:
    """Run the parts, print a table of their figures, and write each part to `FOLDER/DEVICE/PART.json`.

    Args:
      folder: FOLDER; created if missing.
      only: names of the parts to run; empty for those that are not yet recorded for this code and device.
      minutes: after which no further part starts that might take longer than what is left.
      commit: commit of this code; None to ask git.

    Returns:
      The recordings of all `parts` by name, the names of those that `failed`, and of those that are `left`.

    Raises:
      InputError: `only` contains an unknown name, or FOLDER cannot be written.
    """
    start = time.monotonic()
    require(minutes > 0, "--minutes", minutes, "above 0")
    with restored_environment():
        apply_preset(select_preset(None))  # like zaya_jax.main
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU
        machine = run_part("machine", _MACHINE, _MACHINE.seconds)
        if "platform" not in machine:
            raise RunStopped(f"This machine cannot be described: {machine['failed']}")
        device, small = machine.get("device", "unknown"), machine.get("platform", "cpu") == "cpu"
        target = expanded(folder) / re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
        parts = {"machine": _MACHINE, **make_parts(small, machine.get("devices", 1), target)}
        if unknown := [name for name in only if name not in parts]:
            raise InputError(f"--only is {unknown[0]!r}, but must be one of {', '.join(parts)}.")
        if small:
            print("JAX found no GPU: running every part on the CPU, at a small size.", flush=True)
        header = describe_run("GPU report", "small" if small else "full", "", _PACKAGES)
        driver = " ".join(machine.get("drivers", {}).values())
        header["hardware"] |= {"device": device, "driver": driver}
        origin = Origin(commit or _commit(), device, driver, header["versions"], header["size"])
        try:
            make_folder(target)
        except OSError as error:
            raise InputError(f"--folder ({folder}) cannot be written: {error.strerror}.") from error
        recordings, left = {}, []
        recorded = {name: _read(target / f"{name}.json") for name in parts}
        # What has failed with this code comes last, so that it keeps no time from the others.
        for name in sorted(parts, key=lambda name: "failed" in recorded[name] and _origin(recorded[name]) == origin):
            part, path, before = parts[name], target / f"{name}.json", recorded[name]
            is_known = origin.commit is not None and not origin.commit.endswith("-dirty")
            is_recorded = is_known and _origin(before) == origin and "failed" not in before
            if not only and name != "machine" and is_recorded:
                print(f"== {name}: recorded before", flush=True)
                recordings[name] = before
            elif only and name not in only:
                continue
            elif name != "machine" and start + 60 * minutes < time.monotonic() + part.seconds:
                left.append(name)
            else:
                # The limits are those of a GPU; a CPU that others use, too, may take longer.
                limit = 60 * minutes if small else part.seconds
                result = machine if name == "machine" else run_part(name, part, limit)
                recordings[name] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "part": name,
                                    "commit": origin.commit, **header, **result,
                                    "before": _last(before, origin)}  # fmt: skip
                write_result(recordings[name], str(path))
    print()
    print_tables([figures_table(recordings)])
    print(
        "\n".join(["", *summary(recordings, left), f"The results are in {target}; please post its files in an issue."])
    )
    return {"parts": recordings, "failed": [name for name, part in recordings.items() if "failed" in part],
            "left": left}  # fmt: skip


def run_part(name: str, part: Part, seconds: float) -> dict[str, Any]:
    """Run a part in its own process, which is killed after `seconds`.

    Returns:
      The part's result, with the `seconds` that it took, and `failed`, a sentence, if it failed.
    """
    print(f"== {name}", flush=True)
    start = time.monotonic()
    try:
        with run_in_subprocess(functools.partial, part.work, seconds=seconds) as step:
            result: dict[str, Any] = step()
    except (InputError, RuntimeError) as error:
        result = {"failed": str(error)}
    result["seconds"] = round(time.monotonic() - start, 1)
    print(f"   {result.get('failed') or result.get('skipped') or 'passed'} ({result['seconds']} s)", flush=True)
    return result


def figures_table(recordings: Mapping[str, Mapping[str, Any]]) -> Table:
    """Make the table of all figures, beside those of the recording before and beside predictions."""
    rows = []
    for name, part in recordings.items():
        before = part.get("before") or {}
        for figure, (value, unit, *predicted) in part.get("figures", {}).items():
            last = before.get("figures", {}).get(figure, [None])[0]
            rows.append({"part": name, "figure": figure, "unit": unit, "value": value, "last": last,
                         "ratio": value / last if value is not None and last else None,
                         "predicted": predicted[0] if predicted else None})  # fmt: skip

    def value(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: number(row[key])

    return make_table("Figures", rows, {
        "part": "part", "figure": "figure", "unit": "unit", "measured": value("value"), "predicted": value("predicted"),
        "last time": value("last"), "measured/last": value("ratio"),
    })  # fmt: skip


def summary(recordings: Mapping[str, Mapping[str, Any]], left: Sequence[str]) -> list[str]:
    """Return which parts passed, were skipped, failed, and are left, as lines of text."""
    by_end: dict[str, list[str]] = {"Passed": [], "Skipped": [], "Failed": []}
    for name, part in recordings.items():
        by_end["Failed" if "failed" in part else "Skipped" if "skipped" in part else "Passed"].append(name)
    lines = [f"{end}: {'; '.join(names)}" for end, names in by_end.items() if names]
    return [*lines, f"No time for: {'; '.join(left)}. Run the command again to resume."] if left else lines


def _read(path: Path) -> dict[str, Any]:
    """Return a recording; {} if there is none, or none that can be read."""
    try:
        content = read_json(path)
    except InputError:
        return {}
    whole = isinstance(content, dict) and isinstance(content.get("figures", {}), dict)
    return content if whole and isinstance(content.get("hardware", {}), dict) else {}


def _origin(recording: Mapping[str, Any]) -> Origin:
    hardware = recording.get("hardware", {})
    return Origin(recording.get("commit"), hardware.get("device", ""), hardware.get("driver", ""),
                  recording.get("versions", {}), recording.get("size", ""))  # fmt: skip


def _last(recording: Mapping[str, Any], origin: Origin) -> dict[str, Any] | None:
    """Return what to compare a new recording with: this one, or what it was compared with if it says nothing new."""
    if not recording.get("figures") or _origin(recording) == origin:
        return recording.get("before")
    return {key: recording.get(key) for key in ("date", "commit", "versions", "figures")}


def _commit() -> str | None:
    """Return the commit of the tree that this module is in; None if it is in none, or git is not installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], text=True, capture_output=True, check=True)  # noqa: S603
        # Without the recordings themselves.
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/gpu"], check=False)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("-dirty" if changed.returncode else "")
