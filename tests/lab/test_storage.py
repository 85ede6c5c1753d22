"""Storage: the page cache, reads of every page, saves, the step that storage can feed, and input."""

import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from zaya_jax.lab.measure import storage as module
from zaya_jax.lab.measure import timing
from zaya_jax.lab.measure.storage import (
    BLOCK,
    PAGE_BYTES,
    cached_fraction,
    drop_cached,
    time_reads,
    time_saves,
    write_file,
)
from zaya_jax.machine.__main__ import main


def test_the_page_cache_holds_what_was_read(tmp_path):
    path = tmp_path / "file"
    write_file(path, 64 * PAGE_BYTES + 5)
    assert path.stat().st_size == 64 * PAGE_BYTES
    drop_cached(tmp_path)
    before = cached_fraction(path)
    path.read_bytes()
    assert before < cached_fraction(path) == 1.0


@pytest.mark.parametrize("threads", [1, 3])
def test_a_random_pass_reads_each_page_once(threads, tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []
    write_file(path, 50 * PAGE_BYTES)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: seen.append(at / PAGE_BYTES) or read(file, buffers, at))
    reading = time_reads(path, "random", "warm", threads, 1000, 2)
    assert sorted(seen) == sorted([*range(50)] * 2)
    assert seen[:50] != [*range(50)]
    assert (reading["operations"], reading["bytes"], reading["cached"]) == (50, 50 * PAGE_BYTES, 1.0)
    assert len(reading["seconds"]) == 2
    assert time_reads(path, "random", "cold", threads, 20, 1)["operations"] == 20


def test_a_sequential_pass_reads_the_whole_file(tmp_path, monkeypatch):
    path, clock = tmp_path / "file", iter([1.0, 2.0, 9.0])
    monkeypatch.setattr(timing, "elapsed", lambda call: (call(), next(clock))[1])
    write_file(path, BLOCK + PAGE_BYTES)
    reading = time_reads(path, "sequential", "cold", 1, 1, 3)
    assert (reading["operations"], reading["bytes"], reading["seconds"]) == (2, BLOCK + PAGE_BYTES, [1, 2, 9])
    assert (reading["operations_per_second"], reading["bytes_per_second"]) == (1, (BLOCK + PAGE_BYTES) / 2)


def test_a_save_is_restored_and_compared(tmp_path, monkeypatch):
    saving = time_saves(tmp_path, 2**20, 2)
    assert {name: len(seconds) for name, seconds in saving.items()} == dict.fromkeys(
        ("stall", "commit", "cold", "warm"), 2
    )
    monkeypatch.setattr(module, "restore_newest", lambda *_: SimpleNamespace(state={}))
    with pytest.raises(KeyError):
        time_saves(tmp_path / "other", 2**20, 1)


def test_the_shortest_step_follows_from_pages_and_speed(tmp_path, monkeypatch, capsys):
    fixed = {("random", "cold"): 4.0, ("random", "warm"): 1.0}

    def timed(path, pattern, cache, threads, operations, repeats):
        speed = 400 * threads / fixed.get((pattern, cache), 1.0)
        return {"pattern": pattern, "cache": cache, "threads": threads, "cached": 0.25, "operations_per_second": speed,
                "bytes_per_second": 1.0}  # fmt: skip

    monkeypatch.setattr(module, "time_reads", timed)
    output = tmp_path / "storage.json"
    folders = [f"run_dir={tmp_path}/run", f"data.cache_dir={tmp_path}"]
    flags = ["--size", "1M", "--repeats", "1", "--threads", "1", "2", "--output", str(output)]
    assert main(["storage", "configs/tiny.yaml", *folders, *flags]) == 0
    result = json.loads(output.read_text())
    (phase,) = result["phases"]  # 200 cold pages/s by two threads
    pages = phase["sequences"] * phase["context"] * 2 / PAGE_BYTES
    np.testing.assert_allclose([*phase["shortest_step_seconds"].values()], [pages / 200 * more for more in (1, 2, 8)])
    printed = capsys.readouterr().out
    assert f"reads in {tmp_path}, and saves in {tmp_path}" in printed
    assert ["random", "cold", "2", "200"] in [line.split()[:4] for line in printed.splitlines()]
    assert "25.0 %" in printed  # was cached
    assert [path.name for path in tmp_path.iterdir()] == ["storage.json"]


@pytest.mark.parametrize(("arguments", "message"), [
    ("configs/tiny.yaml --size 4K", "--size is '4K', but must be at least 1M."),
    ("configs/tiny.yaml --threads 0", "--threads is 0, but must be between 1 and 256."),
    ("no.yaml", "no.yaml"),
])  # fmt: skip
def test_bad_input_is_named(arguments, message, capsys):
    assert main(["storage", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch, capsys):
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert main(["storage", "configs/tiny.yaml", f"data.cache_dir={tmp_path}", f"run_dir={tmp_path}"]) == 2
    assert "has 1,000 bytes free, but --size 1,073,741,824 needs 3,221,225,472." in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
