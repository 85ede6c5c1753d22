"""A page that shows what a run does now: steps, nodes, phases, faults and the newest events. It runs no script."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from zaya_jax.aegis.job_view import format_job, merge_events
from zaya_jax.aegis.supervision_report import describe_nodes
from zaya_jax.run.folder import METRICS, TIMINGS
from zaya_jax.run.metrics import read_last_row
from zaya_jax.run.page import render
from zaya_jax.run.table import Cell, Row, Table, make_table, quantity, same

SECONDS = 2  # between two loads
_MOST = 20  # rows of faults and events


def render_live(run_dir: Path) -> str:
    """Return the page; what cannot be read is missing, and the page says so."""
    nodes: dict[str, dict[str, Any]] = {}

    def job() -> str:
        nodes.update(describe_nodes(run_dir))
        return format_job(run_dir)

    def training() -> Iterable[Row]:
        yield {**read_last_row(run_dir / TIMINGS), **read_last_row(run_dir / METRICS)}

    def processes() -> Iterable[Row]:
        for name, node in nodes.items():
            for rank in node["state"].get("ranks", ()) if node["running"] else ():
                yield {"node": name, "goodput": node["goodput"]["fraction"], **rank}

    def faults() -> Iterable[Row]:
        rows = [{"node": name, **fault} for name, node in nodes.items() for fault in node["faults"]]
        return sorted(rows, key=lambda row: row["time"], reverse=True)[:_MOST]

    def events() -> Iterable[Row]:
        return merge_events(run_dir)[: -_MOST - 1 : -1]

    loss = {"loss": quantity("loss", unit=1.0)}
    step = same("step") | loss | {"gradient norm": quantity("grad_norm", unit=1.0)}
    step |= {"seconds": quantity("seconds", unit=1.0), "tokens/s": quantity("tokens_per_second", unit=1.0)}
    process = same("node") | {"process": "rank"} | same("phase", "step") | loss
    process |= {"goodput of the node (%)": quantity("goodput", unit=0.01)}
    fault = same("time", "node") | {"class": "fault", "fault": "code", "process": "rank"} | same("step", "action")
    fault |= {"next step after (s)": quantity("recover_seconds", unit=1.0), "evidence": "text"}
    event = same("time", "node", "attempt", "kind", "code", "text")
    note = _read(job)
    parts = {"Last step": (training, step), "Processes": (processes, process)}
    parts |= {"Faults": (faults, fault), "Newest events": (events, event)}
    tables = [_table(title, *part) for title, part in parts.items()]
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    template = Path(__file__).with_name("live.html.j2")
    return render(template, name=run_dir.name, job=note, tables=tables, now=now, seconds=SECONDS)


def _table(title: str, read: Callable[[], Iterable[Row]], columns: Mapping[str, str | Cell]) -> Table:
    table = _read(lambda: make_table(title, read(), columns))
    return table if isinstance(table, Table) else Table(title, [], [], (table,))


def _read(read: Callable[[], Any]) -> Any:
    """Return what is read, or a sentence: whatever damage a file has, the other parts must show."""
    try:
        return read()
    except Exception as error:
        return f"This could not be read: {type(error).__name__}."
