"""The history of a run, from the files of its supervisors: `status` shows the present state, `report` all of it."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.aegis.events import EVENTS, parse_events, read_content
from zaya_jax.aegis.goodput import measure_goodput
from zaya_jax.aegis.state import VERDICT, is_running, read_fields, read_state, running_attempt
from zaya_jax.config.checks import counted
from zaya_jax.errors import InputError, printable

AEGIS = "aegis"  # folder in a run folder, with one folder per node
SAME_FAULT = 120.0  # seconds before the end of an attempt in which a fault may have ended it


def node_folders(run_dir: Path) -> list[Path]:
    """Return the folder of each node that supervised the run; none if it was not supervised."""
    return sorted(path.parent for path in (run_dir / AEGIS).glob(f"*/{EVENTS}"))


def describe_nodes(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Describe a run, for JSON: for each node its faults, goodput, verdict and present state."""
    return {folder.name: _describe_node(folder) for folder in node_folders(run_dir)}


def _describe_node(folder: Path) -> dict[str, Any]:
    content = read_content(folder / EVENTS)
    events, state = parse_events(content), read_state(folder)
    goodput, running = measure_goodput(events, **running_attempt(state)), is_running(state)
    return {
        "running": running,
        "state": state,
        "unread_events": max(0, content.count(b"\n") - len(events)),  # a torn last line has no end
        "verdict": {} if running else read_fields(folder / VERDICT, {"exit_code": int, "meaning": str}),
        "faults": list_faults(events),
        "goodput": {"fraction": goodput.fraction, **dataclasses.asdict(goodput)},
    }


def list_faults(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List each fault with what followed from it; one for an attempt that ended, whatever else was logged about it."""
    faults, follow_ups, ended = [], defaultdict[int, list[Mapping[str, Any]]](list), dict[int, Mapping[str, Any]]()
    for event in events:
        follow_ups[0 if "cause_node" in event else event.get("cause") or 0].append(event)
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
        fault: dict[str, Any] = {key: end.get(key, event.get(key)) for key in ("fault", "code", "rank")}
        fault |= {key: event.get(key) for key in ("time", "attempt", "step")}
        fault |= {"text": end.get("text") or event["text"], "explanation": end.get("explanation", "")}
        fault |= {"action": decision.get("action"), "rule": decision.get("code")}
        for key, each in (("detect", event), ("recover", recover)):
            fault[f"{key}_seconds"] = each.get("seconds", {}).get(key)
        faults.append(fault | {"files": [file for each in own for file in each.get("files", ())]})
    return faults


def describe_run(run_dir: Path) -> dict[str, Any]:
    """Return `describe_nodes` of a run; `InputError` if it was not supervised."""
    if not (nodes := describe_nodes(run_dir)):
        raise InputError(f"{run_dir} was not run under aegis: it contains no {AEGIS}/NODE/{EVENTS}.")
    return nodes


def format_report(run_dir: Path) -> str:
    """Format the report of a run as text."""
    return "\n\n".join(_format_node(name, node) for name, node in describe_run(run_dir).items())


def _format_node(name: str, node: dict[str, Any]) -> str:
    goodput, faults, verdict = node["goodput"], node["faults"], node["verdict"]
    steps = f"{counted(goodput['steps'], 'step')} done, {goodput['wasted_steps']:,} done again"
    lines = [f"Node {name}: {counted(goodput['attempts'], 'attempt')}, {counted(len(faults), 'fault')}, {steps}"]
    if node["unread_events"]:
        lines.append(f"Left out: {counted(node['unread_events'], 'line')} of {EVENTS}, damaged or of another version")
    lines += _format_ranks(node)
    if verdict:
        lines.append(f"Ended with {_format_end(verdict)}: {verdict.get('why')}")
    for fault in faults:
        place = "" if fault["rank"] is None else f" of process {fault['rank']}"
        step = "" if fault["step"] is None or fault["step"] < 0 else f" after step {fault['step']}"
        seconds, action = fault["recover_seconds"], fault["action"] or "no action"
        after = "" if seconds is None else f", training again after {seconds:.1f} s"
        lines.append(f"  {fault['time']}  {fault['fault']}: {fault['code']}{place}{step} -> {action}{after}")
        lines += [f"      {text}" for text in (fault["text"], fault["explanation"]) if text]
    total = goodput["seconds"]
    lines.append(f"Goodput {100 * goodput['fraction']:.1f} % of {total:,.1f} s:")
    spent = {bucket: seconds for bucket, seconds in goodput["buckets"].items() if seconds}
    for bucket, seconds in spent.items():
        lines.append(f"  {bucket:<24}{seconds:>12,.1f} s{100 * seconds / max(total, 1e-9):>8.1f} %")
    return "\n".join(map(printable, lines))


def _format_end(verdict: dict[str, Any]) -> str:
    return f"exit code {verdict['exit_code']} ({verdict['meaning']})"


def _format_ranks(node: dict[str, Any]) -> list[str]:
    rows = [f"Attempt {node['state'].get('attempt')}:"] if node["running"] else []
    for rank in node["state"].get("ranks", ()) if node["running"] else ():
        step, loss = ("-" if rank.get(key) is None else rank[key] for key in ("step", "loss"))
        loss = loss if isinstance(loss, str) else f"{loss:.4f}"
        rows.append(f"  process {rank['rank']} (pid {rank.get('pid')}): {rank['phase']}, step {step}, loss {loss}")
    return rows


def format_status(run_dir: Path) -> str:
    """Format what the supervisors of a run do now, in a few lines."""
    lines = []
    for name, node in describe_run(run_dir).items():
        goodput, verdict = node["goodput"], node["verdict"]
        ended = f"ended with {_format_end(verdict)}" if verdict else "gone without a verdict"
        fraction = f"goodput {100 * goodput['fraction']:.1f} % of {goodput['seconds']:,.0f} s"
        what = "running" if node["running"] else ended
        lines += [f"Node {name}: {what}; {counted(len(node['faults']), 'fault')}, {fraction}", *_format_ranks(node)]
    return "\n".join(map(printable, lines))
