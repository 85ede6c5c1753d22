"""A process that others have superseded, as on storage without locks, stops and writes nothing more."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.saved_helpers import write_soak
from tests.train.writers import Writers
from tests.train_helpers import compute_little, small_run, write_run
from zaya_jax.checkpoint import store
from zaya_jax.errors import Superseded
from zaya_jax.run.fencing import FENCE, Fence
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import read_rows
from zaya_jax.train.final_report import report
from zaya_jax.train.fit import run_training


def content(folder):
    """Every file of a run with its content and time of writing; no unfinished save."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != FENCE and ".g1" not in str(path)]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


class Inline:
    """Saves in the main thread, so that nothing else is being written when a token is taken."""

    def __init__(self, *_):
        pass

    def submit(self, job, *arguments):
        done = store.Future()
        try:
            done.set_result(job(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_):
        pass


def train(folder, moment, *, late=False):
    """Train a run that is superseded when it looks for the `moment`-th time, or just after if it is `late`.

    Returns:
      The run's content then, and how often it looked.
    """
    seen, looks = {}, []

    class Watched(Fence):
        def check(self):
            looks.append(None)
            if len(looks) == moment and not late:
                take(self._folder)
            problem = super().check()
            if len(looks) == moment and late:
                take(self._folder)
            return problem

    def take(checkpoints):
        Fence(checkpoints).take({})
        seen.update(content(folder / "run"))

    config = small_run(folder, "checkpoint.every=5", f"checkpoint.local_dir={folder}/run/local", "sample.tokens=0")
    with pytest.MonkeyPatch.context() as patch:
        compute_little(patch)
        patch.setattr(store, "Fence", Watched)
        patch.setattr(store, "ThreadPoolExecutor", Inline)
        try:
            report(config, run_training(config))
        except Superseded:
            return seen, len(looks)
    return {}, len(looks)


@pytest.fixture(scope="module")
def looks(tmp_path_factory):
    """How often an undisturbed run looks."""
    return train(tmp_path_factory.mktemp("whole"), 0)[1]


@settings(max_examples=5)
@given(data=st.data(), late=st.booleans())
def test_a_superseded_process_writes_no_more_than_what_it_is_just_writing(tmp_path_factory, looks, data, late):
    folder = tmp_path_factory.mktemp("run")
    moment = data.draw(st.integers(2, looks - late))  # it looks once before it takes its token
    before, _ = train(folder, moment, late=late)
    after = content(folder / "run")
    written = {Path(name).parts[:2] for name in {*before, *after} if before.get(name) != after.get(name)}
    assert before
    assert len(written) <= late, written


@pytest.mark.soak
def test_fifty_writers_on_storage_without_locks_leave_the_rows_of_one(tmp_path):
    start, rng, count = time.monotonic(), random.SystemRandom(), 50
    phases = json.dumps([{"name": "one", "tokens": 10**9}])
    command = ["--config", str(write_run(tmp_path)), f"phases={phases}", "checkpoint.every=20", "evaluation.every=100"]
    writers = Writers(tmp_path, command, tmp_path / "run")
    for _ in range(count):
        process = writers.start()
        if rng.random() < 0.8:
            writers.wait_for_row(process)
        time.sleep(3 * rng.random())
    writers.start()
    writers.end()
    trained = writers.check()
    rows = (tmp_path / "run" / METRICS).read_bytes()
    assert [row["step"] for row in read_rows(tmp_path / "run" / METRICS)] == list(range(1, rows.count(b"\n") + 1))
    assert trained >= count / 2
    what = (f"a training that is started again {count} times while it runs, at random moments, on storage without file "
            "locks: each process ends once the next one has taken the fencing token, writes nothing after the first "
            "row of its successor, and every step has one row")  # fmt: skip
    write_soak("superseded", what, start, {"superseded": count, "while training": trained, "steps": rows.count(b"\n"),
                                           "writes after a successor's first row": 0})  # fmt: skip
