"""A drill: train a small run while faults are made in it, and score how the supervisor deals with them.

The same run without faults must end with the same parameters and rows of metrics, bit for bit.
"""

import dataclasses
import functools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.aegis.failure import FaultClass
from zaya_jax.aegis.faults import MARKS, Fault, parse_fault
from zaya_jax.aegis.goodput import Goodput, measure_goodput
from zaya_jax.aegis.processes import die_with_parent
from zaya_jax.aegis.supervision_report import node_folders
from zaya_jax.config import load_config
from zaya_jax.config.checks import counted
from zaya_jax.config.stages import total_steps
from zaya_jax.config.yaml_text import dump_yaml
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.hardware.detection import cpu_name
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.files import write_atomically
from zaya_jax.run.folder import METRICS
from zaya_jax.run.manifest import read_manifest
from zaya_jax.run.options import parse_training
from zaya_jax.run.progress_record import Phase
from zaya_jax.run.table import format_table
from zaya_jax.run.writing import open_file, resolved

CRASHES = ("sigkill", "sigsegv", "sigabrt", "exit1", "exit137", "exception")
HANGS = ("wait", "global-lock", "sigstop")
# Faults that are not drawn, since they take a device or need more memory: their classes.
_OTHERS = {"device-hang": FaultClass.HANG, "host-memory": FaultClass.HOST_MEMORY}
_STARTING = (Phase.OPEN, Phase.RESTORE, Phase.COMPILE)
_STEP = (Phase.DATA, Phase.DISPATCH, Phase.DEVICE_WAIT)  # with a short timeout in drills; the others may compile
_TRAINING = (*_STEP, Phase.EVALUATE, Phase.SAVE)
_SECONDS = ("since_fault", "detect", "recover")

Events = Sequence[Mapping[str, Any]]


def draw_faults(count: int, processes: int, steps: int, every: int, rng: random.Random) -> list[Fault]:
    """Draw `count` faults of `processes` in a run of `steps`, which saves `every` so many, in their order.

    Most happen while the run trains, at rising steps; a fifth during the restart after the fault before.
    """
    faults: list[Fault] = []
    for place in sorted(rng.randrange(1, max(steps - every, 2)) for _ in range(count)):
        name = rng.choice(CRASHES if rng.random() < 0.75 else HANGS)
        starting = faults and name in CRASHES and rng.random() < 0.2
        phase = rng.choice(_STEP if name in HANGS else _STARTING if starting else _TRAINING)
        faults.append(Fault(name, rng.randrange(processes), 0 if starting else place, phase))
    return faults


