"""In place of `zaya_jax.main` in a drill: trains nothing, but keeps the record, checkpoints and metrics of a trainer.

It takes the same arguments, and needs a fiftieth of the time. Its folder, first in PYTHONPATH as `sitecustomize.py`,
puts it in place of the real one.
"""

import faulthandler
import json
import signal
import sys
import time
from pathlib import Path

from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import METRICS
from zaya_jax.run.manifest import Manifest, write_manifest
from zaya_jax.run.progress_record import Phase, record_from_environment

SITE = f"""
import importlib.util, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, {__file__!r}) if name == "zaya_jax.main" else None
sys.meta_path.insert(0, Finder)
"""


def train(arguments):
    faulthandler.register(signal.SIGUSR1)
    overrides = dict(text.split("=", 1) for text in arguments if "=" in text)
    run_dir, steps = Path(overrides["run_dir"]), int(overrides["phases.0.tokens"]) // 128
    record = record_from_environment()
    record.enter(Phase.RESTORE)
    checkpoints, metrics = run_dir / CHECKPOINTS, run_dir / METRICS
    first = max((int(path.name) for path in checkpoints.glob("*")), default=0)
    rows = metrics.read_text().splitlines(keepends=True)[:first] if first else []
    metrics.write_text("".join(rows))
    record.start_training(first, Path())
    for step in range(first + 1, steps + 1):
        for phase in (Phase.DATA, Phase.DISPATCH, Phase.DEVICE_WAIT):
            record.enter(phase)
            time.sleep(0.01)
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        record.complete_step(step, 1.0 / step, 1.0)
        if step % 4 == 0:
            record.enter(Phase.SAVE)
            (checkpoints / str(step)).mkdir(parents=True)
            leaf = {"w": {"dtype": "float32", "shape": [step], "digest": ""}}
            write_manifest(checkpoints / str(step), Manifest(step, 0, {}, leaf, {}, {}, read_back=True))
    record.end(0, "Finished.", is_origin=True)


if __name__ == "__main__":
    train(sys.argv[1:])
