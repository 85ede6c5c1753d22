"""Prometheus metrics and a live page of a run, served by a process: `python -m zaya_jax.aegis export RUN_DIR`.

Each scrape reads the files of the run, so training never waits for it. Label values are names of nodes, indices of
processes, and words from fixed lists; no path and no text of the run is among them.
"""

import contextlib
import itertools
import re
import socket
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.aegis.failure import FaultClass
from zaya_jax.aegis.goodput import measure_goodput
from zaya_jax.aegis.job_view import read_job
from zaya_jax.aegis.live_page import SECONDS, render_live
from zaya_jax.aegis.state import STATE, is_running, read_state, running_attempt
from zaya_jax.aegis.supervision_report import list_faults, node_folders
from zaya_jax.config.checks import require
from zaya_jax.errors import InputError, printable
from zaya_jax.run.checkpoints import CHECKPOINTS, named_steps
from zaya_jax.run.files import LONGEST_JSON, read_object
from zaya_jax.run.folder import METRICS, TIMINGS
from zaya_jax.run.manifest import saved_at
from zaya_jax.run.metrics import read_last_row
from zaya_jax.run.progress_record import Phase

_MOST = 1024  # samples or nodes from one source, so that no damage can flood Prometheus
_MOST_CONNECTIONS = 32  # at a time

T = TypeVar("T")

# Name → column of the rows, and help. Of all families, those that end in `_total` are counters, the others gauges.
_ROW = {
    "zaya_step": ("step", "Steps done."),
    "zaya_tokens_seen": ("tokens_seen", "Tokens read, padding included."),
    "zaya_loss": ("loss", "Training loss of the last step, in nats per token."),
    "zaya_grad_norm": ("grad_norm", "Gradient norm of the last step, before clipping."),
    "zaya_learning_rate": ("learning_rate", "Learning rate of the matrices in the last step."),
    "zaya_skipped_steps": ("skipped", "Steps skipped in a row, the last one included."),
    "zaya_step_seconds": ("seconds", "Duration of the last step."),
    "zaya_data_wait_seconds": ("data_wait", "Time that the last step waited for its batch."),
    "zaya_tokens_per_second": ("tokens_per_second", "Tokens in the loss per second of the last step."),
    "zaya_flops_per_second": ("flops_per_second", "Model FLOPs per second of the last step."),
    "zaya_mfu": ("mfu", "Model FLOPs utilization of the last step, from 0 to 1."),
}
# The same, with how the values of the layers become one.
_ENTROPY = "Entropy of the expert load over its maximum"
_BIAS = "Largest minus smallest balancing bias, of the layer with the widest range."
_LAYERS: Mapping[str, tuple[str, Callable[[Iterable[float]], float], str]] = {
    "zaya_router_entropy": ("load_entropy", statistics.fmean, f"{_ENTROPY}, mean over the layers."),
    "zaya_router_entropy_min": ("load_entropy", min, f"{_ENTROPY}, of the layer with the lowest."),
    "zaya_expert_load_max": ("max_load", max, "Largest expert load of any layer, over the layer's mean."),
    "zaya_balancing_bias_range": ("bias_range", max, _BIAS),
}
FAMILIES = {  # name → help
    **{name: text for name, (*_, text) in (_ROW | _LAYERS).items()},
    "zaya_job_nodes": "Nodes of a job of several nodes: that have a rank, are spares, or are lost.",
    "zaya_up": "Whether the supervisor of the node runs.",
    "zaya_attempt": "Number of the present or last attempt of the node.",
    "zaya_supervisor_exit_code": "Exit code of the node's supervisor, once it has ended.",
    "zaya_process_step": "Steps that a process has done.",
    "zaya_process_phase": "1 for the phase that a process is in.",
    "zaya_restarts_total": "Times that the supervisor of the node restarted the processes.",
    "zaya_faults_total": "Faults that the supervisor of the node detected, by class.",
    "zaya_goodput_fraction": "Part of the node's time that trained steps that count.",
    "zaya_goodput_seconds": "The node's time by what it was spent on.",
    "zaya_telemetry_age_seconds": "Seconds since the last row of metrics was written.",
    "zaya_checkpoint_step": "Step of the newest finished checkpoint.",
    "zaya_checkpoint_age_seconds": "Seconds since the newest checkpoint was finished.",
    "zaya_exporter_read_errors_total": "Reads of the run folder that failed, by source.",
}


