"""Rates and decays outside their range."""

import pytest

from tests.config_helpers import SMALL, changed, refused

FRACTIONS = ["muon.momentum", "adamw.b1", "adamw.b2", "balance.b1", "balance.b2"]


@pytest.mark.parametrize("key", FRACTIONS)
def test_momenta_are_below_one(key):
    assert refused({f"optimizer.{key}": 1.0}).startswith(f"optimizer.{key} is 1.0, but must be at least 0 and below 1")


@pytest.mark.parametrize("key", [
    *FRACTIONS, "muon.weight_decay", "adamw.weight_decay", "roles.router.learning_rate", "roles.bias.weight_decay",
])  # fmt: skip
def test_zero_is_possible(key):
    changed(SMALL, {f"optimizer.{key}": 0.0}).check()
