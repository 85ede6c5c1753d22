"""The data benchmark: both sides read the same text and make the same batches; what is measured of them."""

import dataclasses
import json
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import chex
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import data as bench
from benchmarks import data_peers
from benchmarks.data import Sizes, bench_data, make_inputs, our_packing, our_preparing, write_drawn, write_lines
from benchmarks.data_peers import GrainSettings, datasets_preparing, decode, grain_packing, time_batches
from zaya_jax.config import DataConfig
from zaya_jax.data.loading.batches import train_batches
from zaya_jax.data.prepare.preparation import open_manifest, prepare
from zaya_jax.data.prepare.shards import open_documents
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.lab.measure import timing
from zaya_jax.lab.subprocesses import run_in_subprocess


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    texts = tmp_path_factory.mktemp("texts")
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"file {number}: some words, and {number * number} more. " * 5)
    corpus = DataConfig(corpus=str(texts), suffixes=(".txt",), heldout_fraction=0.3)
    return Sizes(tokens=60_000, shards=2, context=64, batch=3, batches=5, tried=2, text_bytes=20_000, vocab_size=300,
                 corpus=corpus)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(sizes, tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"), sizes)


# --- what is read ----------------------------------------------------------------------------------------------------


def test_the_inputs_are_of_the_sizes(inputs, sizes):
    assert inputs.lines.stat().st_size == pytest.approx(sizes.text_bytes, rel=0.05)
    assert open_manifest(inputs.drawn).train.tokens == pytest.approx(sizes.tokens, rel=0.3)


def test_lines_hold_each_text_about_equally_often_up_to_the_size(tmp_path):
    texts = [f"text {number} of a few words" for number in range(7)]
    for name in ("lines", "again"):
        write_lines(tmp_path / name, texts, 1000)
    lines = (tmp_path / "lines").read_bytes().splitlines(keepends=True)
    assert 1000 <= sum(map(len, lines)) < 1000 + len(lines[-1])
    counts = Counter(json.loads(line)["text"] for line in lines)
    assert set(counts) == set(texts)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert (tmp_path / "again").read_bytes() == (tmp_path / "lines").read_bytes()


def test_drawn_documents_are_a_prepared_folder(tmp_path, inputs):
    write_drawn(tmp_path / "drawn", inputs.tokenizer, 200_000, 2)
    manifest = open_manifest(tmp_path / "drawn")
    assert len({shard.digest for shard in manifest.train.shards}) == 2
    assert 200_000 <= manifest.train.tokens + manifest.heldout.tokens < 300_000
    assert 0 < manifest.heldout.documents < 20
    documents = open_documents(tmp_path / "drawn", manifest, "train")
    assert 500 < np.median(documents.lengths) < 900
    assert documents.lengths.mean() > 1.4 * np.median(documents.lengths)
    tokenizer = load_tokenizer(inputs.tokenizer)
    for index in range(20):
        tokens = documents[index].tokens
        assert tokens[0] == tokens[-1] == tokenizer.eot
        assert (tokens[1:-1] != tokenizer.eot).all()
        assert tokens.max() < tokenizer.vocab_size


# --- our side --------------------------------------------------------------------------------------------------------


@pytest.fixture
def batches(monkeypatch):
    """The batches that either side makes in a pass, of which two are skipped."""
    made = []

    def take(iterator, skipped, count):
        made.extend(next(iterator) for _ in range(skipped + count))
        return 1.5

    monkeypatch.setattr(bench, "time_batches", take)
    monkeypatch.setattr(data_peers, "time_batches", take)
    monkeypatch.setattr(bench, "_SKIPPED", 2)
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_our_packing_gives_the_training_batches(inputs, sizes, batches, monkeypatch, tmp_path, workers):
    def start(config, prepared):
        """In this process: that others change nothing is tested with the data."""
        assert config.data.workers == workers
        return train_batches(dataclasses.replace(config, data=dataclasses.replace(config.data, workers=0)), prepared)

    monkeypatch.setattr(bench, "train_batches", start)
    step = our_packing(inputs.drawn, tmp_path, sizes, workers)
    for turn in (1, 2):
        assert step() == 1.5
        assert len(batches) == 7 * turn
    for batch in batches:
        assert batch.keys() == {"tokens", "targets", "segment_ids", "positions", "loss_mask"}
        chex.assert_shape(list(batch.values()), (3, 64))


def test_our_preparing_does_all_of_it_and_leaves_nothing(inputs, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(bench, "prepare", lambda *args, **named: made.append(prepare(*args, **named)))
    our_preparing(inputs.lines, inputs.tokenizer, tmp_path)()
    [manifest] = made
    lines = len(inputs.lines.read_bytes().splitlines())
    assert manifest.train.documents + manifest.heldout.documents == lines
    assert not list(tmp_path.iterdir())


# --- the peers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "turns"), [
    (GrainSettings(), 2), (GrainSettings(threads=2), 2), (GrainSettings(workers=1, buffer=1), 1),
])  # fmt: skip
def test_grain_packs_the_shards(inputs, batches, settings, turns):
    step = grain_packing(inputs.drawn, 64, 3, settings, 1, 4)
    for turn in range(1, turns + 1):
        assert step() == 1.5
        assert len(batches) == 5 * turn
    for batch in batches:
        assert batch.keys() == {"tokens", "tokens_segment_ids", "tokens_positions"}
        chex.assert_shape(list(batch.values()), (3, 64))
        chex.assert_type(batch["tokens"], np.int32)
        assert (batch["tokens_segment_ids"] > 0).all()


