"""The real trainer with faults that only tests make, written as those of a drill.

hooked_trainer.py FAULT@PROCESS:STEP:PHASE … -- -m zaya_jax.main ARGUMENTS
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil

from zaya_jax.aegis import faults
from zaya_jax.run.checkpoints import CHECKPOINTS, usable_checkpoints


def ask_supervisor(times=1):
    """SIGTERM to the supervisor, as a scheduler sends it."""
    for turn in range(times):
        time.sleep(1.2 * turn)  # within a second it would be one request
        os.kill(os.getppid(), signal.SIGTERM)


def ask_group():
    """SIGTERM to the supervisor and all of its processes, as systemd sends it to a control group."""
    supervisor = psutil.Process(os.getppid())
    for process in [*supervisor.children(recursive=True), supervisor]:
        process.send_signal(signal.SIGTERM)


def run_dir():
    return Path(next(text for text in reversed(sys.argv) if text.startswith("run_dir=")).partition("=")[2])


def damage(kind):
    """Damage the newest of at least two checkpoints on disk, then die."""

    def act():
        steps = [each.step for each in usable_checkpoints(run_dir() / CHECKPOINTS)]
        assert len(steps) > 1, steps
        folder = run_dir() / CHECKPOINTS / str(max(steps))
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent.name == "d")
        file, other = max(files, key=lambda path: path.stat().st_size), min(files, key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        place = random.Random(kind).randrange(len(content) // 2)
        if kind == "flip":
            content[place] ^= 4
        elif kind == "truncate":
            del content[place:]
        elif kind == "zero":
            content[place : place + 4096] = bytes(len(content[place : place + 4096]))
        if kind == "delete":
            file.unlink()
        elif kind == "swap":
            assert file != other
            content = other.read_bytes()
            other.write_bytes(file.read_bytes())
            file.write_bytes(content)
        elif kind == "manifest":
            manifest = next(folder.glob("manifest-*.json"))
            manifest.write_text(manifest.read_text()[:-20])
        else:
            file.write_bytes(content)
        os.kill(os.getpid(), signal.SIGKILL)

    return act


def gather_alone():
    """A collective that the other processes do not join."""
    from jax.experimental import multihost_utils

    multihost_utils.process_allgather(1.0)


DAMAGES = ("flip", "truncate", "zero", "delete", "swap", "manifest")
faults.FAULTS |= {
    "term-supervisor": ask_supervisor,
    "term-twice": lambda: ask_supervisor(2),
    "term-group": ask_group,
    "collective": gather_alone,
    **{kind: damage(kind) for kind in DAMAGES},
}

if __name__ == "__main__":
    start = sys.argv.index("-m")
    faults.main([*sys.argv[1:start], *sys.argv[start + 2 :]])
