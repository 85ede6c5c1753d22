"""Small trainings that are compared: whole, repeatable, on a core each; and what is concluded from their curves."""

import dataclasses
import itertools
import json
import shutil
import sysconfig
from argparse import Namespace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import optimizer
from benchmarks import training_sweep as sweep
from benchmarks.ablations import MULTIPLIERS, tune, variants
from benchmarks.balance import EVEN, _prepare, even_after, steps_until_even
from benchmarks.optimizer import compare, make_grid, optimizer_config, steps_to
from benchmarks.training_sweep import CONTEXT, Curve, Trial, median_or_never, run_trial, run_trials, small_config
from tests.train_helpers import compile_once
from zaya_jax.config import BatchConfig, ModelConfig, PhaseConfig, ScheduleConfig, TrainConfig
from zaya_jax.data.prepare.preparation import open_manifest
from zaya_jax.errors import InputError
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token
from zaya_jax.model.layers import MATRIX_ROLES
from zaya_jax.model.tree import balancing_biases, parameters, with_values
from zaya_jax.model.zaya import Zaya

MODEL = ModelConfig(
    vocab_size=300, hidden_size=16, num_layers=2, num_query_heads=2, num_kv_heads=2, head_dim=8, num_experts=4,
    expert_size=16, router_size=8, max_positions=128, rope_base=1.0e4,
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A configuration whose data is prepared, of six steps in two phases."""
    folder = tmp_path_factory.mktemp("trials")
    (folder / "corpus").mkdir()
    for index in range(8):
        (folder / "corpus" / f"{index}.txt").write_text(f"the {index} model reads a token\n" * 40)
    config = small_config(folder / "cache", 20, model=MODEL)
    data = dataclasses.replace(config.data, corpus=str(folder / "corpus"), suffixes=(".txt",), heldout_fraction=0.3)
    phases = tuple(PhaseConfig(3 * 256, name, schedule=ScheduleConfig("constant")) for name in ("one", "two"))
    return dataclasses.replace(config, phases=phases, data=data, train=TrainConfig(batch=BatchConfig(tokens=256)))


@pytest.mark.soak
def test_a_training_gives_its_curve_and_gives_it_again(small, monkeypatch):
    compile_once(monkeypatch)
    first, again = (run_trial(Trial("small", small, evaluation_interval=2)) for _ in range(2))
    assert [step for step, _ in first.heldout] == [2, 4, 6]
    assert first.final < first.heldout[0][1] < np.log(300) + 1
    assert len(first.entropy) == 6
    assert (first.heldout, first.entropy) == (again.heldout, again.entropy)


@pytest.mark.soak
def test_trainings_run_in_order_in_processes_of_their_own(small, capsys):
    curves = run_trials({name: Trial(name, small, evaluation_interval=6) for name in ("a", "b")})
    assert list(curves) == ["a", "b"]
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]
    assert len({curve.final for curve in curves.values()}) == 1  # each on one core, whatever the other did


@pytest.mark.soak
def test_an_offset_of_the_routers_sends_tokens_to_the_first_two_experts():
    model = Zaya(MODEL, jax.random.key(0))
    skewed, same = (sweep._offset_routers(parameters(model), offset) for offset in (6.0, 0.0))

    def shares(values):
        out = with_values(model, {**values, **balancing_biases(model)})(np.arange(256).reshape(2, 128))
        counts = np.array(out.stats.expert_counts_le)
        return counts[:, :2].sum(1) / counts.sum(1)

    assert (shares(skewed) > 0.95).all()
    assert (shares(parameters(model)) < 0.9).any()
    assert all(np.array_equal(x, parameters(model)[name]) for name, x in same.items())


def test_never_is_more_than_any_number():
    assert [median_or_never(values) for values in ([3, None, 5], [None, None, 5], [4, 1, 2])] == [5, None, 2]


def test_each_ablation_lacks_one_part_and_costs_about_the_same(tmp_path):
    whole = small_config(tmp_path, 20).model
    models = variants(whole)
    for name, model in models.items():
        model.check()
        changed = [field.name for field in dataclasses.fields(model)
                   if getattr(model, field.name) != getattr(whole, field.name)]  # fmt: skip
        assert len(changed) == (model is not whole), name
        parameters_left, flops_left = (count(model, *more) / count(whole, *more) for count, more in
                                       ((total_parameters, ()), (training_flops_per_token, (CONTEXT,))))  # fmt: skip
        assert (parameters_left < 1) == (name not in ("ZAYA1", "no QK-mean", "no value shift")), name
        assert 0.8 < flops_left <= 1, name


@given(best=st.floats(0.1, 10))
def test_the_grid_of_rates_grows_until_the_best_is_inside(best):
    tried = []

    def run(keys):
        tried.extend(keys)
        return {key: Curve([(1, abs(np.log(key[1] / best)))], [], 0.0) for key in keys}

    (losses,) = tune(["only"], run).values()
    assert len(set(tried)) == len(tried) == len(losses) <= len(MULTIPLIERS) + 2
    found = min(losses, key=losses.__getitem__)
    if 0.2 < best < 5:
        assert min(losses) < found < max(losses)
        assert abs(np.log2(found / best)) <= 0.5 + 1e-6


def test_rates_with_which_a_training_diverges_never_win():
    def run(keys):
        return {key: Curve([(1, np.nan if key[1] <= 1 else key[1])], [], 0.0) for key in keys}

    (losses,) = tune(["only"], run).values()
    assert set(losses) == {*MULTIPLIERS, 4.0}  # 2 is the best, and 4 shows that it is


def test_the_load_is_even_where_it_stays_so_from_the_start_and_from_the_switch():
    low, high = EVEN - 0.01, EVEN
    assert even_after([low, high, low, high, high, high, low]) == 4
    assert even_after([high] * 3) == 1
    assert even_after([low, high, high]) is None
    assert even_after([]) is None
    entropy = [low, high, high, high, low, low, high, high, high, high]
    assert steps_until_even(Curve([], entropy, 0.0), 5) == (2, 2)


def test_the_sources_of_the_switch_share_a_tokenizer(tmp_path, monkeypatch):
    """With a small part of the standard library in its place."""
    whole, part = Path(sysconfig.get_path("stdlib")), tmp_path / "stdlib"
    (part / "encodings").mkdir(parents=True)
    chosen = [*sorted(whole.glob("*.py"), key=lambda path: (path.stat().st_size, path))[:40],
              *sorted(whole.glob("encodings/c*.py"))[:40], whole / "encodings" / "aliases.py"]  # fmt: skip
    for path in chosen:
        shutil.copyfile(path, part / path.relative_to(whole))
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(part)}.__getitem__)
    manifests = {name: open_manifest(folder) for name, folder in _prepare(tmp_path).items()}
    assert len({manifest.tokenizer.digest for manifest in manifests.values()}) == 1
    for manifest in manifests.values():
        assert manifest.train.documents + manifest.heldout.documents == 40
        assert manifest.heldout.documents


def test_steps_to_a_loss_are_read_off_the_line_between_two_evaluations():
    curve = Curve([(10, 5.0), (20, 4.0), (30, 4.5), (40, 3.0)], [], 0.0)
    assert [steps_to(curve, loss) for loss in (5.5, 4.5, 4.0, 3.75, 2.9)] == [10, 15, 20, pytest.approx(35), None]


def test_both_optimizers_are_counted_to_where_adamw_ends():
    adamw = Curve([(10, 5.0), (20, 4.0), (30, 4.0)], [], 0.0)
    fast, slow = Curve([(10, 4.0)], [], 0.0), Curve([(10, 4.5)], [], 0.0)
    result = compare({0: {"muon": fast, "adamw": adamw}, 1: {"muon": slow, "adamw": adamw}})
    assert [(row["muon"], row["adamw"], row["ratio"]) for row in result["seeds"]] == [(10, 20, 0.5), (None, 20, None)]
    assert result["median"] is None
    assert compare({seed: {"muon": fast, "adamw": adamw} for seed in range(3)})["median"] == 0.5


def test_the_best_rates_of_an_earlier_result_are_used(tmp_path, monkeypatch):
    ran = []

    def run(trials):
        ran.append({key: trial.config.optimizer for key, trial in trials.items()})
        return dict.fromkeys(trials, Curve([(10, 4.0), (20, 3.0)], [], 0.0))

    monkeypatch.setattr(optimizer, "run_trials", run)
    recorded = Path("benchmarks/optimizer_cpu.json")
    best = {kind: grid["best"] for kind, grid in json.loads(recorded.read_text())["grid"].items()}
    result = optimizer.run(Namespace(steps=20, png=None, tuned=str(recorded)))
    assert len(ran) == 1  # without a grid
    assert ran[0] == {(seed, kind): optimizer_config(kind, rates["matrices"], rates["others"])
                      for seed in (0, 1, 2) for kind, rates in best.items()}  # fmt: skip
    assert result["tuned"] == str(recorded)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(result))
    assert optimizer.read_grid(str(again)) == result["grid"]
    rates = {"best": {"matrices": 0.1, "others": 0.1}}
    nan = {"best": {"matrices": float("nan"), "others": 0.1}}
    for text in ("{}", json.dumps({"grid": {"muon": rates}}), json.dumps({"grid": {"muon": rates, "adamw": nan}})):
        again.write_text(text)
        with pytest.raises(InputError, match=r"--tuned is '.*again\.json', but must be a result"):
            optimizer.run(Namespace(steps=20, png=None, tuned=str(again)))


def test_an_optimum_at_the_edge_of_the_grid_is_told():
    for best, inside in (((2, 2), True), ((1, 2), False), ((2, 3), False)):
        losses = {rates: float(rates != best) for rates in itertools.product((1, 2, 3), repeat=2)}
        assert make_grid(losses)["interior"] == inside


def test_both_optimizers_take_the_two_rates():
    muon, adamw = optimizer_config("muon", 0.02, 0.006), optimizer_config("adamw", 0.002, 0.006)
    assert (muon.matrices, muon.muon.learning_rate, muon.adamw.learning_rate) == ("muon", 0.02, 0.006)
    assert adamw.matrices == "adamw"
    for role in MATRIX_ROLES:
        assert getattr(adamw.roles, role).learning_rate * adamw.adamw.learning_rate == pytest.approx(0.002)
    assert adamw.roles.embedding.learning_rate == 1
