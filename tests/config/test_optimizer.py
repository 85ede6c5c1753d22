"""Rates and decays outside their range; the section `lora`, and what it needs beside it."""

import pytest

from tests.config_helpers import SMALL, changed, refused, refused_to_load, written
from zaya_jax.config import LoraConfig, load_config

TEXT = "model: {vocab_size: 8, hidden_size: 8, num_layers: 1, num_query_heads: 2, num_kv_heads: 2, head_dim: 4, " \
    "num_experts: 2, expert_size: 4, router_size: 4, max_positions: 64}\nphases: [{tokens: 8192}]\n" \
    "data: {context: 32}\n"  # fmt: skip
FRACTIONS = ["muon.momentum", "adamw.b1", "adamw.b2", "balance.b1", "balance.b2"]


@pytest.mark.parametrize("key", FRACTIONS)
def test_momenta_are_below_one(key):
    assert refused({f"optimizer.{key}": 1.0}).startswith(f"optimizer.{key} is 1.0, but must be at least 0 and below 1")


@pytest.mark.parametrize("key", [
    *FRACTIONS, "muon.weight_decay", "adamw.weight_decay", "roles.router.learning_rate", "roles.bias.weight_decay",
])  # fmt: skip
def test_zero_is_possible(key):
    changed(SMALL, {f"optimizer.{key}": 0.0}).check()


@pytest.mark.parametrize(("lora", "message"), [
    (LoraConfig(0, 8.0), "lora.rank is 0, "), (LoraConfig(4, 0.0), "lora.alpha is 0.0, "),
])  # fmt: skip
def test_an_adapter_that_cannot_be_is_refused(lora, message):
    assert refused({"init_from": "runs/base", "lora": lora}).startswith(message)


def test_adapters_need_a_model():
    assert refused({"lora": LoraConfig(4, 8.0)}).startswith("init_from is null, but must be set if lora is")


def test_two_overrides_turn_it_on(tmp_path):
    path = written(tmp_path, TEXT)
    whole = load_config(path)
    assert whole.lora is None
    tuned = load_config(path, ["init_from=runs/base", "lora.rank=16", "lora.alpha=32"])
    assert tuned.lora == LoraConfig(16, 32.0)
    assert tuned.lora.scale == 2.0
    assert (whole.matrices, tuned.matrices) == ("muon", "adamw")
    assert load_config(path, ["init_from=runs/base", "lora.rank=16", "lora.alpha=32", "lora=null"]).lora is None


def test_half_of_it_is_refused(tmp_path):
    path = written(tmp_path, TEXT)
    assert "lora.alpha must be set" in refused_to_load(path, "init_from=x", "lora.rank=2")
