"""Ablations: each variant differs in one part, its learning rates are tuned, and it trains as users do."""

import dataclasses
import math
import sysconfig

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.ablations import CONTEXT, MULTIPLIERS, VARIANTS, WHOLE, changes, run_trials, tune
from zaya_jax.config import load_config, to_dict
from zaya_jax.config.shipped import shipped
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token

FEWER = [
    f"data.corpus={sysconfig.get_path('stdlib')}/asyncio",
    "evaluation.batches=1",
    "evaluation.batch_size=4",
    "data.heldout_fraction=0.3",
]


def test_each_variant_changes_one_part_and_costs_about_the_same():
    whole = load_config(shipped("tiny.yaml"), changes(WHOLE))
    for name in VARIANTS:
        config = load_config(shipped("tiny.yaml"), changes(name))
        different = [key for key, value in to_dict(config).items() if value != to_dict(whole)[key]]
        assert different == ([] if name == WHOLE else ["model"] if name in list(VARIANTS)[:10] else ["optimizer"]), name
        model = config.model
        changed = [field.name for field in dataclasses.fields(model)
                   if getattr(model, field.name) != getattr(whole.model, field.name)]  # fmt: skip
        assert len(changed) == (different == ["model"]), name
        parameters_left, flops_left = (count(model, *more) / count(whole.model, *more) for count, more in
                                       ((total_parameters, ()), (training_flops_per_token, (CONTEXT,))))  # fmt: skip
        assert (parameters_left < 1) == (bool(changed) and name not in ("no QK-mean", "no value shift")), name
        assert 0.8 < flops_left <= 1, name


@given(best=st.floats(0.1, 10))
def test_the_grid_of_rates_grows_until_the_best_is_inside(best):
    tried = []

    def run(keys):
        tried.extend(keys)
        return {key: abs(np.log(key[1] / best)) for key in keys}

    (losses,) = tune(["only"], run).values()
    assert len(set(tried)) == len(tried) == len(losses) <= len(MULTIPLIERS) + 2
    found = min(losses, key=losses.__getitem__)
    if 0.2 < best < 5:
        assert min(losses) < found < max(losses)
        assert abs(np.log2(found / best)) <= 0.5 + 1e-6


def test_rates_with_which_a_training_diverges_never_win():
    (losses,) = tune(["only"], lambda keys: {key: math.nan if key[1] <= 1 else key[1] for key in keys}).values()
    assert set(losses) == {*MULTIPLIERS, 4.0}  # 2 is the best, and 4 shows that it is


@pytest.mark.soak
def test_trainings_give_their_losses_in_order_and_one_that_fails_gives_none(tmp_path, capsys):
    keys = (WHOLE, 1.0, 0), ("GQA", 1.0, 0), (WHOLE, 2.0, 0)
    trials = {key: [*changes(*key, 10), *FEWER] for key in keys}
    trials[keys[2]].append("no_such=1")
    losses = run_trials(trials, tmp_path)
    assert [*losses] == [*trials]
    assert losses[keys[0]] != losses[keys[1]]
    assert all(0 < losses[key] < 9 for key in keys[:2])
    assert losses[keys[2]] == math.inf
    assert "no_such" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "message"), [
    (["--steps", "9"], "--steps is 9"),
    (["--only", "x"], "--only is 'x', but must be one of ZAYA1, GQA,"),
])  # fmt: skip
def test_a_mistake_is_told_before_anything_trains(flags, message, capsys):
    assert main(["ablations", *flags]) == 2
    assert message in capsys.readouterr().err
