import json
import sys

import numpy as np
import pytest

from zaya_jax.bench import data_peers
from zaya_jax.bench.corpora import write_drawn, write_lines, write_tokenizer
from zaya_jax.bench.data_peers import (
    Decode,
    GrainSettings,
    datasets_preparing,
    find_datasets,
    grain_packing,
    time_batches,
)
from zaya_jax.errors import InputError
from zaya_jax.machine.subprocesses import run_in_subprocess

TEXTS = [f"text {number} of a few words" for number in range(7)]


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json", TEXTS, 300)
    write_lines(tmp_path / "lines.jsonl", TEXTS, 2000)
    write_drawn(tmp_path / "drawn", tmp_path / "tokenizer.json", 20_000, 2)
    return tmp_path


@pytest.mark.parametrize("settings", [GrainSettings(), GrainSettings(threads=2), GrainSettings(workers=2, buffer=1)])
def test_grain_packs_the_shards(folder, monkeypatch, settings):
    seen = []

    def take(iterator, skipped, batches):
        seen.extend(next(iterator) for _ in range(skipped + batches))
        return 1.5

    monkeypatch.setattr(data_peers, "time_batches", take)
    assert grain_packing(folder / "drawn", 64, 3, settings, 1, 4)() == 1.5
    assert len(seen) == 5
    for batch in seen:
        assert batch.keys() == {"tokens", "tokens_segment_ids", "tokens_positions"}
        assert {array.shape for array in batch.values()} == {(3, 64)}
        assert batch["tokens"].dtype == np.int32
        assert (batch["tokens_segment_ids"] > 0).all()


def test_each_pass_of_grain_begins_anew(folder):
    step = grain_packing(folder / "drawn", 64, 3, GrainSettings(), 0, 500)  # more than an epoch
    assert step() > 0
    assert step() > 0


def test_a_record_is_decoded():
    decoded = Decode("<u2")(np.array([1, 65535], "<u2").tobytes())
    assert decoded["tokens"].tolist() == [1, 65535]
    assert decoded["tokens"].dtype == np.int32


def test_batches_are_timed_after_those_that_are_skipped(monkeypatch):
    now, taken = iter([3.0, 5.0]), []

    class Clock:
        @staticmethod
        def perf_counter():
            taken.append(next(batches))
            return next(now)

    batches = iter(range(100))
    monkeypatch.setattr(data_peers, "time", Clock)
    assert time_batches(batches, 10, 20) == 2.0
    assert taken == [10, 31]


def test_a_missing_peer_is_told_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"needs datasets: pip install -e '\.\[bench\]'\."):
        find_datasets()
    with pytest.raises(InputError, match="needs datasets"):
        datasets_preparing(tmp_path, tmp_path, 1, False, tmp_path)


@pytest.mark.parametrize("fast", [False, True])
def test_datasets_loads_and_maps_and_leaves_nothing(folder, fast):
    pytest.importorskip("datasets")
    before = set(folder.iterdir())
    # In a process of its own, since it sets the environment.
    with run_in_subprocess(
        datasets_preparing, folder / "lines.jsonl", folder / "tokenizer.json", 1, fast, folder
    ) as step:
        assert step() > 0
    assert set(folder.iterdir()) == before


def test_what_datasets_maps_is_what_the_tokenizer_gives(folder, monkeypatch):
    """With a stand-in, so that it can be looked at."""
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")  # which brings back what was
    mapped = []

    class Dataset:
        column_names = ("text",)

        def map(self, function, **given):
            texts = [json.loads(line)["text"] for line in (folder / "lines.jsonl").read_text().splitlines()]
            mapped.append((texts, function({"text": texts})["input_ids"], given))

    class Stub:
        disable_progress_bars = staticmethod(lambda: None)
        load_dataset = staticmethod(lambda *_, **__: Dataset())

    monkeypatch.setattr(data_peers, "find_datasets", lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", Stub)
    for fast in (False, True):
        datasets_preparing(folder / "lines.jsonl", folder / "tokenizer.json", 2, fast, folder)()
    (texts, ids, given), (_, ids_fast, _) = mapped
    assert ids == ids_fast
    assert len(ids) == len(texts)
    assert all(isinstance(row, list) for row in ids)
    assert given == {"batched": True, "num_proc": 2, "remove_columns": ("text",)}
