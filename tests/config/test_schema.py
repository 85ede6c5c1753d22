"""Every impossible configuration is refused with the key that makes it so."""

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import TINY
from zaya_jax.config import Config, DataConfig, OptimizerConfig, TrainConfig, schema
from zaya_jax.errors import InputError

SMALL = Config(model=TINY, data=DataConfig(context=32), train=TrainConfig(steps=10))


def changed(config, key, value):
    """`config` with the field `a.b` set."""
    first, _, rest = key.partition(".")
    if rest:
        value = changed(getattr(config, first), rest, value)
    return dataclasses.replace(config, **{first: value})


def test_the_small_configuration_is_possible():
    SMALL.check()


@pytest.mark.parametrize("key", [
    *(f"model.{name}" for name in ("vocab_size", "hidden_size", "num_layers", "num_query_heads", "num_kv_heads",
                                   "head_dim", "num_experts", "expert_size", "router_size", "max_positions",
                                   "depthwise_kernel", "grouped_kernel", "norm_eps", "init_std", "rope_base",
                                   "sliding_rope_base")),
    "data.context", "optimizer.muon.learning_rate", "optimizer.muon.newton_schulz_steps",
    "optimizer.adamw.learning_rate", "optimizer.adamw.eps", "optimizer.balance.learning_rate", "optimizer.balance.eps",
    "optimizer.clip_norm", "train.steps", "train.global_batch", "train.micro_batches", "train.max_skipped_steps",
    "train.log_every", "evaluation.every", "evaluation.batches", "evaluation.batch", "checkpoint.every",
    "checkpoint.keep", "sample.tokens",
])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_and_rates_are_positive(key, value):
    with pytest.raises(InputError, match=rf"^{key} is {value}, but must be greater than zero\.$"):
        changed(SMALL, key, value).check()


@pytest.mark.parametrize(("changes", "named"), [
    ({"model.num_query_heads": 3}, "model.num_query_heads"),
    ({"model.num_kv_heads": 1, "model.head_dim": 7, "model.rotary_fraction": 0.0}, "model.head_dim"),
    ({"model.rotary_fraction": -0.1}, "model.rotary_fraction"),
    ({"model.rotary_fraction": 1.1}, "model.rotary_fraction"),
    ({"model.rotary_fraction": 0.375}, "model.rotary_fraction"),
    ({"model.layer_pattern": ()}, "model.layer_pattern"),
    ({"model.layer_pattern": ("full", "full", "full")}, "model.layer_pattern"),
    ({"model.layer_pattern": ("sliding",)}, "model.sliding_window"),
    ({"model.layer_pattern": ("sliding",), "model.sliding_window": 0}, "model.sliding_window"),
    ({"data.heldout_fraction": 0.0}, "data.heldout_fraction"),
    ({"data.heldout_fraction": 1.0}, "data.heldout_fraction"),
    ({"data.suffixes": ()}, "data.suffixes"),
    ({"data.context": 65}, "data.context"),
    ({"optimizer.muon.momentum": 1.0}, "optimizer.muon.momentum"),
    ({"optimizer.muon.momentum": -0.1}, "optimizer.muon.momentum"),
    ({"optimizer.muon.weight_decay": -0.1}, "optimizer.muon.weight_decay"),
    ({"optimizer.adamw.b1": 1.0}, "optimizer.adamw.b1"),
    ({"optimizer.adamw.b2": -0.1}, "optimizer.adamw.b2"),
    ({"optimizer.adamw.weight_decay": -0.1}, "optimizer.adamw.weight_decay"),
    ({"optimizer.balance.b1": 1.0}, "optimizer.balance.b1"),
    ({"optimizer.balance.b2": 1.0}, "optimizer.balance.b2"),
    ({"optimizer.warmup_steps": -1}, "optimizer.warmup_steps"),
    ({"optimizer.warmup_steps": 10}, "optimizer.warmup_steps"),
    ({"optimizer.final_fraction": 1.5}, "optimizer.final_fraction"),
    ({"optimizer.final_fraction": -0.5}, "optimizer.final_fraction"),
    ({"train.micro_batches": 3}, "train.global_batch"),
    ({"sample.prompt": ""}, "sample.prompt"),
    ({"sample.prompt": "\ud800"}, "sample.prompt"),
    ({"sample.prompt": "é" * 32}, "sample.prompt"),
    ({"sample.temperature": -1.0}, "sample.temperature"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**31}, "seed"),
    ({"run_dir": ""}, "run_dir"),
])  # fmt: skip
def test_impossible_combinations_are_named(changes, named):
    config = SMALL
    for key, value in changes.items():
        config = changed(config, key, value)
    with pytest.raises(InputError, match=rf"^{named} is .*, but must be .*\.$"):
        config.check()


