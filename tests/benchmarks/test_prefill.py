"""`bench prefill`: the attention layers that it compares, and what it reports of them."""

import dataclasses
from argparse import Namespace

from benchmarks import benchmark_command, prefill
from benchmarks.__main__ import main
from tests.helpers import tiny_config
from zaya_jax.lab.measure.timing import interleave


def test_the_other_layers_have_the_width_of_the_residual_stream():
    assert prefill.CCA.query_size == prefill.CCA.hidden_size // 2
    for name in ("gqa", "full"):
        assert prefill.KINDS[name].query_size == prefill.CCA.hidden_size
    assert prefill.KINDS["full"].kv_size == prefill.CCA.hidden_size == 8 * prefill.CCA.kv_size


def test_a_prompt_is_timed_in_each_layer(monkeypatch, capsys):
    small = dataclasses.replace(tiny_config(), num_layers=1)
    monkeypatch.setattr(prefill, "KINDS", {"cca": small, **dict.fromkeys(("gqa", "full"), dataclasses.replace(
        small, attention="gqa"))})  # fmt: skip
    monkeypatch.setattr(benchmark_command, "interleave_subprocesses", lambda sides, repeats: interleave(
        {name: make(*arguments) for name, (make, *arguments) in sides.items()}, repeats))  # fmt: skip
    monkeypatch.setattr("zaya_jax.lab.measure.timing.SETTLE", 0)
    results = prefill.run(Namespace(lengths=[16], dtype="float32", repeats=2))["results"]
    assert list(results) == ["16"]
    for row in results.values():
        assert row["cca"]["relative_time"] == 1
        assert {len(kind["seconds"]) for kind in row.values()} == {2}
        assert row["cca"]["cache_bytes_per_token"] == 8 * small.kv_size
    assert "16 tokens: CCA" in capsys.readouterr().out


def test_a_length_out_of_range_is_refused(capsys):
    assert main(["prefill", "--lengths", "0"]) == 2
    assert "--lengths is 0, but must be between 1 and 131072." in capsys.readouterr().err
