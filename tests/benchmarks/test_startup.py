"""Starts are split into parts that add up, from real runs that end after their first step."""

import math
from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.startup import _parts, _start, run
from zaya_jax.errors import RunStopped
from zaya_jax.run.progress_record import Phase, Progress

SMALL = ["model.num_layers=1", "model.vocab_size=512", "data.context=64", "phases.0.tokens=2048",
         "phases.0.schedule.warmup_tokens=512", "train.batch.tokens=512"]  # fmt: skip
seconds = st.floats(0, 100)


@given(st.lists(seconds, min_size=len(Phase), max_size=len(Phase)), seconds, seconds)
def test_the_parts_add_up_to_the_whole(phases, before, rest):
    total = before + sum(phases) + rest
    progress = Progress(1, 1, Phase.DATA, 1, 0, 1.0, 1.0, tuple(phases), tuple(phases), None)
    parts = _parts(progress, before, total)
    assert parts.pop("total") == total
    assert math.isclose(sum(parts.values()), total, abs_tol=1e-6)
    assert parts["imports"] == pytest.approx(before + phases[Phase.START] + phases[Phase.JOIN])
    assert parts["compilation"] == phases[Phase.COMPILE]


@pytest.mark.soak
def test_a_second_start_compiles_and_prepares_nothing(capsys):
    results = run(Namespace(config="configs/tiny.yaml", overrides=SMALL, repeats=1))["results"]
    cold, warm = ({part: times[0] for part, times in results[name].items()} for name in ("cold", "warm"))
    assert cold.keys() == warm.keys() == {"imports", "data", "parameters", "compilation", "first step", "total"}
    assert warm["data"] < cold["data"] / 2
    assert warm["compilation"] < cold["compilation"]
    assert capsys.readouterr().out.startswith("cold start")


def test_a_run_that_does_not_start_is_told(tmp_path):
    with pytest.raises(RunStopped, match=r"failed: .*no_such"):
        _start(tmp_path, "cold", "configs/tiny.yaml", ["no_such=1"])
