"""Faults at random moments of a run, from its first tenth of a second on: each start resumes, and no row is lost."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.checkpoint.test_disk import fill
from tests.compile_helpers import CHEAP
from tests.job.processes_helpers import free_port
from tests.train_helpers import ROOT, differing, restore, write_run
from zaya_jax.config import load_config
from zaya_jax.hardware.presets import PRESETS
from zaya_jax.run.folder import METRICS

OVERRIDES = [
    "train.batch.micro_batch=4",
    "checkpoint.every=4",
    "evaluation.every=25",
    "train.log_every=10",
    "sample.tokens=4",
]
STEPS = 150
DISK = 64 * 2**20  # bytes of the run's file system


class Job:
    """The processes of one run, started again and again."""

    def __init__(self, folder: Path, name: str, processes: int) -> None:
        overrides = [*OVERRIDES, f"data.cache_dir={folder / name}_cache", f"phases.0.tokens={STEPS * 128}"]
        if processes > 1:
            overrides.append("train.batch.micro_batch=2")
        self.path, self.count = write_run(folder, name), processes
        self.config = load_config(self.path, overrides)
        self.folder = Path(self.config.run_dir)
        self.arguments = ["--config", str(self.path), *overrides]
        self.environment = {
            **os.environ,
            "XLA_FLAGS": CHEAP,
            "JAX_COMPILATION_CACHE_DIR": str(folder / f"{name}_compiled"),
        }
        self.said: list[str] = []
        self.startup = 0.0  # seconds to the first row

    def start(self, port: int | None = None) -> list[subprocess.Popen[str]]:
        job = [
            "--coordinator",
            f"127.0.0.1:{port or free_port()}",
            "--processes",
            str(self.count),
            "--peer-timeout",
            "5",
        ]
        command = [sys.executable, "-m", "zaya_jax.main", *self.arguments, *(job if self.count > 1 else [])]
        own = [["--process", str(index)] for index in range(self.count)] if self.count > 1 else [[]]
        return [
            subprocess.Popen([*command, *more], cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for more in own
        ]  # fmt: skip

    def end(self, processes: list[subprocess.Popen[str]], allowed: set[int], fault: str) -> list[int]:
        """Wait for all processes; check what they said and how they ended."""
        seconds = (
            PRESETS["cpu"].join_seconds + 60
        )  # as long as a process waits for one that was killed before it joined
        late = threading.Timer(seconds, lambda: [process.kill() for process in processes])
        late.start()
        texts = [process.communicate()[0] for process in processes]
        assert late.is_alive(), f"{fault}: not ended after {seconds} s:\n" + "\n---\n".join(texts)
        late.cancel()
        self.said += texts
        for text in texts:
            for word in ("Traceback", "Check failure", "core dumped", "Fatal Python error"):
                assert word not in text, f"{fault}:\n{text}"
        statuses = [process.returncode for process in processes]
        assert set(statuses) <= allowed, f"{fault}: {statuses}\n" + "\n---\n".join(texts)
        for status, text in zip(statuses, texts, strict=True):
            assert status in {0, -signal.SIGKILL} or text.strip(), f"{fault}: ended with {status} and no word"
        return statuses

    def finish(self) -> None:
        started = time.monotonic()
        processes = self.start()
        while not self.startup and processes[0].poll() is None:
            self.startup = time.monotonic() - started if self.rows() else 0.0
            time.sleep(0.01)
        self.end(processes, {0}, "undisturbed")

    def rows(self) -> int:
        path = self.folder / METRICS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait(self, moment: float, target: int, processes: list[subprocess.Popen[str]], rng: random.Random) -> None:
        """Wait for `target` rows, or, where it is 0, for a moment of the start-up in seconds."""
        started = time.monotonic()
        while all(process.poll() is None for process in processes):
            if (target and self.rows() >= target) or (not target and time.monotonic() - started >= moment):
                break
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02 if target else 0.0)


def send(
    number: int, times: int = 1, to: int | None = None
) -> Callable[[Job, list[subprocess.Popen[str]], random.Random], None]:
    def act(job: Job, processes: list[subprocess.Popen[str]], rng: random.Random) -> None:
        for turn in range(times):
            for process in processes if to is None else [processes[to]]:
                process.send_signal(number)
            if turn + 1 < times:
                time.sleep(rng.random() * 0.3)

    return act


def fill_disk(job: Job, processes: list[subprocess.Popen[str]], rng: random.Random) -> None:
    """Fill the last block, keep it so for a while, free it, and ask the run to end."""
    ballast = job.folder.parent / "ballast"
    with suppress(OSError):  # the run may take the last block first
        fill(ballast, 0)
    time.sleep(rng.uniform(0.1, 2))
    ballast.unlink()
    time.sleep(rng.uniform(0, 1))
    send(signal.SIGTERM)(job, processes, rng)


# What is done, and the statuses that README documents for it; 0 where the run was over first.
ALONE = {
    "full disk": (fill_disk, {0, 1, 2, 143}),
    "SIGKILL": (send(signal.SIGKILL), {0, -signal.SIGKILL}),
    "SIGTERM": (send(signal.SIGTERM), {0, 143}),
    "Ctrl-C": (send(signal.SIGINT), {0, 130}),
    "Ctrl-C twice": (send(signal.SIGINT, 2), {0, 130}),
}
TOGETHER = {
    "process 0 lost": (send(signal.SIGKILL, to=0), {0, 1, 2, -signal.SIGKILL}),
    "process 1 lost": (send(signal.SIGKILL, to=1), {0, 1, 2, -signal.SIGKILL}),
    "SIGTERM": (send(signal.SIGTERM), {0, 143}),
    "Ctrl-C": (send(signal.SIGINT), {0, 1, 130}),
}


@contextmanager
def file_system(root: Path) -> Iterator[Path]:
    """A file system in memory, small enough to be filled."""
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(root)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield root
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def check_equal(first: Job, second: Job) -> None:
    """The same rows and the same final state, bit for bit."""
    assert [json.loads(line)["step"] for line in (first.folder / METRICS).read_text().splitlines()] == list(
        range(1, STEPS + 1)
    )
    assert (first.folder / METRICS).read_bytes() == (second.folder / METRICS).read_bytes()
    (one, one_data), (two, two_data) = (restore(job.config, STEPS) for job in (first, second))
    assert not differing(one, two)
    assert one_data == two_data


def disturb(quiet: Job, job: Job, faults: dict, count: int, rng: random.Random) -> dict[str, int]:
    """Meet `count` faults at random moments, half of them before the first row; runs that finish are begun again.

    Each run that finishes is compared with the undisturbed one.

    Returns:
      How often each fault was met while the process was still at work.
    """
    met, kinds = dict.fromkeys(faults, 0), list(faults)
    while sum(met.values()) < count:
        kind = min(rng.sample(kinds, len(kinds)), key=met.__getitem__)
        act, allowed = faults[kind]
        target = 0 if rng.random() < 0.5 else job.rows() + rng.randrange(1, STEPS // 3)
        moment = rng.uniform(quiet.startup / 40, quiet.startup)  # before, Python itself has not started
        processes = job.start()
        job.wait(moment, target, processes, rng)
        act(job, processes, rng)
        name = f"{kind} at {f'row {target}' if target else f'{moment:.2f} s'}"
        if kind == "full disk" and target:  # which ends no run that has begun
            allowed = {0, 143}
        statuses = job.end(processes, allowed, name)
        print(f"{name}: {statuses}", flush=True)
        if 0 in statuses:
            check_equal(quiet, job)
            shutil.rmtree(job.folder)
        else:
            met[kind] += 1
    job.finish()
    check_equal(quiet, job)
    return met


@pytest.mark.soak
def test_forty_faults_of_one_process_lose_nothing(tmp_path):
    with file_system(tmp_path / "disk") as disk:
        quiet = Job(tmp_path, "quiet", 1)
        quiet.finish()
        met = disturb(quiet, Job(disk, "disturbed", 1), ALONE, 40, random.Random())
    print(json.dumps(met))


@pytest.mark.soak
def test_twenty_faults_of_two_processes_lose_nothing(tmp_path):
    quiet, disturbed = Job(tmp_path, "quiet", 2), Job(tmp_path, "disturbed", 2)
    quiet.finish()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        statuses = disturbed.end(disturbed.start(port), {1, 2}, "port in use")
        print(f"port in use: {statuses}", flush=True)
        assert str(port) in disturbed.said[-2]
    met = disturb(quiet, disturbed, TOGETHER, 16, random.Random())
    print(json.dumps({**met, "port in use": 1}))
