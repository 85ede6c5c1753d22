import dataclasses
import functools

import jax
import pytest

from tests.train_helpers import change, fast_jit
from zaya_jax.generate import decode
from zaya_jax.train.report import continuation, report


@pytest.fixture
def fast_decode(monkeypatch):
    plain = decode._decode.__wrapped__
    monkeypatch.setattr(decode, "_decode", _compiled(plain))


@functools.cache
def _compiled(function):
    return fast_jit(function, static_argnames=("steps", "greedy", "target"))


@pytest.mark.usefixtures("fast_decode")
def test_a_report_sets_the_model_beside_the_compressors_and_lets_it_speak(finished):
    config, result = finished
    held = result.prepared.sources["corpus"].manifest.heldout
    lines = report(config, result).splitlines()
    assert lines[0].startswith(f"Held-out loss over {held.text_bytes:,} bytes in {held.documents:,} documents: ")
    assert lines[0].endswith(f"{result.heldout.nats_per_token:.4f} nats/token")
    bits = {line.split()[0]: line.split()[-2] for line in lines[2:6]}
    assert lines[1].split() == ["this", "model", f"{result.heldout.bits_per_byte(held.text_bytes):.3f}", "bits/byte"]
    assert bits == {name: f"{value:.3f}" for name, value in result.prepared.baselines.items()}
    assert lines[6] == "Continuation of 'the model':"
    assert lines[7].startswith("the model")
    assert lines[-1] == f"Run folder: {result.run_dir}"


def test_without_tokens_nothing_is_written_and_no_device_holds_the_whole_model(finished):
    config, result = finished
    lines = report(change(config, {"sample.tokens": 0}), dataclasses.replace(result)).splitlines()
    assert len(lines) == 7
    assert lines[-1] == f"Run folder: {result.run_dir}"


@pytest.mark.usefixtures("fast_decode")
def test_a_continuation_is_drawn_from_the_run_and_repeats(finished):
    config, result = finished
    first = continuation(config, result)
    assert first == continuation(config, result)
    assert len(first) > len(config.sample.prompt)
    other = dataclasses.replace(result, state=change(result.state, {"rng": jax.random.fold_in(result.state.rng, 1)}))
    assert continuation(config, other) != first


@pytest.mark.usefixtures("fast_decode")
def test_a_continuation_ends_where_positions_do(finished):
    config, result = finished
    endless = dataclasses.replace(config, sample=dataclasses.replace(config.sample, tokens=1000))
    assert len(continuation(endless, result)) > len(continuation(config, result))