@dataclasses.dataclass(frozen=True)
class Drill:
    """A drill to run."""

    folder: Path  # new folder for the two runs and the score-card
    trainer: Sequence[str]  # arguments of `zaya_jax.main`, without run_dir
    processes: int  # number of processes
    faults: Sequence[Fault]  # to be made, in order
    hang_seconds: float  # timeout of the phases of a step

    def run(self, say: Callable[[str], object]) -> dict[str, Any]:
        """Run both, and return the score-card, for JSON; `RunStopped` if a run did not finish."""
        if self.folder.exists():
            raise InputError(f"{self.folder} exists. Choose another --folder for the drill, or remove it.")
        options = parse_training(self.trainer)
        config = load_config(options.config, options.overrides)
        steps = total_steps(config)
        self.folder.mkdir(parents=True)
        timeouts = dict.fromkeys((*(phase.name.lower() for phase in _STEP), "floor"), self.hang_seconds)
        unlimited = {"per_hour": 100_000, "delays": [0.0], "same_failure": 1000, "no_progress": 1000}
        write_atomically(self.folder / "policy.yaml", dump_yaml({"timeouts": timeouts, "restart": unlimited}))
        say(f"The undisturbed run: {counted(steps, 'step')} in {counted(self.processes, 'process', 'es')}.")
        quiet = self._train("undisturbed", ())
        say(f"The disturbed run: {counted(len(self.faults), 'fault')}.")
        disturbed = self._train("disturbed", self.faults)
        card = score(self.faults, quiet, disturbed, self.hang_seconds, max(steps // config.checkpoint.every, 1))
        card["identical"] = self._results("undisturbed", steps) == self._results("disturbed", steps)
        return card

    def _train(self, name: str, faults: Sequence[Fault]) -> list[dict[str, Any]]:
        run_dir, marks, log = self.folder / name, self.folder / f"{name}-marks", self.folder / f"{name}.log"
        marks.mkdir()
        python, policy = [sys.executable, "-m"], str(self.folder / "policy.yaml")
        supervisor = ["zaya_jax.aegis", "run", "--policy", policy, "--run-dir", str(run_dir)]
        trainer = ["zaya_jax.aegis.faults", *map(str, faults), "--", *self.trainer, f"run_dir={run_dir}"]
        # Both runs compile the same functions, so they share the cache.
        compiled = str(self.folder / "compiled")
        cache = {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        with open(open_file(log, os.O_WRONLY), "wb") as file:
            status = subprocess.run(  # noqa: S603 (an argument list, without a shell)
                [*python, *supervisor, "--processes", str(self.processes), "--", *python, *trainer],
                env={**cache, **os.environ, MARKS: str(marks)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                check=False,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            ).returncode
        if status:
            raise RunStopped(f"The {name} run ended with exit code {status}. See {log}.")
        return read_events(node_folders(run_dir)[0] / EVENTS)

    def _results(self, name: str, steps: int) -> tuple[object, bytes]:
        run_dir = self.folder / name
        return read_manifest(run_dir / CHECKPOINTS / str(steps)).leaves, (run_dir / METRICS).read_bytes()


def score(faults: Sequence[Fault], quiet: Events, events: Events, hang: float, saves: int) -> dict[str, Any]:
    """Score a drill with `faults`, a timeout of `hang` seconds and so many `saves`, from the `events` of both runs.

    Its `classes` have p50, p95 and n of the seconds `since_fault` until it was detected, `detect`, those of them after
    the timeout in force had expired, and `recover`, until the next step.
    """
    rows = [_follow(event, events, hang) for event in events if event["kind"] == "inject"]
    classes = {
        name: {key: _quantiles(row[key] for row in rows if row["expected"] == name) for key in _SECONDS}
        for name in sorted({row["expected"] for row in rows})
    }
    failures = [event for event in events if event["kind"] == "end" and event["code"] != "finished"]
    alarms = [event for event in quiet if event["kind"] == "detect" and event["severity"] != "info"]
    alarms += [event for event in failures if all(row["attempt"] != event["attempt"] for row in rows)]
    counts = {"faults": len(faults), "made": len(rows), "attempts": sum(event["kind"] == "start" for event in events)}
    attributed, missed = sum(row["attributed"] for row in rows), [row for row in rows if not row["attributed"]]
    times = [
        {"fault": row["fault"], **{key: None if row[key] is None else round(row[key], 3) for key in _SECONDS}}
        for row in rows
    ]
    card = {
        **counts,
        "classes": classes,
        "attributed": attributed / max(len(rows), 1),
        "missed": missed,
        "times": times,
    }
    runs = {"quiet_seconds": measure_goodput(quiet).seconds, "ettr": _ettr(quiet, events, saves)}
    return {**card, "false_alarms": len(alarms), **runs}


def _follow(injected: Mapping[str, Any], events: Events, hang: float) -> dict[str, Any]:
    """Return what followed from a fault: seconds to its detection and to the next step, and its attribution.

    The timeout of a hang begins when nothing that the process waits for makes progress, such as a compilation in
    another one. A process that hangs in a phase with a longer timeout is waited for that long.
    """
    fault, made = parse_fault(injected["code"]), injected["made_at"]
    expected = str(_OTHERS.get(fault.name, FaultClass.HANG if fault.name in HANGS else FaultClass.CRASH))
    ends = (event for event in events if event["kind"] == "end" and event["attempt"] == injected["attempt"])
    end = next(ends, {})
    row: dict[str, Any] = dict.fromkeys(_SECONDS)
    if (detect := next((event for event in events if event["id"] == end.get("cause")), None)) is not None:
        at, expires, seconds = detect["monotonic"], made, detect.get("seconds", {})
        if expected == FaultClass.HANG:
            expires = max(made, at - seconds.get("quiet", math.inf)) + seconds.get("timeout", hang)
        recover = (event["monotonic"] for event in events if event["kind"] == "recover" and event["monotonic"] > at)
        row = {"since_fault": at - made, "detect": at - expires, "recover": next((t - made for t in recover), None)}
    row |= {"fault": str(fault), "attempt": injected["attempt"], "expected": expected}
    row["attributed"] = (end.get("rank"), end.get("fault")) == (fault.process, expected)
    return row | {"said": {key: end.get(key) for key in ("rank", "fault", "code", "text")} if end else None}


def _quantiles(values: Iterable[float | None]) -> dict[str, float]:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return {"n": 0}
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"n": len(ordered), "p50": round(statistics.median(ordered), 4), "p95": round(p95, 4)}


def _ettr(quiet: Events, events: Events, saves: int) -> dict[str, float]:
    """Compare the measured part of time that is not lost to faults and saves with the formula of Young and Daly.

    Predicted is 1 / (1 + δ/τ + (τ/2 + R)/M), with the mean stall of a save δ, the interval of checkpoints τ, the mean
    useful time between faults M, and the mean time R from a detection to the next step. The first start, and what
    follows the last step, are not counted.
    """
    made = [event for event in events if event["kind"] != "inject"]
    first = _starting(measure_goodput([event for event in made if event["attempt"] == made[0]["attempt"]]))
    goodput, undisturbed = measure_goodput(made), measure_goodput(quiet)
    wasted = ("wasted_progress", "infrastructure_recovery", "checkpoint_save")
    lost = _starting(goodput) - first + sum(goodput.buckets[bucket] for bucket in wasted)
    seconds = goodput.seconds - first - goodput.buckets["other"]
    # A fault during a restart prolongs the recovery from the one before, so outages are counted, not faults.
    outages = [event["seconds"]["recover"] for event in events if event["kind"] == "recover"]
    if not outages or seconds <= 0:
        return {"measured": 1.0, "predicted": 1.0}
    useful = seconds - lost
    stall = undisturbed.buckets["checkpoint_save"] / saves
    interval = (undisturbed.seconds - _starting(undisturbed) - undisturbed.buckets["other"]) / saves
    per_fault = statistics.mean(outages) + interval / 2
    predicted = 1 / (1 + stall / interval + len(outages) * per_fault / useful)
    return {"measured": round(useful / seconds, 4), "predicted": round(predicted, 4)}


def _starting(goodput: Goodput) -> float:
    """Return the seconds that starts took, from the command to the first step."""
    phases = ("device_initialization", "training_preparation", "program_startup", "checkpoint_restore")
    return sum(goodput.buckets[phase] for phase in phases)


def format_card(card: Mapping[str, Any]) -> str:
    """Format a score-card as text."""
    same, ettr = "identical to" if card["identical"] else "NOT those of", card["ettr"]
    rows = [["class", "n", "detect p50", "p95", "next step p50", "p95"]]
    for name, row in card["classes"].items():
        quantiles = [row[key].get(each, math.nan) for key in ("detect", "recover") for each in ("p50", "p95")]
        rows.append([name, str(row["detect"]["n"]), *(f"{seconds:.2f} s" for seconds in quantiles)])
    lines = [
        f"{card['made']} of {card['faults']} faults made in {card['attempts']} attempts; the results are {same} the "
        "undisturbed run.",
        *format_table(rows),
        f"Attributed to the right process and class: {card['attributed']:.1%}. False alarms: {card['false_alarms']}.",
        *(f"  missed: {row['fault']} -> {row['said']}" for row in card["missed"]),
        f"ETTR {ettr['measured']:.1%}, by the formula {ettr['predicted']:.1%}.",
    ]
    return "\n".join(lines)


def write_card(card: Mapping[str, Any], path: Path, command: str) -> None:
    """Write a score-card with the command and the machine that it comes from."""
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version(), "jax": version("jax")}
    write_atomically(resolved(path), json.dumps({"command": command, **machine, **card}, indent=1) + "\n")
