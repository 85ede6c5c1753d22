"""Samples during a run, and the state that they show."""

import pytest

from tests.config_helpers import refused_to_load
from tests.train.test_interruption import metric_rows, train_until
from tests.train_helpers import change, differing, shortened, write_run
from zaya_jax.config import load_config
from zaya_jax.errors import InputError, Reason, RunStopped
from zaya_jax.generate import engine
from zaya_jax.train import sample
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


def test_a_prompt_that_fills_the_positions_is_refused_before_training(tmp_path, monkeypatch):
    config = change(load_config(write_run(tmp_path)), {"sample.tokens": 4, "run_dir": str(tmp_path / "run")})
    full = [1] * config.model.max_positions  # of a tokenizer with more tokens than bytes
    monkeypatch.setattr(sample, "encode_prompt", lambda *_: full)
    with pytest.raises(InputError, match=r"sample\.prompt has 64 tokens, but must have fewer than model\.max_"):
        run_training(config)
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_a_sample_whose_cache_does_not_fit_stops_the_run_as_other_lack_of_memory_does(finished, monkeypatch):
    config, result = finished
    monkeypatch.setattr(engine, "host_free_memory", lambda: 0)
    with pytest.raises(RunStopped, match=r"^The sample ran out of memory.*\. Set sample\.tokens and") as stopped:
        draw_sample(config, result.prepared.tokenizer, result.program, result.state, result.base)
    assert stopped.value.reason is Reason.DEVICE_MEMORY
