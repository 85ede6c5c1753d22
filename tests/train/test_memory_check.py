"""What cannot fit is refused before compilation, by the key to change; what could fit never is."""

import jax
import pytest

from tests.config_helpers import changed
from tests.train_helpers import CONFIG, leaves, setup
from zaya_jax.config import LoraConfig, ParallelConfig, PhaseConfig
from zaya_jax.errors import InputError
from zaya_jax.parallel.placement import device_bytes
from zaya_jax.train import memory_check
from zaya_jax.train.memory_check import check_memory
from zaya_jax.train.program import make_programs


def refusal(monkeypatch, changes, available):
    monkeypatch.setattr(memory_check, "available_memory", lambda: available)
    with pytest.raises(InputError) as caught:
        check_memory(make_programs(changed(CONFIG, changes)))
    return str(caught.value)


def test_the_parameters_gradients_and_state_of_a_run_are_counted(monkeypatch):
    state = setup().state
    stored = sum(x.nbytes for x in leaves(state).values())
    least = stored + sum(x.nbytes for x in leaves(state.params).values())
    said = refusal(monkeypatch, {"evaluation.batch_size": 1}, least - 1)
    assert said.startswith(f"phases.train needs at least {least / 1e9:.3g} GB of memory per device for parameters,")
    monkeypatch.setattr(memory_check, "available_memory", lambda: least)
    check_memory(make_programs(changed(CONFIG, {"evaluation.batch_size": 1})))


@pytest.mark.parametrize(("changes", "remedy"), [
    ({"evaluation.batch_size": 10**6}, "Lower evaluation.batch_size (1,000,000)."),
    ({"train.batch.tokens": 2**26, "train.batch.micro_batch": None}, "Lower train.batch.micro_batch, the number"),
    ({"phases": (PhaseConfig(2**26), PhaseConfig(2**26, "wide", batch=changed(CONFIG.train.batch, {
        "tokens": 2**26, "micro_batch": None})))}, "Lower phases.wide.batch.micro_batch, the number"),
    ({"init_from": "x", "lora": LoraConfig(2, 1.0), "evaluation.batch_size": 10**6},
     "Lower evaluation.batch_size (1,000,000)."),
])  # fmt: skip
def test_the_key_to_lower_is_named(monkeypatch, changes, remedy):
    said = refusal(monkeypatch, changes, 10**8)
    assert said.startswith("phases.")
    assert " of memory per device for " in said
    assert "but only 0.1 GB is available. " in said
    assert remedy in said


def test_a_device_that_does_not_tell_its_memory_is_not_judged(monkeypatch):
    monkeypatch.setattr(memory_check, "available_memory", lambda: None)
    check_memory(make_programs(changed(CONFIG, {"evaluation.batch_size": 10**9})))


def test_a_step_takes_more_than_the_bound():
    """Whatever the compiler does, so that nothing is refused that would fit."""
    state = setup().program.abstract_state
    needed = device_bytes(state) + device_bytes(state.params)
    needs = setup().compiled.memory_analysis()
    used = needs.argument_size_in_bytes + needs.temp_size_in_bytes + needs.output_size_in_bytes
    assert needed < used - needs.alias_size_in_bytes
    rows = CONFIG.train.batch.micro_batch or 1
    kept = rows * CONFIG.data.context * CONFIG.model.num_groups * CONFIG.model.hidden_size * 4
    assert kept < needs.temp_size_in_bytes
    assert jax.device_count() == 1
    assert CONFIG.parallel == ParallelConfig()
