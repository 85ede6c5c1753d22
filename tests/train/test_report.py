import dataclasses
import functools
import json

import jax
import pytest

from tests.train_helpers import change, fast_jit
from zaya_jax.data.pipeline import heldout_text
from zaya_jax.generate import decode
from zaya_jax.train.report import continuation, report


@pytest.fixture
def fast_decode(monkeypatch):
    plain = decode._decode.__wrapped__
    monkeypatch.setattr(decode, "_decode", _compiled(plain))


@functools.cache
def _compiled(function):
    return fast_jit(function, static_argnames=("steps", "greedy", "placement"))


@pytest.mark.usefixtures("fast_decode")
def test_a_report_sets_the_model_beside_the_compressors_and_lets_it_speak(finished):
    config, result = finished
    text = heldout_text(config, result.prepared, "corpus", config.evaluation.batches)
    assert text is not None
    lines = report(config, result).splitlines()
    assert lines[0] == (
        f"Held-out loss over {text.text_bytes:,} of {text.all_bytes:,} bytes in {text.documents:,} documents: "
        f"{result.heldout.nats_per_token:.4f} nats/token"
    )
    assert lines[1].split() == ["this", "model", f"{result.heldout.bits_per_byte(text.text_bytes):.3f}", "bits/byte"]
    for line, (name, value) in zip(lines[2:6], result.prepared.baselines.items(), strict=True):
        assert " ".join(line.split()) == f"{name} {value:.3f} bits/byte (all {text.all_bytes:,} bytes)"
    assert lines[6] == "Continuation of 'the model':"
    assert lines[7].startswith("the model")
    assert lines[-1] == f"Run folder: {result.run_dir}"
    kept = json.loads((result.run_dir / "summary.json").read_text())
    (result.run_dir / "summary.json").unlink()  # it is the run of other tests
    assert kept["heldout"] == {"nats_per_token": result.heldout.nats_per_token, "tokens": result.heldout.tokens}
    assert kept["heldout_by_source"]["corpus"]["bytes"] == text.text_bytes
    assert kept["baselines"] == result.prepared.baselines
    (sample,) = kept["samples"]
    assert lines[7:-1] == (sample["prompt"] + sample["continuation"]).splitlines()


@pytest.mark.usefixtures("fast_decode")
def test_a_report_names_sources_that_hold_nothing_out_and_survives_a_disk_that_cannot_be_written(finished, tmp_path):
    config, result = finished
    config = change(config, {"sample.tokens": 0})
    (tmp_path / "file").write_text("")  # in the place of the run folder
    bare = dataclasses.replace(result, heldout_by_source={}, run_dir=tmp_path / "file")
    text = report(config, bare)
    assert "Source corpus holds out no document to evaluate" in text
    assert "summary.json cannot be written: Not a directory. Rerun the command" in text


def test_without_tokens_nothing_is_written_and_no_device_holds_the_whole_model(finished):
    config, result = finished
    lines = report(change(config, {"sample.tokens": 0}), dataclasses.replace(result)).splitlines()
    (result.run_dir / "summary.json").unlink()
    assert len(lines) == 7
    assert lines[-1] == f"Run folder: {result.run_dir}"


@pytest.mark.usefixtures("fast_decode")
def test_a_continuation_is_drawn_from_the_run_and_repeats(finished):
    config, result = finished
    first = continuation(config, result)
    assert first == continuation(config, result)
    assert first
    other = dataclasses.replace(result, state=change(result.state, {"rng": jax.random.fold_in(result.state.rng, 1)}))
    assert continuation(config, other) != first


@pytest.mark.usefixtures("fast_decode")
def test_a_continuation_ends_where_positions_do(finished):
    config, result = finished
    endless = dataclasses.replace(config, sample=dataclasses.replace(config.sample, tokens=1000))
    assert len(continuation(endless, result)) > len(continuation(config, result))
