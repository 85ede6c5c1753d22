"""The event log: one JSON object per line, linked by cause; see `event.schema.json`. Readers ignore unknown fields."""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from zaya_jax.aegis.failure import Observation, Severity
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.errors import printable
from zaya_jax.run.files import LONGEST_JSON, read_end
from zaya_jax.run.metrics import DiskGuard, LineFile

EVENTS = "events.jsonl"
VERSION = 1  # of the schema of events
_LONGEST_LINE = 64 * 1024  # bytes of an event that a reader accepts
_NEEDED = {"id", "attempt", "unix", "time", "kind", "code", "severity", "text"}
_TYPES = {
    **dict.fromkeys(("id", "attempt", "cause", "rank", "step", "first_step", "last_step"), int),
    **dict.fromkeys(("time", "node", "kind", "code", "severity", "text"), str),
    **dict.fromkeys(("cause_node", "fault", "action", "explanation"), str),
    **{"monotonic": int | float, "seconds": dict, "times": dict, "exit_statuses": list, "files": list},
}
_MOST_WAITING = 2**20  # bytes of events that wait for a full disk; later ones are dropped

# start, end: of an attempt. detect: a fault or a sign of one. decide: what the policy says. act: what was done.
# recover: the first step after a restart. inject: a fault that a drill made.
Kind = Literal["start", "end", "detect", "decide", "act", "recover", "inject"]
Listener = Callable[[Mapping[str, Any]], object]


class EventLog:
    """Appends events to a file; a failure to write never ends the supervisor, and a slow file system never stops it.

    Events that a full disk refuses are written later, in order. If there are more than memory should hold, the next
    event that is written says how many were dropped (`dropped`).
    """

    def __init__(
        self, folder: Path, node: str, files: FileWorker, listener: Listener = lambda event: None, gap: int = 0
    ) -> None:
        """Continue the log of this `node` in `folder`; `listener` is called with each event that was written.

        With a `gap`, another process may still write so many events: the ids of this one are greater by that, and the
        file is only read before the first event.
        """
        self._node, self._files, self._listener, self._path = node, files, listener, folder / EVENTS
        self._lines: LineFile | None = None
        events = read_events(self._path)
        self._id = max((event["id"] + gap for event in events), default=0)
        self.attempt = max((event["attempt"] for event in events), default=0)
        self._dropped = 0
        if not gap:
            self._open()

    def _open(self) -> LineFile:
        """Open the file at its end, without a line that was torn when its writer was killed; do nothing if it is."""
        if self._lines is None:
            size = self._path.stat().st_size if self._path.exists() else 0
            content = read_end(self._path, LONGEST_JSON) if size else b""
            torn = len(content) - content.rfind(b"\n") - 1
            self._lines = LineFile(self._path, size - torn % LONGEST_JSON, DiskGuard(lambda sentence: None))
            if torn == LONGEST_JSON:  # damage, which the next event must not be part of
                self._lines.append_line(b"\n")
        return self._lines  # the trainer reports a full disk

    def write(
        self, kind: Kind, code: str, *, severity: Severity = Severity.INFO, text: str = "", **details: Any
    ) -> int:
        """Append an event with the stable name `code`, and return its id; ERROR and FATAL are synced to disk.

        The `text` is cut and escaped. `details` are other fields of the schema, such as `cause`, the id of the event
        that this one follows from.
        """
        self._id += 1
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"
        clocks = {"time": stamp, "unix": round(now, 6), "monotonic": round(time.monotonic(), 6)}
        event = {"v": VERSION, "id": self._id, **clocks, "node": self._node, "attempt": self.attempt, "kind": kind}
        event |= {"code": code, "severity": str(severity), "cause": None, "text": printable(text, 500)}
        event |= {key: _plain(value) for key, value in details.items() if value is not None}
        written = self._files.submit(lambda: self._append(event))
        self._dropped += written.done() and written.exception() is not None  # refused, since too many jobs wait
        self._listener(event)
        return self._id

    def write_observation(self, seen: Observation, kind: Kind = "detect", **details: Any) -> int:
        """Append an event about an observation, and return its id."""
        details = {"rank": seen.rank, "device": seen.device, "fault": seen.fault, **details}
        return self.write(kind, seen.code, severity=seen.severity, text=seen.text, **details)

    def flush(self) -> None:
        """Write events that wait for a full disk."""
        if self._lines is not None and self._lines.waiting:
            self._files.submit(self._lines.flush)

    def close(self, seconds: float = 10.0) -> bool:
        """Close the file once everything is written; return whether that took at most `seconds`."""
        self._files.submit(lambda: self._open().close())
        return self._files.finish(seconds) and self._lines is not None and not self._lines.waiting

    def _append(self, event: Mapping[str, Any]) -> None:
        lines = self._open()
        lines.flush()
        if lines.waiting > _MOST_WAITING:
            self._dropped += 1
            return
        dropped, self._dropped = self._dropped, 0
        row = {**event, "dropped": dropped} if dropped else event
        lines.append_line((json.dumps(row, allow_nan=False) + "\n").encode())
        if event["severity"] in (Severity.ERROR, Severity.FATAL):
            lines.sync()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the last 64 MiB of the events of one node; none if the file cannot be read."""
    return parse_events(read_content(path))


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


def _is_whole(event: Mapping[str, Any]) -> bool:
    """Return whether an event has the fields of its schema; raises `TypeError` if a number is none."""
    fields = {key: value for key, value in event.items() if value is not None}
    if not all(isinstance(value, _TYPES.get(key, object)) for key, value in fields.items()):
        return False
    spent = [*fields.get("seconds", {}).values(), *fields.get("times", {}).values()]
    numbers = [fields["unix"], fields.get("monotonic", 0), *spent]
    has_steps = "first_step" not in fields or 0 <= fields["first_step"] <= fields.get("last_step", -1)
    return fields.keys() >= _NEEDED and has_steps and all(map(math.isfinite, numbers))


def read_content(path: Path) -> bytes:
    """Return the last 64 MiB of a log; nothing if it cannot be read."""
    try:
        return read_end(path, LONGEST_JSON)
    except OSError:
        return b""
