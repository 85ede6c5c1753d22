"""A command that trains nothing: it writes the progress record and a checkpoint like a trainer, and fails on request.

    light_trainer.py FOLDER STEPS [FAULT@STEP …] [--coordinator … --processes N --process I]

Each fault happens once, or in every attempt if it ends in `!`. It imports neither jax nor numpy, so a test can start it
many times.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from zaya_jax.run.progress_record import Phase, record_from_environment

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
process = int(sys.argv[sys.argv.index("--process") + 1]) if "--process" in sys.argv else 0
faults = [text for text in sys.argv[3:] if "@" in text]
faulthandler.register(signal.SIGUSR1)
record = record_from_environment()
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(143))
signal.signal(signal.SIGINT, lambda *_: stop.append(130))


def end(status, sentence, is_origin=True):
    record.end(status, sentence, is_origin=is_origin)
    print(sentence, file=sys.stderr, flush=True)
    os._exit(status)


def happen(name):
    if name == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    elif name.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(60)
    elif name == "wait":
        time.sleep(60)
    elif name == "lock":
        ctypes.PyDLL(None).sleep(60)
    elif name == "raise":
        end(1, "ValueError: a bad value (model.py:7 in loss)")
    elif name == "input":
        end(2, "Error: seed is -1, but must be at least 0.")
    elif name == "exit":
        os._exit(1)
    elif name == "flood":
        line = b"\x1b[31m" + os.urandom(4096).replace(b"\n", b"") + b"\n"
        for _ in range(20_000):
            os.write(1, line)
    elif name == "endless":
        for _ in range(4000):
            os.write(2, b"x" * 65536)
    elif name == "child":
        os.system("setsid sleep 300 & sleep 300 &")  # noqa: S605 (a child that leaves the session, and one that stays)
    elif name == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif name == "say":
        print(os.environ["SAY"], file=sys.stderr, flush=True)
    else:
        raise ValueError(name)


record.enter(Phase.RESTORE)
saved = folder / f"checkpoint-{process}"
step = int(saved.read_text()) if saved.exists() else 0
record.start_training(step)
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
    time.sleep(0.01)
    step += 1
    record.complete_step(step, 1.0 / step, 1.0)
    record.enter(Phase.SAVE)
    if step % 5 == 0 or stop:
        saved.with_suffix(".partial").write_text(str(step))
        saved.with_suffix(".partial").replace(saved)
    if stop:
        end(stop[0], f"Stopped by SIGTERM after step {step}, which is saved. Rerun the command to resume from it.")
record.end(0, "Finished.", is_origin=True)
