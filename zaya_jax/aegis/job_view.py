"""One view of a job of several nodes: what its leader wrote last, and the events of all nodes in one list."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.aegis.state import STATE, is_fresh, read_fields
from zaya_jax.aegis.supervision_report import AEGIS, node_folders
from zaya_jax.config.checks import counted
from zaya_jax.errors import InputError, printable

_FIELDS = {"unix": int | float, "state": str, "attempt": int, "why": str}
_FIELDS |= {"needed": int, "nodes": list, "lost": dict, "strangers": int}
_NODE = {"name": str, "state": str, "rank": int | None, "held": int | None}


def read_job(run_dir: Path) -> dict[str, Any]:
    """Read what the leader of a job wrote last; empty if there is none, or it is damaged."""
    job = read_fields(run_dir / AEGIS / STATE, _FIELDS)
    nodes = job.get("nodes", ())
    are_nodes = all(isinstance(node, dict) for node in nodes)
    return job if are_nodes and all(isinstance(n.get(key), kind) for n in nodes for key, kind in _NODE.items()) else {}


def format_job(run_dir: Path) -> str:
    """Format the nodes, ranks and spares of a job; empty if it has only one node."""
    if not (job := read_job(run_dir)):
        return ""
    state = job["state"]
    if state != "ended" and not is_fresh(job):
        state = f"unknown, since the leader has written nothing for {time.time() - job['unix']:,.0f} s"
    lines = [f"Job of {counted(job['needed'], 'node')}: {state}; attempt {job['attempt']}. {job['why']}".strip()]
    for node in sorted(job["nodes"], key=lambda node: (node["rank"] is None, node["rank"] or 0)):
        place = "spare " if node["rank"] is None else f"rank {node['rank']}"
        step = node.get("held") if node["rank"] is None else None  # earlier versions do not write it
        held = "" if step is None else f", has the checkpoint of step {step}"
        unfit = f", cannot replace a node: {text}" if (text := node.get("unfit")) else ""
        lines.append(f"  {place:<8} {node['name']}: {node['state']}{held}{unfit}")
    lines += [f"  lost     {text}" for text in job["lost"].values()]
    if job["strangers"]:
        lines.append(f"  rejected {counted(job['strangers'], 'connection')} without the secret of the job")
    return "\n".join(map(printable, lines))


def merge_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of the leader and all nodes in order of time, but none before its cause.

    Clocks of nodes differ. `InputError` if the run was not supervised.
    """
    folders = [run_dir / AEGIS, *node_folders(run_dir)]
    events = [event for folder in folders for event in read_events(folder / EVENTS)]
    if not events:
        raise InputError(f"{run_dir} was not run under aegis: it contains no {AEGIS}/NODE/{EVENTS}.")
    times = {_key(event): event["unix"] for event in events}
    causes = {_key(event): _cause(event) for event in events}

    def moment(event: Mapping[str, Any]) -> tuple[float, int, float, int]:
        latest, seen, cause = event["unix"], set[tuple[str, int]](), _cause(event)
        while cause is not None and cause not in seen:
            seen.add(cause)
            latest, cause = max(latest, times.get(cause, latest)), causes.get(cause)
        return latest, len(seen), event["unix"], event["id"]

    return sorted(events, key=moment)


def _key(event: Mapping[str, Any]) -> tuple[str, int]:
    return event.get("node", ""), event["id"]


def _cause(event: Mapping[str, Any]) -> tuple[str, int] | None:
    return None if event.get("cause") is None else (event.get("cause_node", event.get("node", "")), event["cause"])


def format_events(run_dir: Path) -> str:
    """Format the events of all nodes, one a line, each with the event that it follows from."""
    lines = []
    for event in merge_events(run_dir):
        cause = _cause(event)
        after = "" if cause is None else f" (after {cause[0]}:{cause[1]})"
        name, what = "{}:{}".format(*_key(event)), f"{event['kind']} {event['code']}"
        lines.append(f"{event['time']}  {name:<16} attempt {event['attempt']}  {what}{after}  {event['text']}".rstrip())
    return "\n".join(map(printable, lines))
