"""Rates and decays that cannot be."""

import pytest

from tests.config_helpers import SMALL, changed, refused

ROLES = ["attention", "router", "expert", "embedding", "convolution", "norm", "scale", "temperature", "bias"]


@pytest.mark.parametrize(("key", "value", "allowed"), [
    *((key, value, "at least 0 and below 1") for value in (1.0, -0.1)
      for key in ("muon.momentum", "adamw.b1", "adamw.b2", "balance.b1", "balance.b2")),
    *((key, -0.1, "at least 0") for key in ("muon.weight_decay", "adamw.weight_decay")),
    *((f"roles.{role}.{name}", -0.1, "at least 0") for role in ROLES for name in ("learning_rate", "weight_decay")),
])  # fmt: skip
def test_what_is_outside_its_range_is_named(key, value, allowed):
    assert refused({f"optimizer.{key}": value}) == f"optimizer.{key} is {value}, but must be {allowed}."


@pytest.mark.parametrize("key", [
    "muon.momentum", "muon.weight_decay", "adamw.b1", "adamw.weight_decay", "balance.b2", "roles.router.learning_rate",
    "roles.bias.weight_decay",
])  # fmt: skip
def test_the_edges_of_the_possible(key):
    changed(SMALL, {f"optimizer.{key}": 0.0}).check()
