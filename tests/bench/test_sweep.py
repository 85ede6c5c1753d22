"""Small trainings: whole, repeatable, on a core each."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.train_helpers import compile_once
from zaya_jax.bench import sweep as trials
from zaya_jax.bench.sweep import Trial, run_trial, run_trials, small_config
from zaya_jax.config import BatchConfig, ModelConfig, PhaseConfig, ScheduleConfig, TrainConfig
from zaya_jax.model.tree import balancing_biases, parameters
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
    first, again = (run_trial(Trial("small", small, every=2)) for _ in range(2))
    assert [step for step, _ in first.heldout] == [2, 4, 6]
    assert first.final < first.heldout[0][1] < np.log(300) + 1
    assert len(first.entropy) == 6
    assert (first.heldout, first.entropy) == (again.heldout, again.entropy)


@pytest.mark.soak
def test_trainings_are_done_in_order_in_processes_of_their_own(small):
    said = []
    found = run_trials([Trial(name, small, every=6) for name in ("a", "b")], said.append)
    assert [line.partition(":")[0] for line in said] == ["a", "b"]
    assert len({curve.final for curve in found}) == 1  # each on one core, whatever the other did


@pytest.mark.soak
def test_a_crowded_start_sends_tokens_to_the_first_two_experts():
    model = Zaya(MODEL, jax.random.key(0))
    params = trials._crowded(parameters(model), 6.0)
    from zaya_jax.model.tree import with_values

    def shares(values):
        out = with_values(model, {**values, **balancing_biases(model)})(np.arange(256).reshape(2, 128))
        counts = np.array(out.stats.expert_counts_le)
        return counts[:, :2].sum(1) / counts.sum(1)

    assert (shares(params) > 0.95).all()
    assert (shares(parameters(model)) < 0.9).any()
    assert all(np.array_equal(a, b) for a, b in zip(trials._crowded(parameters(model), 0.0).values(),
                                                    parameters(model).values(), strict=True))  # fmt: skip
