"""A command whose process 0 writes rows and checkpoints under the run's fencing token, as training does, without jax.

fenced_trainer.py RUN_DIR [--coordinator … --processes N --process I]
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.fencing import Fence
from zaya_jax.run.files import write_atomically
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import DiskGuard, LineFile
from zaya_jax.run.progress_record import Phase, end_with_supervisor, record_from_environment

run_dir, process = Path(sys.argv[1]), int(sys.argv[sys.argv.index("--process") + 1])
record, stop = record_from_environment(), []
end_with_supervisor()
signal.signal(signal.SIGTERM, lambda *_: stop.append(143))


def end(status, sentence):
    record.end(status, sentence, is_origin=True)
    os._exit(status)


checkpoints, step = run_dir / CHECKPOINTS, 0
checkpoints.mkdir(exist_ok=True)
record.start_training(step, run_dir)
if process == 0:
    fence = Fence(checkpoints, lambda error: end(3, str(error)))
    token = fence.take({}).number
    path = run_dir / METRICS
    rows = LineFile(path, path.stat().st_size if path.exists() else 0, DiskGuard(print, fence.check))
while not stop:
    record.enter(Phase.DEVICE_WAIT)
    time.sleep(0.01)
    step += 1
    record.complete_step(step, 1.0, 1.0)
    if process == 0:
        rows.append_line((json.dumps({"step": step, "token": token}) + "\n").encode())
        if step % 5 == 0:
            record.enter(Phase.SAVE)
            fence.check()
            write_atomically(checkpoints / f"{token}-{step}", str(step))
end(143, "Stopped by SIGTERM.")