class RunReader(Collector):
    """Reads the samples of a run; a file that cannot be read costs its own samples only, and is counted."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._errors: dict[str, int] = dict.fromkeys(("rows", "checkpoints", "job", "nodes", "state", "events"), 0)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        families = {
            name: Metric(name.removesuffix("_total"), text, "counter" if name.endswith("_total") else "gauge")
            for name, text in FAMILIES.items()
        }
        for sample in self.read():
            families[sample.name].samples.append(sample)
        yield from (family for family in families.values() if family.samples)

    def read(self) -> list[Sample]:
        """Return the samples of this moment."""
        run_dir = self._run_dir
        samples = self._attempt("rows", lambda: _rows(run_dir))
        samples += self._attempt("checkpoints", lambda: _checkpoints(run_dir / CHECKPOINTS))
        samples += self._attempt("job", lambda: _job(run_dir))
        for folder in self._attempt("nodes", lambda: node_folders(run_dir)):
            samples += self._attempt("state", lambda folder=folder: _state(folder))
            samples += self._attempt("events", lambda folder=folder: _events(folder))
        errors = "zaya_exporter_read_errors_total"
        return samples + [Sample(errors, {"source": source}, count) for source, count in self._errors.items()]

    def _attempt(self, source: str, read: Callable[[], Iterable[T]]) -> list[T]:
        try:
            return list(itertools.islice(read(), _MOST))
        except Exception:  # whatever damage a file has, the next scrape must work
            self._errors[source] += 1
            return []


def _rows(run_dir: Path) -> Iterator[Sample]:
    path = run_dir / METRICS
    if not path.exists():
        return
    metrics = read_last_row(path)
    row = read_last_row(run_dir / TIMINGS) | metrics if (run_dir / TIMINGS).exists() else metrics
    yield from _samples(row, {name: column for name, (column, _) in _ROW.items()}, {})
    for name, (column, reduce, _) in _LAYERS.items():
        if values := [float(value) for value in row.get(column) or () if isinstance(value, int | float)]:
            yield Sample(name, {}, reduce(values))
    yield Sample("zaya_telemetry_age_seconds", {}, max(0.0, time.time() - path.stat().st_mtime))


def _samples(tree: Mapping[str, Any], keys: Mapping[str, str], labels: dict[str, str]) -> Iterator[Sample]:
    for name, key in keys.items():
        if isinstance(value := tree.get(key), int | float):
            yield Sample(name, labels, float(value))


def _checkpoints(folder: Path) -> Iterator[Sample]:
    for step in reversed(named_steps(folder)):
        saved = saved_at(folder / str(step))
        if saved is not None:
            yield Sample("zaya_checkpoint_step", {}, step)
            yield Sample("zaya_checkpoint_age_seconds", {}, max(0.0, time.time() - saved))
            return


def _job(run_dir: Path) -> Iterator[Sample]:
    if job := read_job(run_dir):
        ranked = sum(node["rank"] is not None for node in job["nodes"])
        counts = {"rank": ranked, "spare": len(job["nodes"]) - ranked, "lost": len(job["lost"])}
        yield from (Sample("zaya_job_nodes", {"state": state}, count) for state, count in counts.items())


def _state(folder: Path) -> Iterator[Sample]:
    path, node = folder / STATE, {"node": printable(folder.name)}
    state = read_object(path) if path.exists() else {}
    yield Sample("zaya_up", node, int(is_running(state)))
    yield from _samples(state, {"zaya_attempt": "attempt", "zaya_supervisor_exit_code": "exit_code"}, node)
    for rank in state.get("ranks", ()) if is_running(state) else ():
        process = node | {"process": str(int(rank["rank"]))}
        yield from _samples(rank, {"zaya_process_step": "step"}, process)
        yield Sample("zaya_process_phase", process | {"phase": Phase[rank["phase"].upper()].name.lower()}, 1)


def _events(folder: Path) -> Iterator[Sample]:
    path, node = folder / EVENTS, {"node": printable(folder.name)}
    if path.stat().st_size > LONGEST_JSON:  # counters of a part of it would fall
        raise InputError(f"{path} is larger than the limit of {LONGEST_JSON:,} bytes.")
    events = read_events(path)
    goodput = measure_goodput(events, **running_attempt(read_state(folder)))
    yield Sample("zaya_goodput_fraction", node, goodput.fraction)
    for bucket, seconds in goodput.buckets.items():
        yield Sample("zaya_goodput_seconds", node | {"bucket": bucket}, seconds)
    actions = [event.get("action") for event in events if event["kind"] == "decide"]
    restarts = [action for action in actions if action is not None and not action.startswith("exit-")]
    yield Sample("zaya_restarts_total", node, len(restarts))
    faults = Counter(fault["fault"] for fault in list_faults(events))
    for fault in FaultClass:
        yield Sample("zaya_faults_total", node | {"fault": str(fault)}, faults[fault])


def serve(run_dir: Path, address: str, port: int) -> None:
    """Serve the metrics of a run over HTTP, and at `/` the page that shows it, until the process is interrupted.

    Nothing encrypts or authenticates. Requests must name `address`, an IP address or localhost as their host: a web
    page whose own name leads here (DNS rebinding) can read nothing. Port 0 is any free one.
    """
    if not run_dir.is_dir():
        raise InputError(f"{run_dir} is not a folder.")
    require(0 <= port < 2**16, "--port", port, "from 0 to 65535")
    registry = CollectorRegistry()
    registry.register(RunReader(run_dir))
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] not in ("", "/"):
            return metrics(environ, start_response)
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8"), ("Refresh", str(SECONDS))])
        return [render_live(run_dir).encode()]

    try:
        _Server.address_family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        host = rf"(\[[\da-f:.]+\]|\d+(\.\d+){{3}}|localhost|{re.escape(address)})(:\d+)?"
        _Handler.host = re.compile(host, re.ASCII | re.IGNORECASE)
        server = make_server(address, port, answer, _Server, _Handler)
    except OSError as error:
        raise InputError(f"Metrics cannot be served at {address}:{port}: {error.strerror}.") from error
    url = f"http://{address}:{server.server_port}"
    print(f"Serving the page of {run_dir} at {url}/ and its metrics at {url}/metrics", flush=True)
    server.serve_forever()


class _Handler(WSGIRequestHandler):
    timeout = 30.0  # seconds that a client may be silent
    host: re.Pattern[str]  # that requests may name

    def parse_request(self) -> bool:
        """Refuse a request to another host."""
        is_valid = super().parse_request()
        is_allowed = is_valid and self.host.fullmatch(self.headers.get("Host", "")) is not None
        if is_valid and not is_allowed:
            names = "an IP address, localhost or the name in --address"
            self.send_error(421, explain=f"Address the exporter by {names}")
        return is_allowed

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _Server(ThreadingWSGIServer):
    """A server with a bounded number of connections."""

    request_queue_size = 128  # connections that wait to be accepted
    _latest: ClassVar[deque[Any]] = deque()  # connections, some of which are closed

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; above the bound, end the oldest one."""
        self._latest.append(request)
        if len(self._latest) > _MOST_CONNECTIONS:
            with contextlib.suppress(OSError):
                self._latest.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that has gone."""
