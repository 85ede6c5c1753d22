"""Training processes that write to one run folder at a time, since file locks do nothing for them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.compile_helpers import CHEAP
from tests.devices_helpers import ROOT
from zaya_jax.errors import ExitCode
from zaya_jax.run.fencing import FENCE

# Python imports it at its start. Rows are written with `os.pwrite`; everything else gets its name by a rename.
_SITECUSTOMIZE = """
import fcntl, os, time
fcntl.flock = lambda *_: None
log = os.open(os.environ["WRITES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def logged(function, name):
    def call(*arguments, **options):
        result, now = function(*arguments, **options), time.monotonic_ns()
        os.write(log, f"{os.getpid()} {now} {name(*arguments, **options)}\\n".encode())
        return result
    return call

def opened(descriptor, *_):
    return os.readlink(f"/proc/self/fd/{descriptor}")

def named(_, target, dst_dir_fd=None, **__):
    return target if dst_dir_fd is None else f"{opened(dst_dir_fd)}/{target}"

os.pwrite = logged(os.pwrite, opened)
os.rename, os.replace = (logged(each, named) for each in (os.rename, os.replace))
"""


class Write(NamedTuple):
    """A row, or a file or folder that got its name."""

    pid: int
    time_ns: int  # of `time.monotonic_ns`
    path: Path


class Writers:
    """Processes that train the run `run_dir` with the same command."""

    def __init__(self, folder: Path, command: list[str], run_dir: Path) -> None:
        """Keep everything but the run in `folder`."""
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        self._command, self._run_dir, self._folder = command, str(run_dir), folder
        self._log = folder / "writes"
        self._log.touch()
        self._environment = {**os.environ, "PYTHONPATH": str(folder), "WRITES": str(self._log),
                             "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "XLA_FLAGS": CHEAP}  # fmt: skip
        self.processes: dict[int, subprocess.Popen] = {}

    def start(self) -> subprocess.Popen:
        """Start another one."""
        with (self._folder / "said").open("a") as said:
            process = subprocess.Popen([sys.executable, "-m", "zaya_jax.main", *self._command], cwd=ROOT,
                                       env=self._environment, stdout=said, stderr=said)  # fmt: skip
        self.processes[process.pid] = process
        return process

    def writes(self) -> list[Write]:
        """What all have written to the run, in order."""
        lines = [line.split(" ", 2) for line in self._log.read_text().splitlines()]
        writes = [Write(int(pid), int(now), Path(name)) for pid, now, name in lines if name.startswith(self._run_dir)]
        return sorted(writes, key=lambda each: each.time_ns)

    def wait_for_row(self, process: subprocess.Popen) -> None:
        """Wait until a process writes a row, or has ended."""
        row = re.compile(rf"^{process.pid} .*\.jsonl$", re.MULTILINE)
        with self._log.open() as log:
            log.seek(0, os.SEEK_END)
            while process.poll() is None and not row.search(log.read()):
                time.sleep(0.1)

    def end(self) -> None:
        """Wait until one is left, let it train for a while, and ask it to stop."""
        running = list(self.processes.values())
        deadline = time.monotonic() + 120
        while len(running) > 1:
            assert time.monotonic() < deadline, "superseded processes still run"
            running = [process for process in running if process.poll() is None]
            time.sleep(0.1)
        (last,) = running
        self.wait_for_row(last)
        last.send_signal(signal.SIGTERM)
        assert last.wait(120) == ExitCode.TERMINATED, (self._folder / "said").read_text()

    def check(self) -> int:
        """Check that none writes after the first row of its successor; return how many were superseded in training."""
        writes, first_row, last_write = self.writes(), {}, {}
        for each in writes:
            last_write[each.pid] = each
            if each.path.suffix == ".jsonl":
                first_row.setdefault(each.pid, each)
        takers = [each.pid for each in writes if each.path.name == FENCE]
        assert sorted(takers) == sorted(self.processes), "each takes one token"
        for index, pid in enumerate(takers[:-1]):
            assert self.processes[pid].returncode == ExitCode.SUPERSEDED
            later = [first_row[each].time_ns for each in takers[index + 1 :] if each in first_row]
            assert last_write[pid].time_ns < min(later), last_write[pid]
        return len(first_row) - 1