@pytest.mark.parametrize("changes", [
    {"model.rotary_fraction": 0.0},
    {"model.rotary_fraction": 1.0},
    {"data.context": 64},
    {"optimizer.warmup_steps": 9},
    {"optimizer.muon.momentum": 0.0},
    {"sample.temperature": 0.0},
    {"sample.prompt": "x" * 62},
    {"sample.tokens": 1000},
    {"model.num_kv_heads": 1, "model.num_query_heads": 1},
    {"seed": 2**31 - 1},
])  # fmt: skip
def test_the_edges_of_the_possible(changes):
    config = SMALL
    for key, value in changes.items():
        config = changed(config, key, value)
    config.check()


@given(pattern=st.lists(st.sampled_from(["full", "sliding"]), min_size=1, max_size=6), repeats=st.integers(1, 3))
def test_the_period_is_the_shortest_pattern_of_the_same_layers(pattern, repeats):
    layers = tuple(pattern) * repeats
    config = dataclasses.replace(TINY, layer_pattern=layers, num_layers=len(layers) * 2, sliding_window=3)
    period = config.period
    assert period * config.num_groups == layers * 2
    for length in range(1, len(period)):
        if len(layers) % length == 0:
            assert layers[:length] * (len(layers) // length) != layers, "a shorter one would do"


def test_widths_follow_from_heads():
    assert (TINY.query_size, TINY.kv_size, TINY.rotary_size) == (32, 16, 4)


def sections(cls):
    hints = typing.get_type_hints(cls)
    yield cls
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from sections(hints[field.name])


def test_there_are_few_fields_and_all_are_frozen():
    """design.md §3: at most about 120."""
    classes = list(sections(Config))
    leaves = sum(len(dataclasses.fields(cls)) for cls in classes) - (len(classes) - 1)
    assert leaves <= 120
    for cls in classes:
        assert cls.__dataclass_params__.frozen
        assert callable(cls.check)


def test_an_error_names_key_value_and_what_is_allowed():
    with pytest.raises(InputError, match=r"^a\.b is 'x', but must be y\.$"):
        schema.require(False, "a.b", "x", "y")
    schema.require(True, "a.b", "x", "y")


def test_a_whole_section_is_checked_from_the_top():
    with pytest.raises(InputError, match=r"optimizer\.balance\.b1"):
        changed(SMALL, "optimizer", OptimizerConfig(balance=schema.BalanceConfig(b1=2.0))).check()


@pytest.mark.parametrize("key", ["run_dir", "data.corpus", "data.cache_dir"])
@pytest.mark.parametrize("value", ["a\0b", "~no_such_user_here/x", "x" * 5000, "\ud800"])
def test_what_can_be_no_path_is_named(key, value):
    with pytest.raises(InputError, match=rf"^{key} is .* can be no path: "):
        changed(SMALL, key, value).check()


@pytest.mark.parametrize("value", ["runs/new", "/no/such/folder", "~", "configs/tiny.yaml/below/a/file"])
def test_a_path_need_not_exist(value):
    changed(SMALL, "run_dir", value).check()
