"""Training on a disk without a free block: the run continues, and no row is lost once there is room."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.test_disk import in_own_file_system
from tests.train_helpers import change, compile_once, small_run
from zaya_jax.errors import RunStopped
from zaya_jax.train import loop, sinks


def fill(path):
    """Write to `path` until its file system has no free block."""
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    assert shutil.disk_usage(path.parent).free == 0


def train_on(config, events):
    """What a run prints; `events` are called before the rows of their steps are written."""

    class Sink(sinks.JsonlSink):
        def write(self, metrics, timings):
            events.get(metrics["step"], lambda: None)()
            super().write(metrics, timings)

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        compile_once(patch)
        patch.setattr(sinks, "JsonlSink", Sink)
        try:
            loop.run_training(config)
        except RunStopped as error:
            print(error)
    return said.getvalue().splitlines()


def leaves(config):
    folder = Path(config.run_dir)
    return {"metrics": (folder / "metrics.jsonl").read_text(),
            "timed": [json.loads(line)["step"] for line in (folder / "timings.jsonl").read_text().splitlines()],
            "files": sorted(path.name for path in folder.iterdir()),
            "phases": json.loads((folder / "phases.json").read_text())}  # fmt: skip


def full_while_training(root):
    config = change(small_run(root), {"checkpoint.every": 1})
    runs = {"whole": (train_on(config, {}), leaves(config))}
    ballast = root / "ballast"
    freed = change(config, {"run_dir": str(root / "freed")})
    runs["freed"] = train_on(freed, {1: lambda: fill(ballast), 9: ballast.unlink}), leaves(freed)
    stopped = change(config, {"run_dir": str(root / "stopped"), "checkpoint.max_unsaved_seconds": 0.3})
    runs["stopped"] = train_on(stopped, {3: lambda: fill(ballast)}), None
    runs["full"] = train_on(stopped, {}), None  # from the first moment on
    ballast.unlink()
    runs["again"] = train_on(stopped, {}), leaves(stopped)
    return runs


def test_a_full_disk_is_one_warning_and_everything_is_written_when_there_is_room(tmp_path):
    runs = in_own_file_system(tmp_path, full_while_training)
    whole = runs["whole"][1]
    assert len(whole["metrics"].splitlines()) == 12
    for name in ("freed", "again"):
        assert runs[name][1] == whole, name

    said = runs["freed"][0]
    warnings = [line for line in said if line.endswith("until the disk accepts them.")]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{tmp_path}/freed/metrics.jsonl cannot be written: No space left on device. ")
    assert f"{tmp_path}/freed can be written again; no row is missing." in said
    # A checkpoint is due after each step; tries are as far apart as is said.
    failed = [line for line in said if "could not be saved" in line]
    assert 1 <= len(failed) <= 3
    assert re.search(r"No space left on device\. Training continues; .*\. Retrying in about 0 s\.$", failed[0])
    assert re.fullmatch(r"The checkpoint of step (9|1[0-2]) is saved\.", said[-1])  # at the first try with room

    for name in ("stopped", "full"):
        stopped = "more than checkpoint.max_unsaved_seconds (0.3 s); the newest checkpoint is that of step 2"
        assert stopped in runs[name][0][-1]
    assert "Resuming after step 2 of 12." in runs["again"][0]
