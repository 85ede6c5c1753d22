"""Every impossible configuration is refused with the key that makes it so."""

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import TINY
from zaya_jax.config import Config, DataConfig, OptimizerConfig, PhaseConfig, SourceConfig, Table, TrainConfig, schema
from zaya_jax.errors import InputError

SMALL = Config(model=TINY, data=DataConfig(context=32), train=TrainConfig(steps=10))


def changed(config, key, value):
    """`config` with the field `a.b` set."""
    first, _, rest = key.partition(".")
    if rest:
        value = changed(getattr(config, first), rest, value)
    return dataclasses.replace(config, **{first: value})


SOURCES = Table({"web": SourceConfig("web"), "code": SourceConfig("code", 1.5)})


def with_data(**values):
    """`SMALL` with two sources, and with `values` in its section data."""
    return dataclasses.replace(SMALL, data=DataConfig(**{"context": 32, "sources": SOURCES, **values}))


def phases(*some):
    """The configuration of such phases; each but the first begins a step later than the one before."""
    return with_data(phases=tuple(PhaseConfig(**{"first_step": step, **one}) for step, one in enumerate(some)))


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
    ({"data.workers": -1}, "data.workers"),
    ({"data.workers": 257}, "data.workers"),
    ({"data.phases": ()}, "data.phases"),
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
    {"data.workers": 256},
    {"data.phases": (PhaseConfig(context=64),)},
    {"data.phases": (PhaseConfig(), PhaseConfig(first_step=1), PhaseConfig(first_step=9))},
    {"data.phases": (PhaseConfig(mixture=Table({"corpus": 0.1})),)},
    {"data.sources": SOURCES},
    {"data.sources": SOURCES, "data.phases": (PhaseConfig(mixture=Table({"code": 1e-9})),)},
    {"data.sources": Table({"a-b_9": SourceConfig("x", 1e-3)})},
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


@pytest.mark.parametrize(("config", "said"), [
    (phases({"first_step": 1}), "data.phases[0].first_step is 1, but must be 0."),
    (phases({}, {"first_step": 0}),
     "data.phases[1].first_step is 0, but must be greater than that of the phase before (0)."),
    (phases({}, {"first_step": 5}, {"first_step": 5}),
     "data.phases[2].first_step is 5, but must be greater than that of the phase before (5)."),
    (phases({}, {"first_step": -1}), "data.phases[1].first_step is -1, but must be at least 0."),
    (phases({}, {"first_step": 10}), "data.phases[1].first_step is 10, but must be below train.steps (10)."),
    (phases({}, {"context": 0}), "data.phases[1].context is 0, but must be greater than zero."),
    (phases({}, {"context": 65}), "data.phases[1].context is 65, but must be at most model.max_positions (64)."),
    (phases({"mixture": Table({"web": 1.0, "code": 0.0})}),
     "data.phases[0].mixture.code is 0.0, but must be greater than zero (a source not named is not read)."),
    (phases({"mixture": Table({"web": -1.0})}),
     "data.phases[0].mixture.web is -1.0, but must be greater than zero (a source not named is not read)."),
    (phases({}, {"mixture": Table({"webb": 1.0})}),
     "data.phases[1].mixture is 'webb', but must be made of sources that there are: web, code."),
    (phases({"mixture": Table({"corpus": 1.0})}),
     "data.phases[0].mixture is 'corpus', but must be made of sources that there are: web, code."),
    (with_data(sources=Table(), phases=(PhaseConfig(mixture=Table({"web": 1.0})),)),
     "data.phases[0].mixture is 'web', but must be made of sources that there are: corpus."),
    (with_data(sources=Table({"web": SourceConfig("web", 0.0)})),
     "data.sources.web.max_epochs is 0.0, but must be greater than zero."),
])  # fmt: skip
def test_impossible_sources_and_phases_are_named(config, said):
    with pytest.raises(InputError) as caught:
        config.check()
    assert str(caught.value) == said


@pytest.mark.parametrize("name", ["", "a b", "1a", "a.b", "a/b", "..", "a\n", "a=b"])
def test_a_source_needs_a_name_that_a_key_can_hold(name):
    with pytest.raises(InputError, match=r"^data\.sources is .*, but must be a name of letters, digits, _ and -\.$"):
        with_data(sources=Table({name: SourceConfig("web")})).check()


@pytest.mark.parametrize("value", ["a\0b", "~no_such_user_here/x", "x" * 5000, "\ud800"])
def test_what_can_be_no_path_of_a_source_or_template_is_named(value):
    with pytest.raises(InputError, match=r"^data\.sources\.web\.path is .* can be no path: "):
        with_data(sources=Table({"web": SourceConfig(value)})).check()
    with pytest.raises(InputError, match=r"^data\.phases\[1\]\.template is .* can be no path: "):
        phases({}, {"template": value}).check()


@given(first_steps=st.sets(st.integers(1, 9), max_size=4), step=st.integers(0, 20))
def test_a_step_is_of_the_last_phase_that_has_begun(first_steps, step):
    starts = [0, *sorted(first_steps)]
    config = with_data(phases=tuple(PhaseConfig(start, context=10 + start) for start in starts))
    config.check()
    phase = config.data.phase_at(step)
    assert phase.first_step == max(start for start in starts if start <= step)
    assert config.data.context_of(phase) == 10 + phase.first_step
    assert config.data.context_of(PhaseConfig()) == 32


def test_a_configuration_can_be_hashed():
    one, two = (phases({"mixture": Table({"web": 1.0})}, {"template": "t.jinja"}) for _ in range(2))
    assert (one, hash(one)) == (two, hash(two))
    assert len({one, two, SMALL}) == 2


def test_widths_follow_from_heads():
    assert (TINY.query_size, TINY.kv_size, TINY.rotary_size) == (32, 16, 4)


def sections(cls):
    hints = typing.get_type_hints(cls)
    yield cls
    for field in dataclasses.fields(cls):
        for hint in (hints[field.name], *typing.get_args(hints[field.name])):
            if dataclasses.is_dataclass(hint):
                yield from sections(hint)


def test_there_are_few_fields_and_all_are_frozen():
    """design.md §3: at most about 120."""
    classes = list(sections(Config))
    leaves = sum(len(dataclasses.fields(cls)) for cls in classes) - (len(classes) - 1)
    assert leaves <= 120
    for cls in classes:
        assert cls.__dataclass_params__.frozen
        assert cls is SourceConfig or callable(cls.check)  # a source's name is needed, which its table has


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
