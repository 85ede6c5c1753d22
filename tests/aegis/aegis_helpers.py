"""Supervisors as real processes, with a light trainer or the real one."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import psutil

from tests.train_helpers import ROOT
from zaya_jax.aegis.events import EVENTS, read_events

LIGHT = ROOT / "tests" / "aegis" / "light_trainer.py"
SCHEMA = json.loads((ROOT / "zaya_jax" / "aegis" / "event.schema.json").read_text())
QUICK = {"data": 2.0, "dispatch": 2.0, "device_wait": 2.0, "start": 60.0}  # seconds, for tests of hangs
PATIENT = dict.fromkeys(QUICK, 60.0)  # nothing hangs, however busy the machine is


class Supervised:
    """A supervisor that runs in a process of its own."""

    def __init__(
        self, folder: Path, command: list[str], processes: int = 1, policy: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None, flags: Sequence[str] = (), module: str = "zaya_jax.aegis",
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        rules = {"timeouts": PATIENT, "settle_seconds": 1.0, **(policy or {})}
        (folder / "policy.yaml").write_text(json.dumps(rules), encoding="utf-8")
        self.run_dir = folder / "run"
        self.began = time.monotonic()
        number = [f"-{flags[place + 1]}" for place, flag in enumerate(flags) if flag == "--node"]
        self.folder = self.run_dir / "aegis" / "".join([os.uname().nodename, *number])
        with (folder / "out").open("ab") as out, (folder / "err").open("ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "run", "--policy", str(folder / "policy.yaml"), "--run-dir",
                 str(self.run_dir), "--processes", str(processes), *flags, "--", *command],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **(environment or {})},
            )  # fmt: skip
        self._err = folder / "err"

    def wait(self, seconds: float = 120) -> int:
        """Exit code; the supervisor is killed if it does not end."""
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()

    @property
    def said(self) -> str:
        return self._err.read_text(encoding="utf-8", errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.folder / EVENTS)

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [event for event in self.kinds("detect") if event["severity"] != "info"]

    @property
    def verdict(self) -> dict[str, Any]:
        return json.loads((self.folder / "verdict.json").read_text(encoding="utf-8"))

    def wait_for(self, path: Path, seconds: float = 60) -> None:
        """Wait until a file exists."""
        deadline = time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} did not appear: {self.said}"
            time.sleep(0.01)


def supervise_light(folder: Path, steps: int, *faults: str, processes: int = 1, **options: Any) -> Supervised:
    folder.mkdir(parents=True, exist_ok=True)
    return Supervised(folder, [sys.executable, str(LIGHT), str(folder), str(steps), *faults], processes, **options)


def left_running(folder: Path) -> list[psutil.Process]:
    """Processes of a light trainer in `folder`, and what it started."""
    return [process for process in psutil.process_iter(["cmdline", "environ"])
            if str(folder) in " ".join(process.info["cmdline"] or ())
            or str(folder) in ((process.info["environ"] or {}).get("DRILL_FOLDER") or "")]  # fmt: skip


def check_events(events: list[dict[str, Any]]) -> None:
    """Each is one that the schema describes, and follows from one before it."""
    for event in events:
        jsonschema.validate(event, SCHEMA)
    ids = [event["id"] for event in events]
    assert ids == list(range(1, len(ids) + 1))
    assert all(event["cause"] is None or event["cause"] < event["id"] for event in events)
