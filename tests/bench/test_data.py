import contextlib
import json
import sys

import pytest

from zaya_jax.bench import __main__ as command
from zaya_jax.bench import data as bench
from zaya_jax.bench import data_peers
from zaya_jax.bench.data import Sizes, bench_data, make_inputs, measure_memory, our_packing, our_preparing
from zaya_jax.config import DataConfig
from zaya_jax.data.pipeline import train_batches
from zaya_jax.data.prepare import open_manifest, prepare
from zaya_jax.machine import subprocesses


def in_this_process(make, *arguments):
    return contextlib.nullcontext(make(*arguments))


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    texts = tmp_path_factory.mktemp("texts")
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"file {number}: some words, and {number * number} more. " * 5)
    corpus = DataConfig(corpus=str(texts), suffixes=(".txt",), heldout_fraction=0.3)
    return Sizes(tokens=60_000, shards=2, context=64, batch=3, batches=5, tried=2, text_bytes=20_000,
                 unit_bytes=10_000, growth=2, planned=1000, vocab_size=300, corpus=corpus)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(sizes, tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"), sizes)


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
        settings = next(given for given in arguments if isinstance(given, data_peers.GrainSettings))
        return 2.0 if (settings.threads, settings.buffer) in {(4, 16), (4, 4)} else 3.0

    monkeypatch.setattr(subprocesses, "time", Clock)
    monkeypatch.setattr(bench, "run_in_subprocess", in_this_process)
    monkeypatch.setattr(bench, "find_datasets", lambda: None)
    monkeypatch.setattr(bench, "our_packing", make("our packing", lambda _: 1.0, start=4.0))
    monkeypatch.setattr(bench, "our_preparing", make("our preparing", lambda _: 1.0))
    monkeypatch.setattr(bench, "grain_packing", make("grain", of_settings, start=4.0))
    datasets = make("datasets", lambda given: 1.5 if given[3] else 2.0, told=0.9)
    monkeypatch.setattr(bench, "datasets_preparing", datasets)
    return made


def test_the_inputs_are_of_the_sizes(inputs, sizes):
    assert inputs.lines.stat().st_size == pytest.approx(sizes.text_bytes, rel=0.05)
    assert inputs.few_lines.stat().st_size == pytest.approx(sizes.text_bytes / 2, rel=0.05)
    assert inputs.repeated_lines.read_bytes() == inputs.few_lines.read_bytes() * 2
    assert open_manifest(inputs.drawn).train.tokens == pytest.approx(sizes.tokens, rel=0.3)
    assert open_manifest(inputs.few_drawn).train.tokens == pytest.approx(sizes.tokens / 2, rel=0.3)


@pytest.mark.parametrize("workers", [0, 2])
def test_our_packing_gives_the_training_batches(inputs, sizes, monkeypatch, tmp_path, workers):
    seen = []

    def take(iterator, skipped, batches):
        seen.extend(next(iterator) for _ in range(skipped + batches))
        return 1.5

    def start(config, prepared):
        assert config.data.workers == workers
        return train_batches(config, prepared)

    monkeypatch.setattr(bench, "time_batches", take)
    monkeypatch.setattr(bench, "train_batches", start)
    monkeypatch.setattr(bench, "_SKIPPED", 2)
    assert our_packing(inputs.drawn, tmp_path, sizes, workers, 5)() == 1.5
    assert len(seen) == 7
    for batch in seen:
        assert batch.keys() == {"tokens", "targets", "segment_ids", "positions", "loss_mask"}
        assert {array.shape for array in batch.values()} == {(3, 64)}


def test_our_packing_gives_a_pass_as_often_as_it_is_asked(inputs, sizes, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_SKIPPED", 2)
    step = our_packing(inputs.drawn, tmp_path, sizes, 0, 5)
    assert step() > 0
    assert step() > 0


def test_our_preparing_does_all_of_it_and_leaves_nothing(inputs, sizes, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(bench, "prepare", lambda *given, **named: made.append(prepare(*given, **named)))
    assert our_preparing(inputs.lines, inputs.tokenizer, tmp_path, sizes.unit_bytes)() > 0
    [manifest] = made
    lines = len(inputs.lines.read_bytes().splitlines())
    assert manifest.train.documents + manifest.heldout.documents == lines
    assert not list(tmp_path.iterdir())


def test_the_result_says_what_was_measured_and_where(peers, sizes, tmp_path, capsys):
    path = tmp_path / "data.json"
    result = bench_data(sizes, 3, str(path))
    assert json.loads(path.read_text()) == result
    assert {"benchmark", "size", "command", "peer", "versions", "hardware", "results"} == result.keys()
    packing, packing_2, preparing, memory, planning = result["results"].values()
    for found in (packing, packing_2):
        assert found["ratio"] == 2.0
        assert found["tokens_per_second"] == {"ours": 960, "peer": 480}
        assert found["seconds"] == {"ours": [1.0] * 3, "peer": [2.0] * 3}
    assert packing["peer_settings"] == {"threads": 4, "workers": 0, "buffer": 16}
    assert packing_2["peer_settings"]["workers"] == 2
    assert len(packing["peer_settings_tried"]) == 5
    assert preparing["ratio"] == {"peer": 2.0, "peer_fast": 1.5, "peer_map_alone": 1.8, "peer_fast_map_alone": 1.35}
    assert preparing["seconds"]["ours"] == [1.0] * 3
    assert all(found["peak_bytes"].keys() == {"smaller", "larger"} for found in memory.values())
    assert planning.keys() == {"4096", "32768", "131072"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:5]] == [
        "packing, 0 workers", "packing, 2 workers", "preparing, 2 processes", "memory of preparing",
        "memory of packing",
    ]  # fmt: skip
    assert [line.partition(":")[0] for line in lines[5:]] == [
        f"planning 1,000 documents at {context}" for context in ("4,096", "32,768", "131,072")
    ]
    assert "ratio 2.00" in lines[0]


def test_both_sides_read_the_same(peers, sizes):
    bench_data(sizes, 1, None)
    read = {name: {str(given) for made in peers if made[0] == name for given in made[1:]} for name, *_ in peers}
    assert len({path for path in read["our packing"] & read["grain"] if path.endswith("/large")}) == 1
    assert len({path for path in read["our preparing"] & read["datasets"] if path.endswith("/large.jsonl")}) == 1


def test_memory_is_measured_for_both_inputs(inputs, sizes, monkeypatch):
    measured = []

    def run(make, *arguments):
        measured.append(arguments[1])
        return in_this_process(make, *arguments)

    monkeypatch.setattr(bench, "run_in_subprocess", run)
    monkeypatch.setattr(bench, "_SKIPPED", 2)
    for found in measure_memory(inputs, sizes).values():
        assert min(found["peak_bytes"].values()) > 2**20
        assert found["ratio"] > 0
    assert measured == [inputs.few_lines, inputs.repeated_lines, inputs.few_drawn, inputs.drawn]


def test_the_sizes_are_those_that_the_benchmark_names():
    assert (Sizes().tokens, Sizes().context, Sizes().batch, Sizes().text_bytes) == (20_000_000, 4096, 8, 40_000_000)


def test_the_command_measures_with_the_given_repeats(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "bench_data", lambda *given: seen.append(given))
    assert command.main(["data", "--repeats", "6", "--output", "x.json"]) == 0
    assert command.main(["data"]) == 0
    assert seen == [(Sizes(), 6, "x.json"), (Sizes(), 5, None)]


def test_the_command_tells_a_missing_peer_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert command.main(["data"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: The peer needs datasets")
    assert error.count("\n") == 1
