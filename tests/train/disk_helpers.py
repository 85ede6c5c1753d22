"""Training and TensorBoard's rows on a disk without a free block, and what becomes of them once there is room."""

import contextlib
import io
import json
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from tests.train.test_sinks import events
from tests.train_helpers import change, compute_little, small_run
from zaya_jax.errors import RunStopped
from zaya_jax.run.checkpoints import saved_steps
from zaya_jax.run.folder import METRICS, TIMINGS
from zaya_jax.train import fit, sinks
from zaya_jax.train.sinks.mirror import Mirror
from zaya_jax.train.sinks.tensorboard import TensorBoardSink


def fill(path):
    """Write to `path` until its file system has no free block."""
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    assert shutil.disk_usage(path.parent).free == 0


def train_on(config, happens):
    """What a run prints; what `happens` is called before the rows of their steps are written."""

    class Sink(sinks.JsonlSink):
        def write(self, metrics, timings):
            happens.get(metrics["step"], lambda: None)()
            super().write(metrics, timings)

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        compute_little(patch)
        patch.setattr(sinks, "JsonlSink", Sink)
        try:
            fit.run_training(config)
        except RunStopped as error:
            print(error)
    return output.getvalue().splitlines()


def leaves(config):
    folder = Path(config.run_dir)
    return {"metrics": (folder / "metrics.jsonl").read_text(),
            "timed": [json.loads(line)["step"] for line in (folder / "timings.jsonl").read_text().splitlines()],
            "files": sorted(path.name for path in folder.iterdir()),
            "phases": json.loads((folder / "phases.json").read_text())}  # fmt: skip


def full_while_training(root):
    config = small_run(root)
    runs = {"whole": (train_on(config, {}), leaves(config))}
    ballast = root / "ballast"
    freed = change(config, {"run_dir": str(root / "freed"), "checkpoint.every": 1})
    runs["freed"] = train_on(freed, {1: lambda: fill(ballast), 9: ballast.unlink}), leaves(freed)
    stopped = change(config, {"run_dir": str(root / "stopped"), "checkpoint.every": 2,
                              "checkpoint.max_unsaved_seconds": 0.3})  # fmt: skip

    def fill_once_saved():
        deadline = time.monotonic() + 120
        while 2 not in saved_steps(root / "stopped" / "checkpoints"):  # which happens in the background
            assert time.monotonic() < deadline, "step 2 was not saved"
            time.sleep(0.001)
        fill(ballast)

    runs["stopped"] = train_on(stopped, {3: fill_once_saved}), None
    runs["full"] = train_on(stopped, {}), None  # from the first moment on
    ballast.unlink()
    runs["again"] = train_on(stopped, {}), leaves(stopped)
    return runs


def full_for_a_while(root):
    """TensorBoard's rows on a disk without room from step 43 to 80, while the run's own files lie elsewhere."""
    messages: list[str] = []
    with tempfile.TemporaryDirectory() as own, pytest.MonkeyPatch.context() as patch:
        patch.setattr("zaya_jax.train.sinks.mirror._PATIENCE", 0)
        mirror = Mirror("tensorboard", partial(TensorBoardSink, root / "tensorboard"), Path(own), 0, 0, messages.append,
                        rewinds=True)  # fmt: skip
        for step in range(1, 121):
            if step == 43:
                fill(root / "ballast")
            if step == 81:
                (root / "ballast").unlink()
            row = {"step": step, "loss": step / 2, **{f"norm_{index}": 1.0 for index in range(40)}}
            for name in (METRICS, TIMINGS):
                with (Path(own) / name).open("a") as file:
                    file.write(json.dumps(row) + "\n")
            mirror.write(row, {"step": step})
            if step % 20 == 0:
                mirror.sync()
        mirror.close()
    newest = max((root / "tensorboard").glob("events*"))
    steps = [event.step for event in events(newest) if event.summary.value]
    return {"said": messages, "steps": steps, "files": len(list((root / "tensorboard").glob("events*")))}