def test_a_record_is_decoded():
    tokens = decode("<u2", np.array([1, 65535], "<u2").tobytes())["tokens"]
    assert tokens.tolist() == [1, 65535]
    chex.assert_type(tokens, np.int32)


def test_batches_are_timed_after_those_that_are_skipped(monkeypatch):
    now, batches = [0.0], iter(range(100))

    def slow():
        for number in batches:
            now[0] += 100.0 if number < 10 else 0.5
            yield number

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert time_batches(slow(), 10, 20) == 10.0
    assert next(batches) == 30


@pytest.mark.parity  # whose environment has `datasets`
@pytest.mark.parametrize("fast", [False, True])
def test_datasets_loads_and_maps_and_leaves_nothing(inputs, tmp_path, fast):
    # In a process of its own, since it sets the environment.
    with run_in_subprocess(datasets_preparing, inputs.lines, inputs.tokenizer, 1, fast, tmp_path) as step:
        assert step() > 0
    assert not list(tmp_path.iterdir())


def test_what_datasets_maps_is_what_the_tokenizer_gives(inputs, tmp_path, monkeypatch):
    """With a stand-in, so that it can be looked at."""
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")  # which brings back what was
    mapped, texts = [], [json.loads(line)["text"] for line in inputs.lines.read_text().splitlines()]

    class Dataset:
        column_names = ("text",)

        def map(self, function, **named):
            assert named == {"batched": True, "num_proc": 2, "remove_columns": ("text",)}
            mapped.append(function({"text": texts})["input_ids"])

    class Stub:
        disable_progress_bars = staticmethod(lambda: None)
        load_dataset = staticmethod(lambda *_, **__: Dataset())

    monkeypatch.setitem(sys.modules, "datasets", Stub)
    for fast in (False, True):
        datasets_preparing(inputs.lines, inputs.tokenizer, 2, fast, tmp_path)()
    assert mapped[0] == mapped[1]
    assert len(mapped[0]) == len(texts)
    assert all(isinstance(row, list) for row in mapped[0])


# --- what is measured ------------------------------------------------------------------------------------------------


@pytest.fixture
def peers(monkeypatch):
    """Both sides made, but their passes are made up: ours takes one second, a peer two, with bad settings three.

    Packing takes four more to start, which it does not tell; the map of `datasets` is nine tenths of its pass.
    """
    made, now = [], [0.0]

    class Clock:
        perf_counter = staticmethod(lambda: now[0])
        sleep = staticmethod(lambda _: None)

    def make(name, seconds, start=0.0, told=1.0):
        def maker(*arguments):
            made.append((name, *arguments))
            taken = seconds(arguments)

            def step():
                now[0] += start + taken
                return told * taken

            return step

        return maker

    def of_settings(arguments):
        settings = next(argument for argument in arguments if isinstance(argument, GrainSettings))
        return 2.0 if (settings.threads, settings.buffer) in {(4, 16), (4, 4)} else 3.0

    monkeypatch.setattr(timing, "time", Clock)
    monkeypatch.setattr(timing, "run_in_subprocess", lambda make, *arguments: nullcontext(make(*arguments)))
    monkeypatch.setattr(bench, "require_packages", lambda *_: None)
    monkeypatch.setattr(bench, "our_packing", make("our packing", lambda _: 1.0, start=4.0))
    monkeypatch.setattr(bench, "our_preparing", make("our preparing", lambda _: 1.0))
    monkeypatch.setattr(bench, "grain_packing", make("grain", of_settings, start=4.0))
    datasets = make("datasets", lambda arguments: 1.5 if arguments[3] else 2.0, told=0.9)
    monkeypatch.setattr(bench, "datasets_preparing", datasets)
    return made


def test_both_sides_read_the_same_and_the_best_setting_of_the_peer_counts(peers, sizes, capsys):
    result = bench_data(sizes, 3)
    assert json.loads(json.dumps(result)) == result
    packing, packing_2, preparing = result["results"].values()
    for measured in (packing, packing_2):
        assert measured["ratio"] == 2.0
        assert measured["tokens_per_second"] == {"ours": 960, "peer": 480}
        assert measured["seconds"] == {"ours": [1.0] * 3, "peer": [2.0] * 3}
    assert packing["peer_settings"] == {"threads": 4, "workers": 0, "buffer": 16}
    assert packing_2["peer_settings"]["workers"] == 2
    assert len(packing["peer_settings_tried"]) == 5
    assert preparing["ratio"] == {"peer": 2.0, "peer_fast": 1.5, "peer_map_alone": 1.8, "peer_fast_map_alone": 1.35}
    assert preparing["seconds"]["ours"] == [1.0] * 3
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 5
    assert "packing, 0 workers: zaya_jax" in out
    assert "2.00× as fast" in out
    read = {name: {str(argument) for made in peers if made[0] == name for argument in made[1:]} for name, *_ in peers}
    assert len({path for path in read["our packing"] & read["grain"] if path.endswith("/drawn")}) == 1
    assert len({path for path in read["our preparing"] & read["datasets"] if path.endswith("/lines.jsonl")}) == 1


def test_a_missing_peer_is_told_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert command.main(["data"]) == 2
    assert "datasets: pip install -e '.[bench]'" in capsys.readouterr().err
