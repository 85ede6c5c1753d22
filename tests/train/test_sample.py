"""Samples during a run, and the state that they show."""

import pytest

from tests.config_helpers import refused_to_load
from tests.train.test_interruption import metric_rows, train_until
from tests.train_helpers import change, differing, shortened, write_run
from zaya_jax.train.final_report import summary
from zaya_jax.train.fit import run_training
from zaya_jax.train.sample import draw_sample

pytestmark = pytest.mark.usefixtures("quick")


def test_samples_are_of_their_steps_survive_resuming_and_change_no_bit_of_training(finished, tmp_path, capsys):
    plain, expected = finished
    changes = {"sample.every": 4, "checkpoint.keep": 9, "checkpoint.every": 4}
    config = change(plain, {"run_dir": str(tmp_path / "run"), **changes})
    train_until(config, 7)  # resumes after step 4
    result = run_training(config)
    assert not differing(result.state, expected.state)
    rows = metric_rows(tmp_path / "run")
    samples = {row["step"]: row.pop("sample") for row in rows if "sample" in row}
    assert rows == metric_rows(expected.run_dir)
    assert list(samples) == [4, 8]  # that of step 12 is in the report
    assert {sample["prompt"] for sample in samples.values()} == {"the model"}
    whole = change(config, {"run_dir": str(tmp_path / "whole")})
    run_training(whole)
    assert {row["step"]: row["sample"] for row in metric_rows(tmp_path / "whole") if "sample" in row} == samples
    shown = f"Sample after step 8:\n{samples[8]['prompt']}"
    assert shown in capsys.readouterr().out
    four = run_training(change(shortened(whole, 4), {"run_dir": str(tmp_path / "four")}))
    tokenizer = four.prepared.tokenizer
    assert draw_sample(four.config, tokenizer, four.program, four.state, four.base) == samples[4]
    assert summary(four.config, four)["samples"] == [samples[4]]


def test_a_run_without_samples_has_none_in_between(tmp_path):
    message = "sample.every is 4, but must be 0 if sample.tokens is 0, which disables samples."
    assert refused_to_load(write_run(tmp_path), "sample.tokens=0", "sample.every=4") == message
