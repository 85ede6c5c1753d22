"""The history of a run, from the files of its supervisors: `status` shows the present state, `report` all of it."""

from pathlib import Path
from typing import Any

from zaya_jax.config.checks import counted
from zaya_jax.errors import InputError, printable
from zaya_jax.run.supervision import AEGIS, EVENTS, describe_nodes, node_folders


def supervisor_folders(run_dir: Path) -> list[Path]:
    """Return the folder of each node that supervised the run.

    Raises:
      InputError: the run was not supervised.
    """
    folders = node_folders(run_dir)
    if not folders:
        raise InputError(f"{run_dir} was not run under aegis: it contains no {AEGIS}/NODE/{EVENTS}.")
    return folders


def describe_run(run_dir: Path) -> dict[str, Any]:
    """Describe a run, for JSON: for each node its faults, goodput, verdict and present state.

    Raises:
      InputError: the run was not supervised.
    """
    supervisor_folders(run_dir)
    return describe_nodes(run_dir)


def format_report(run_dir: Path) -> str:
    """Format the report of a run as text."""
    return "\n\n".join(_format_node(name, node) for name, node in describe_run(run_dir).items())


def _format_node(name: str, node: dict[str, Any]) -> str:
    goodput, faults, verdict = node["goodput"], node["faults"], node["verdict"]
    lines = [f"Node {name}: {counted(goodput['attempts'], 'attempt')}, {counted(len(faults), 'fault')}, "
             f"{counted(goodput['steps'], 'step')} done, {goodput['wasted_steps']:,} done again"]  # fmt: skip
    if node["unread_events"]:
        lines.append(f"Left out: {counted(node['unread_events'], 'line')} of {EVENTS}, damaged or of another version")
    if node["running"]:
        lines += _format_ranks(node["state"])
    if verdict:
        lines.append(f"Ended with exit code {verdict.get('exit_code')} ({verdict.get('meaning')}): "
                     f"{verdict.get('why')}")  # fmt: skip
    for fault in faults:
        place = "" if fault["rank"] is None else f" of process {fault['rank']}"
        step = "" if fault["step"] is None or fault["step"] < 0 else f" after step {fault['step']}"
        seconds = fault["recover_seconds"]
        after = "" if seconds is None else f", training again after {seconds:.1f} s"
        lines.append(f"  {fault['time']}  {fault['fault']}: {fault['code']}{place}{step} -> "
                     f"{fault['action'] or 'no action'}{after}")  # fmt: skip
        lines += [f"      {text}" for text in (fault["text"], fault["explanation"]) if text]
    lines.append(f"Goodput {100 * goodput['fraction']:.1f} % of {goodput['seconds']:,.1f} s:")
    lines += [f"  {bucket:<24}{seconds:>12,.1f} s{100 * seconds / max(goodput['seconds'], 1e-9):>8.1f} %"
              for bucket, seconds in goodput["buckets"].items() if seconds]  # fmt: skip
    return "\n".join(map(printable, lines))


def _format_ranks(state: dict[str, Any]) -> list[str]:
    rows = [f"Attempt {state.get('attempt')}:"]
    for rank in state.get("ranks", ()):
        loss = rank.get("loss")
        rows.append(f"  process {rank.get('rank')} (pid {rank.get('pid')}): {rank.get('phase')}, step "
                    f"{'-' if rank.get('step') is None else rank['step']}, loss "
                    f"{'-' if loss is None else f'{loss:.4f}'}")  # fmt: skip
    return rows


def format_status(run_dir: Path) -> str:
    """Format what the supervisors of a run do now, in a few lines."""
    lines = []
    for name, node in describe_run(run_dir).items():
        goodput: dict[str, Any] = node["goodput"]
        verdict = node["verdict"]
        what = "running" if node["running"] else (
            f"ended with exit code {verdict['exit_code']} ({verdict['meaning']})" if verdict
            else "gone without a verdict"
        )  # fmt: skip
        lines.append(f"Node {name}: {what}; {counted(len(node['faults']), 'fault')}, goodput "
                     f"{100 * goodput['fraction']:.1f} % of {goodput['seconds']:,.0f} s")  # fmt: skip
        lines += _format_ranks(node["state"]) if node["running"] else []
    return "\n".join(map(printable, lines))
