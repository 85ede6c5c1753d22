"""Every impossible configuration is refused with the key that makes it so."""

import dataclasses
import typing

import pytest

from tests.config_helpers import NO_PATHS, SMALL, changed, refused
from tests.helpers import TINY
from zaya_jax.config import BatchConfig, Config, PhaseConfig, Table


def test_the_small_configuration_is_possible():
    SMALL.check()


@pytest.mark.parametrize("key", [
    *(f"model.{name}" for name in ("vocab_size", "hidden_size", "num_layers", "num_query_heads", "num_kv_heads",
                                   "head_dim", "num_experts", "expert_size", "router_size", "max_positions",
                                   "depthwise_kernel", "grouped_kernel", "norm_eps", "init_std", "rope_base",
                                   "sliding_rope_base")),
    "data.context", "optimizer.muon.learning_rate", "optimizer.muon.newton_schulz_steps",
    "optimizer.adamw.learning_rate", "optimizer.adamw.eps", "optimizer.balance.learning_rate", "optimizer.balance.eps",
    "optimizer.clip_norm", "train.batch.tokens", "train.batch.micro_batch", "train.spike.threshold",
    "train.max_skipped_steps", "train.log_every", "evaluation.every", "evaluation.batches", "evaluation.batch_size",
    "checkpoint.every", "checkpoint.keep",
])  # fmt: skip
def test_sizes_and_rates_are_positive(key):
    assert refused({key: 0}) == f"{key} is 0, but must be greater than 0."


@pytest.mark.parametrize(("changes", "named"), [
    ({"data.context": 65}, "data.context"),
    ({"train.spike.window": -1}, "train.spike.window"),
    ({"train.batch": BatchConfig(96, start=64, ramp_tokens=1)}, "train.batch.start"),
    ({"train.batch": BatchConfig(96, ramp_tokens=1)}, "train.batch.ramp_tokens"),
    ({"sample.prompt": ""}, "sample.prompt"),
    ({"sample.prompt": "\ud800"}, "sample.prompt"),
    ({"sample.prompt": "é" * 32}, "sample.prompt"),
    ({"sample.temperature": -1.0}, "sample.temperature"),
    ({"sample.tokens": -1}, "sample.tokens"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**31}, "seed"),
    ({"run_dir": ""}, "run_dir"),
    ({"start_phase": "none"}, "start_phase"),
])  # fmt: skip
def test_impossible_combinations_are_named(changes, named):
    message = refused(changes)
    assert message.startswith(f"{named} is ")
    assert ", but must be " in message


@pytest.mark.parametrize("changes", [
    {"data.context": 64},
    {"sample.temperature": 0.0},
    {"sample.prompt": "x" * 62},
    {"sample.tokens": 1000},
    {"sample.tokens": 0},
    {"seed": 2**31 - 1},
    {"train.spike.window": 0},
    {"start_phase": "train"},
    {"init_from": "runs/there"},
    {"init_from": "hf:models/there"},
])  # fmt: skip
def test_the_edges_of_the_possible(changes):
    changed(SMALL, changes).check()


@pytest.mark.parametrize("key", ["run_dir", "init_from"])
@pytest.mark.parametrize("value", NO_PATHS)
def test_what_can_be_no_path_is_named(key, value):
    message = refused({key: value})
    assert message.startswith(f"{key} is ")
    assert " is not a valid path: " in message


@pytest.mark.parametrize("value", ["", *NO_PATHS])
def test_a_folder_of_transformers_must_be_a_path_too(value):
    assert refused({"init_from": f"hf:{value}"}).startswith("init_from is ")


def test_what_a_phase_does_not_give_is_that_of_the_run():
    config = changed(SMALL, {"train.remat": "dots"})
    own = PhaseConfig(1, context=8, rope_base=5.0, batch=BatchConfig(64), remat="full")
    for phase, expected in ((PhaseConfig(1), (32, config.train.batch, "dots", config.model)),
                            (own, (8, BatchConfig(64), "full", dataclasses.replace(TINY, rope_base=5.0)))):  # fmt: skip
        settings = config.context_for(phase), config.batch_for(phase), config.remat_for(phase), config.model_for(phase)
        assert settings == expected


def test_a_configuration_can_be_hashed():
    phases = [(PhaseConfig(1, mixture=Table({"web": 1.0})), PhaseConfig(1, "b", template="t.jinja")) for _ in range(2)]
    first, second = (changed(SMALL, {"phases": phase}) for phase in phases)
    assert (first, hash(first)) == (second, hash(second))
    assert len({first, second, SMALL}) == 2


def sections(cls):
    hints = typing.get_type_hints(cls)
    yield cls
    for field in dataclasses.fields(cls):
        for hint in (hints[field.name], *typing.get_args(hints[field.name])):
            if dataclasses.is_dataclass(hint):
                yield from sections(hint)


def leaf_fields(cls):
    hints = typing.get_type_hints(cls).items()
    held = {name: [hint, *typing.get_args(hint)] for name, hint in hints}
    return [name for name, kinds in held.items() if not any(map(dataclasses.is_dataclass, kinds))]


def test_there_are_few_fields_and_all_are_frozen():
    """At most about 130, a section that stands in several places counted once."""
    classes = set(sections(Config))
    assert 90 < sum(len(leaf_fields(cls)) for cls in classes) <= 130
    for cls in classes:
        assert cls.__dataclass_params__.frozen
