"""Read what the supervisors of a run wrote: faults, what followed from them, goodput, and what they do now."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError
from zaya_jax.run.files import LONGEST_JSON, read_end, read_object
from zaya_jax.run.goodput import measure_goodput

AEGIS = "aegis"  # folder in a run folder, with one folder per node
EVENTS = "events.jsonl"
STATE = "state.json"
VERDICT = "verdict.json"
VERSION = 1  # of the schema of events
_NEEDED = {"id", "attempt", "unix", "time", "kind", "code", "severity", "text"}
_TYPES = {
    "id": int, "attempt": int, "time": str, "kind": str, "code": str, "severity": str, "text": str, "cause": int,
    "fault": str, "rank": int, "step": int, "seconds": dict, "times": dict, "first_step": int, "last_step": int,
    "exit_statuses": list, "monotonic": int | float, "action": str, "explanation": str, "files": list,
}  # fmt: skip
_RANK = {"rank": int, "phase": str, "step": int | None, "first_step": int | None, "loss": int | float | None}
_LONGEST_LINE = 64 * 1024  # bytes of an event that a reader accepts
SAME_FAULT = 120.0  # seconds before the end of an attempt in which a fault may have ended it
_LARGEST = 1e300  # of a number in a state, which may have any
_STALE = 10.0  # seconds after which a state is taken for that of a supervisor that is gone


def node_folders(run_dir: Path) -> list[Path]:
    """Return the folder of each node that supervised the run; none if it was not supervised."""
    return sorted(path.parent for path in (run_dir / AEGIS).glob(f"*/{EVENTS}"))


def describe_nodes(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Describe a run, for JSON: for each node its faults, goodput, verdict and present state."""
    return {folder.name: _describe_node(folder) for folder in node_folders(run_dir)}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the last 64 MiB of the events of one node; none if the file cannot be read."""
    return parse_events(_read_content(path))


def parse_events(content: bytes) -> list[dict[str, Any]]:
    """Return the events of a log, without lines that are torn or no events."""
    events = []
    for line in content.splitlines():
        try:
            event = json.loads(line[:_LONGEST_LINE])
            if event["v"] == VERSION and _is_whole(event):
                events.append({"cause": None, **{key: value for key, value in event.items() if value is not None}})
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            continue
    return events


def _read_content(path: Path) -> bytes:
    try:
        return read_end(path, LONGEST_JSON)
    except OSError:
        return b""


def _is_whole(event: Mapping[str, Any]) -> bool:
    """Return whether an event has the fields of its schema; raises `TypeError` if a number is none."""
    fields = {key: value for key, value in event.items() if value is not None}
    if not all(isinstance(value, _TYPES.get(key, object)) for key, value in fields.items()):
        return False
    numbers = (fields["unix"], fields.get("monotonic", 0), *fields.get("seconds", {}).values(),
               *fields.get("times", {}).values())  # fmt: skip
    has_steps = "first_step" not in fields or 0 <= fields["first_step"] <= fields.get("last_step", -1)
    return fields.keys() >= _NEEDED and has_steps and all(map(math.isfinite, numbers))


def read_state(folder: Path) -> dict[str, Any]:
    """Return what the supervisor of a node does now; {} if there is nothing, or not what a supervisor writes."""
    state = _read(folder / STATE, {"unix": int | float, "ranks": list})
    is_whole = abs(state.get("unix", 0)) < _LARGEST and all(_is_rank(rank, state) for rank in state.get("ranks", ()))
    return state if is_whole else {}


def _is_rank(rank: Any, state: Mapping[str, Any]) -> bool:
    if not isinstance(rank, dict):
        return False
    times, first_step = rank.get("times", {}), rank.get("first_step")
    numbers = (rank.get("loss") or 0, *times.values()) if isinstance(times, dict) else (None,)
    return (all(isinstance(rank.get(key), kind) for key, kind in _RANK.items())
            and all(isinstance(each, int | float) and abs(each) < _LARGEST for each in numbers)
            and (first_step is None or rank.get("step") is not None)
            and ("times" not in rank or isinstance(state.get("attempt"), int)))  # fmt: skip


def is_running(state: Mapping[str, Any]) -> bool:
    """Return whether the supervisor that wrote `state` still runs."""
    return state.get("state") == "running" and time.time() - float(state.get("unix", 0)) < _STALE


def running_attempt(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `measure_goodput` for the attempt that runs by `state`; none if no attempt runs."""
    if not is_running(state):
        return {}
    process, running = next(iter(state.get("ranks", ())), {}), None
    if "times" in process:
        running = {"attempt": state["attempt"], "times": process["times"], "first_step": process.get("first_step"),
                   "last_step": process.get("step")}  # fmt: skip
    return {"now": float(state["unix"]), "running": running}


def _describe_node(folder: Path) -> dict[str, Any]:
    content = _read_content(folder / EVENTS)
    events, state = parse_events(content), read_state(folder)
    verdict = _read(folder / VERDICT, {"exit_code": int, "meaning": str})
    running = is_running(state)
    goodput = measure_goodput(events, **running_attempt(state))
    lines = content.count(b"\n")  # a torn last line has no end
    return {
        "running": running,
        "state": state,
        "unread_events": max(0, lines - len(events)),
        "verdict": {} if running else verdict,
        "faults": list_faults(events),
        "goodput": {"fraction": goodput.fraction, "seconds": goodput.seconds, "attempts": goodput.attempts,
                    "steps": goodput.steps, "wasted_steps": goodput.wasted_steps,
                    "buckets": dict(goodput.buckets)},
    }  # fmt: skip


def list_faults(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List each fault with what followed from it, by the links of the events.

    A fault that ended an attempt is one, however many processes it ended and whatever else the machine said of it.
    """
    faults, follow_ups, ended = [], defaultdict[int, list[Mapping[str, Any]]](list), dict[int, Mapping[str, Any]]()
    for event in events:
        follow_ups[event.get("cause") or 0].append(event)
        if event["kind"] == "end" and event.get("cause"):
            ended[event["attempt"]] = event
    for event in events:
        if event["kind"] != "detect" or event["severity"] == "info":
            continue
        own, last = follow_ups[event["id"]], ended.get(event["attempt"], {})
        is_cause, before = last.get("cause") == event["id"], last.get("unix", math.inf) - event["unix"]
        if not is_cause and last.get("fault", "") == event.get("fault") and before < SAME_FAULT:
            continue  # another sign of the fault that ended the attempt
        end = last if is_cause else event
        recover = next((each for each in own if each["kind"] == "recover"), {})
        decision = next((each for each in own if each["kind"] == "decide"), {})
        faults.append({
            "time": event["time"], "attempt": event["attempt"], "fault": end.get("fault", event.get("fault")),
            "code": end["code"], "rank": end.get("rank", event.get("rank")), "step": event.get("step"),
            "text": end.get("text") or event["text"], "explanation": end.get("explanation", ""),
            "action": decision.get("action"), "rule": decision.get("code"),
            "detect_seconds": event.get("seconds", {}).get("detect"),
            "recover_seconds": recover.get("seconds", {}).get("recover"),
            "files": [file for each in own for file in each.get("files", ())],
        })  # fmt: skip
    return faults


def _read(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    """Read a JSON object; empty if it is missing, or its fields have other types than these."""
    try:
        tree = read_object(path)
    except InputError:  # missing, or being replaced
        return {}
    return tree if all(isinstance(tree.get(key), kind) for key, kind in types.items()) else {}
