"""A command that trains nothing: it writes the progress record and a checkpoint like a trainer, and fails on request.

    light_trainer.py FOLDER STEPS [FAULT@STEP …] [--coordinator … --processes N --process I]

Each fault happens once, or in every attempt if it ends in `!`. With TOGETHER in the environment, no process is a step
ahead of the others. It imports neither jax nor numpy, so a test can start it
many times.
"""

import ctypes
import faulthandler
import math
import os
import signal
import sys
import time
from pathlib import Path

from zaya_jax.errors import Reason
from zaya_jax.run.progress_record import Phase, end_with_supervisor, record_from_environment

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
process = int(sys.argv[sys.argv.index("--process") + 1]) if "--process" in sys.argv else 0
faults = [text for text in sys.argv[3:] if "@" in text]
faulthandler.register(signal.SIGUSR1)
record = record_from_environment()
end_with_supervisor()
stop, losses, delays = [], [], {"own": 0.0, "waiting": 0.0}
signal.signal(signal.SIGTERM, lambda *_: stop.append(143))
signal.signal(signal.SIGINT, lambda *_: stop.append(130))


def end(status, sentence, reason=Reason.OTHER):
    record.end(status, sentence, is_origin=True, reason=reason)
    print(sentence, file=sys.stderr, flush=True)
    os._exit(status)


def flood(lines):
    line = b"\x1b[31m" + os.urandom(4096).replace(b"\n", b"") + b"\n"
    for _ in range(lines):
        os.write(1, line)


def endless():
    for _ in range(1000):
        os.write(2, b"x" * 65536)


def log_oom():
    """Note in the file KMSG what the kernel does before it kills a process for lack of memory."""
    with open(os.environ["KMSG"], "a") as file:
        file.write("oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=7,uid=0\n")
        file.write("Memory cgroup out of memory: Killed process 7 (python) total-vm:2623712kB\n")


def count_files(supervisor):
    """Note how many files the supervisor has open."""
    with (folder / "files").open("a") as file:
        print(os.getpid(), len(os.listdir(f"/proc/{supervisor}/fd")), file=file)


ACTIONS = {
    "wait": lambda: time.sleep(60),
    "lock": lambda: ctypes.PyDLL(None).sleep(60),
    "raise": lambda: end(1, "ValueError: a bad value (model.py:7 in loss)"),
    "input": lambda: end(2, "Error: seed is -1, but must be at least 0."),
    "damaged": lambda: end(1, "Stopped: Every checkpoint is damaged.", Reason.NO_CHECKPOINT),
    "superseded": lambda: end(3, "Stopped: Other processes have resumed this run."),
    "exit": lambda: os._exit(1),
    "quit": lambda: os._exit(0),
    "flood": lambda: flood(15_000),  # more than the supervisor may take of memory
    "spill": lambda: flood(1000),  # more than a pipe and the supervisor keep
    "endless": endless,
    # A child that leaves the session, and one that stays.
    "child": lambda: os.system("setsid sleep 300 & sleep 300 &"),  # noqa: S605
    "group": lambda: [os.kill(process, signal.SIGTERM) for process in (os.getppid(), os.getpid())],
    "deaf": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "diverge": lambda: losses.append(math.inf),
    "slow": lambda: delays.update(own=0.05),
    "idle": lambda: delays.update(waiting=0.05),  # as others are while one is slow
    "files": lambda: count_files(os.getppid()),
    "oom": lambda: (log_oom(), os.kill(os.getpid(), signal.SIGKILL)),
    "say": lambda: print(os.environ["SAY"], file=sys.stderr, flush=True),
}


def happen(name):
    if name in ACTIONS:
        ACTIONS[name]()
        return
    os.kill(os.getpid(), getattr(signal, name))
    if name != "SIGTERM":
        time.sleep(60)  # until it arrives


def wait_for_others():
    (folder / f"at-{process}").write_text(str(step))
    for other in range(int(sys.argv[sys.argv.index("--processes") + 1])):
        at = folder / f"at-{other}"
        while not stop and (not at.exists() or int(at.read_text() or 0) < step):  # empty while it is written
            time.sleep(0.005)


record.enter(Phase.RESTORE)
saved = folder / f"checkpoint-{process}"
step = int(saved.read_text()) if saved.exists() else 0
record.start_training(step, folder)
while step < steps:
    for phase in (Phase.DATA, Phase.DISPATCH, Phase.DEVICE_WAIT):
        record.enter(phase)
        for text in faults:
            name, _, place = text.rstrip("!").partition("@")
            where, _, who = place.partition(":")
            if phase is Phase.DISPATCH and step >= int(where) and process == int(who or 0):
                mark = folder / f"done-{name}-{place}"
                if text.endswith("!") or not mark.exists():
                    mark.write_text(str(time.monotonic()))
                    happen(name)
    record.enter(Phase.DATA)
    time.sleep(delays["own"])
    record.enter(Phase.DEVICE_WAIT)
    time.sleep(0.01 + delays["waiting"])
    if "TOGETHER" in os.environ:
        wait_for_others()
    step += 1
    record.complete_step(step, losses[-1] if losses else 1.0 / step, 1.0)
    record.enter(Phase.SAVE)
    if step % 5 == 0 or stop:
        saved.with_suffix(".partial").write_text(str(step))
        saved.with_suffix(".partial").replace(saved)
    if stop:
        end(stop[0], f"Stopped by SIGTERM after step {step}, which is saved. Rerun the command to resume from it.")
record.end(0, "Finished.", is_origin=True)
