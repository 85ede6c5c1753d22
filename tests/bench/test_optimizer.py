import pytest

from zaya_jax.bench.optimizer import _interior, compare, optimizer_config, steps_to
from zaya_jax.bench.sweep import Curve
from zaya_jax.model.layers import MATRIX_ROLES


def test_steps_to_a_loss_are_read_off_the_line_between_two_looks():
    curve = Curve([(10, 5.0), (20, 4.0), (30, 4.5), (40, 3.0)], [], 0.0)
    assert steps_to(curve, 5.5) == 10
    assert steps_to(curve, 4.5) == 15
    assert steps_to(curve, 4.0) == 20
    assert steps_to(curve, 3.75) == pytest.approx(35)
    assert steps_to(curve, 2.9) is None


def test_both_are_counted_to_where_adamw_ends_and_never_is_more_than_any_number():
    adamw = Curve([(10, 5.0), (20, 4.0), (30, 4.0)], [], 0.0)
    fast, slow = Curve([(10, 4.0)], [], 0.0), Curve([(10, 4.5)], [], 0.0)
    found = compare({0: {"muon": fast, "adamw": adamw}, 1: {"muon": slow, "adamw": adamw}})
    assert [(row["muon"], row["adamw"], row["ratio"]) for row in found["seeds"]] == [(10, 20, 0.5), (None, 20, None)]
    assert found["median"] is None
    assert compare({seed: {"muon": fast, "adamw": adamw} for seed in range(3)})["median"] == 0.5


def test_an_optimum_at_the_edge_of_the_grid_is_told():
    assert _interior((2, 2), (1, 2, 3), (1, 2, 3))
    assert not _interior((1, 2), (1, 2, 3), (1, 2, 3))
    assert not _interior((2, 3), (1, 2, 3), (1, 2, 3))


def test_both_kinds_take_the_two_rates():
    muon, adamw = optimizer_config("muon", 0.02, 0.006), optimizer_config("adamw", 0.002, 0.006)
    assert (muon.matrices, muon.muon.learning_rate, muon.adamw.learning_rate) == ("muon", 0.02, 0.006)
    assert adamw.matrices == "adamw"
    for role in MATRIX_ROLES:
        rate = getattr(adamw.roles, role).learning_rate * adamw.adamw.learning_rate
        assert rate == pytest.approx(0.002)
    assert adamw.roles.embedding.learning_rate == 1
