"""Sources and phases in YAML: tables and lists, whose items are overridden by name or index."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.config_helpers import SMALL, refused_to_load, written
from zaya_jax.config import (
    BatchConfig,
    BatchSizeConfig,
    DataConfig,
    PhaseConfig,
    ScheduleConfig,
    SourceConfig,
    Table,
    load_config,
    to_dict,
    to_yaml,
)
from zaya_jax.errors import InputError

names = st.sampled_from(["web", "code", "math-2", "null", "on", "é", "_", "e5"])


positive = st.floats(1e-30, 1e12)
schedules = st.one_of(
    st.builds(ScheduleConfig, st.sampled_from(["constant", "cosine", "linear"]), st.floats(1, 2), st.floats(0, 1),
              st.integers(0, 64)),
    st.builds(ScheduleConfig, st.just("wsd"), decay_tokens=st.integers(1, 64)),
)  # fmt: skip
batches = st.one_of(
    st.builds(BatchConfig, tokens=st.sampled_from([128, 192]), micro_batch=st.none() | st.just(1)),
    st.builds(BatchConfig, tokens=st.just(128), start=st.sampled_from([32, 64]), ramp_tokens=st.integers(1, 9999)),
    st.builds(BatchConfig, tokens=st.just(64), stepped=st.just((BatchSizeConfig(7, 32), BatchSizeConfig(500, 256)))),
)


@st.composite
def sources_and_phases(draw):
    """Sources and phases that can be."""
    sources = draw(st.dictionaries(names, st.builds(SourceConfig, names, st.none() | positive), max_size=4))
    phase = st.builds(
        PhaseConfig,
        tokens=st.integers(128, 10**10),
        mixture=st.dictionaries(st.sampled_from(list(sources) or ["corpus"]), positive, max_size=4).map(Table),
        context=st.sampled_from([None, 1, 8, 32]),
        rope_base=st.none() | positive,
        packing=st.sampled_from(["windows", "bins"]),
        over_length=st.sampled_from(["split", "trim", "drop"]),
        template=st.sampled_from([None, "~", "null", "3", "chat: x.jinja", "a b"]),
        schedule=st.none() | schedules,
        batch=st.none() | batches,
        remat=st.sampled_from([None, "none", "dots", "full"]),
    )
    phases = draw(st.lists(phase, min_size=1, max_size=4))
    called = draw(st.permutations(["a", "null", "on", "no-9"]))
    phases = tuple(dataclasses.replace(phase, name=name) for phase, name in zip(phases, called, strict=False))
    data = DataConfig(context=32, sources=Table(sources), workers=draw(st.integers(0, 256)))
    return dataclasses.replace(SMALL, data=data, phases=phases,
                               start_phase=draw(st.sampled_from([None, *called[: len(phases)]])))  # fmt: skip


@settings(max_examples=6)
@given(sources_and_phases())
def test_sources_and_phases_are_read_back_equal(tmp_path_factory, config):
    config.check()
    path = written(tmp_path_factory.mktemp("round"), to_yaml(config))
    again = load_config(path)
    assert again == config
    assert hash(again) == hash(config)
    assert to_yaml(again) == to_yaml(config)
    assert list(again.data.sources) == list(config.data.sources), "the order too"
    tree = to_dict(again)
    assert list(tree["data"]["sources"].items()) == [
        (name, {"path": source.path, "max_epochs": source.max_epochs}) for name, source in config.data.sources.items()
    ]
    assert [phase["mixture"] for phase in tree["phases"]] == [dict(phase.mixture) for phase in config.phases]
    assert type(tree["phases"]) is list


SOURCES_AND_PHASES = """
data:
  sources:
    web: {path: web}
    code: {path: code, max_epochs: 4}
phases:
  - tokens: 1_000_000
    name: first
    mixture: {web: 0.7, code: 3e-1}
    schedule: {shape: wsd, warmup_tokens: 20_000, decay_tokens: 1_00_000}
  - tokens: 40960
    name: second
    mixture: {code: 1}
    packing: bins
    over_length: trim
    batch: {tokens: 64, stepped: [{until: 3_200, tokens: 32}]}
"""


@pytest.fixture
def mixed(base, tmp_path):
    """A configuration with two sources and two phases."""
    return written(tmp_path, f"extends: {base}\n{SOURCES_AND_PHASES}", "mixed.yaml")


FIRST = PhaseConfig(1_000_000, "first", mixture=Table({"web": 0.7, "code": 0.3}),
                    schedule=ScheduleConfig("wsd", warmup_tokens=20_000, decay_tokens=100_000))  # fmt: skip
SECOND = PhaseConfig(40_960, "second", mixture=Table({"code": 1.0}), packing="bins", over_length="trim",
                     batch=BatchConfig(64, stepped=(BatchSizeConfig(3200, 32),)))  # fmt: skip


def test_sources_and_phases_are_read(mixed):
    config = load_config(mixed)
    assert config.data.sources == Table({"web": SourceConfig("web"), "code": SourceConfig("code", 4.0)})
    assert config.phases == (FIRST, SECOND)
    assert type(config.phases[1].mixture["code"]) is float
    assert type(config.data.sources["code"].max_epochs) is float


def test_a_source_can_be_overridden_and_added_alone(mixed, tmp_path):
    data = load_config(mixed, ["data.sources.code.max_epochs=2", "data.sources.math={path: m}"]).data
    assert list(data.sources.items()) == [
        ("web", SourceConfig("web")), ("code", SourceConfig("code", 2.0)), ("math", SourceConfig("m")),
    ]  # fmt: skip
    top = written(tmp_path, "extends: mixed.yaml\ndata: {sources: {web: {path: other}}}\n", "top.yaml")
    data = load_config(top).data
    assert [(name, source.path) for name, source in data.sources.items()] == [("web", "other"), ("code", "code")]


# Each says the same of the phases in an override, or in a file that extends another.
ITEMS = [
    ("phases.second.tokens=8_192", "{second: {tokens: 8_192}}", {1: {"tokens": 8192}}),
    ("phases.1.tokens=8192", "{'1': {tokens: 8192}}", {1: {"tokens": 8192}}),
    ("phases.first.schedule.peak=2", "{first: {schedule: {peak: 2}}}",
     {0: {"schedule": dataclasses.replace(FIRST.schedule, peak=2.0)}}),
    ("phases.0.schedule=null", "{'0': {schedule: null}}", {0: {"schedule": None}}),
    ("phases.second.schedule={shape: linear}", "{second: {schedule: {shape: linear}}}",
     {1: {"schedule": ScheduleConfig("linear")}}),
    ("phases.second.name=last", "{second: {name: last}}", {1: {"name": "last"}}),
    ("phases={first: {tokens: 999_999}, 'second': {context: 8}}", "{first: {tokens: 999_999}, second: {context: 8}}",
     {0: {"tokens": 999_999}, 1: {"context": 8}}),
    ("phases.second.batch.stepped.0.until=640", "{second: {batch: {stepped: {'0': {until: 640}}}}}",
     {1: {"batch": BatchConfig(64, stepped=(BatchSizeConfig(640, 32),))}}),
    ("phases.second.batch.stepped=[]", "{second: {batch: {stepped: []}}}", {1: {"batch": BatchConfig(64)}}),
    ("phases.second.mixture.web=3", "{second: {mixture: {web: 3}}}",
     {1: {"mixture": Table({"code": 1.0, "web": 3.0})}}),
    ("phases.1={tokens: 64, context: null}", "{'1': {tokens: 64, context: null}}", {1: {"tokens": 64}}),
]  # fmt: skip


@pytest.mark.parametrize(("override", "text", "changes"), ITEMS, ids=[override for override, _, _ in ITEMS])
def test_items_of_a_list_are_overridden_by_name_or_index(mixed, tmp_path, override, text, changes):
    phases = enumerate((FIRST, SECOND))
    expected = tuple(dataclasses.replace(phase, **changes.get(index, {})) for index, phase in phases)
    assert load_config(mixed, [override]).phases == expected
    extending = written(tmp_path, f"extends: mixed.yaml\nphases: {text}\n", "top.yaml")
    assert load_config(extending).phases == expected
    deeper = written(tmp_path, "extends: top.yaml\n", "deeper.yaml")
    assert load_config(deeper, ["phases.0.remat=full"]).phases[0] == dataclasses.replace(expected[0], remat="full")


def test_a_list_replaces_all_phases(mixed, tmp_path):
    only = (PhaseConfig(2, mixture=Table({"web": 2.0})),)
    assert load_config(mixed, ["phases=[{tokens: 2, mixture: {web: 2}}]"]).phases == only
    top = written(tmp_path, "extends: mixed.yaml\nphases: [{tokens: 2, mixture: {web: 2}}]\n", "top.yaml")
    assert load_config(top).phases == only


def test_a_name_goes_before_an_index_and_a_later_override_finds_the_new_name(base, mixed):
    changes = ["phases.first.name=third", "phases.third.tokens=640_000", "phases.third.tokens=640_001"]
    assert load_config(mixed, changes).phases == (
        dataclasses.replace(FIRST, name="third", tokens=640_001), SECOND,
    )  # fmt: skip
    numbered = load_config(base, ["data.suffixes=[a, b, c]", "data.suffixes.1=.md"])
    assert numbered.data.suffixes == ("a", ".md", "c")


@pytest.mark.parametrize(("override", "message"), [
    ("phases.thrid.tokens=1", "There is no 'phases.thrid'; the items of phases are 0 (first), 1 (second)."),
    ("phases.2.tokens=1", "There is no 'phases.2'; "),
    ("phases.-1.tokens=1", "There is no 'phases.-1'; "),
    ("phases.second.batch.stepped.1.until=9", "There is no 'phases.second.batch.stepped.1'; "),
    ("phases.second.batch.stepped={x: {until: 1}}", "There is no 'phases.second.batch.stepped.x'; "),
    ("phases.first.batch.stepped.0.until=9", "phases.first.batch.stepped is {0: {until: 9}}, "),
    ("phases.first=3", "phases.0 is 3, "),
    ("phases.second.tokens=null", "phases.second.tokens is null, "),
    ("phases.second.tokens=1.5", "phases.second.tokens is 1.5 "),
    ("phases.second.batch.start=x", "phases.second.batch.start is 'x' "),
])  # fmt: skip
def test_an_item_that_is_not_there_is_named_with_those_that_are(mixed, override, message):
    assert refused_to_load(mixed, override).startswith(message)


def test_items_of_an_empty_list_cannot_be_overridden(mixed):
    message = "There is no 'phases.second.batch.stepped.0'; the items of phases.second.batch.stepped are none."
    assert refused_to_load(mixed, "phases.second.batch.stepped=[]", "phases.second.batch.stepped.0.until=9") == message


@pytest.mark.parametrize("key", ["context", "rope_base", "template", "schedule", "batch", "remat"])
def test_null_is_what_a_phase_does_not_give(mixed, key):
    phases = load_config(mixed, [f"phases.0.{key}=null", f"phases.second.{key}=null"]).phases
    assert phases == tuple(dataclasses.replace(phase, **{key: None}) for phase in (FIRST, SECOND))


@pytest.mark.parametrize(("override", "message"), [
    ("data.sources.code.pth=x", "The key data.sources.code.pth is unknown. Did you mean data.sources.code.path?"),
    ("data.sources.math={}", "data.sources.math.path must be set: "),
    ("data.sources.math=m", "data.sources.math is 'm', "),
    ("data.sources.web.max_epochs=many", "data.sources.web.max_epochs is 'many' "),
    ("data.sources=[web]", "data.sources is ['web'], "),
    ("data.sources=null", "data.sources is null, "),
    ("data.sources={1: {path: x}}", "data.sources is '1', but must be a name"),
    ("data.sources={a: {path: x}, a: {path: y}}", "The key 'a' appears twice"),
    ("phases=bins", "phases is 'bins', "),
    ("phases=null", "phases is null, "),
    ("phases=[{tokens: 9}, 3]", "phases.1 is 3, "),
    ("phases=[null]", "phases.0 is null, "),
    ("phases=[{}]", "phases.train.tokens must be set"),
    ("phases=[{packing: binz, tokens: 9}]", "phases.train.packing is 'binz', "),
    ("phases=[{tokens: 9}, {tokesn: 2}]", "The key phases.1.tokesn is unknown. Did you mean phases.1.tokens?"),
    ("phases.0.schedule.shape=cosin", "phases.first.schedule.shape is 'cosin', "),
    ("phases.0.mixture.web=half", "phases.first.mixture.web is 'half' "),
    ("phases.0.mixture=[web]", "phases.first.mixture is ['web'], "),
    ("phases.1.mixture={wbe: 1}", "phases.second.mixture is 'wbe', "),
    ("data.phases=[{}]", "The key data.phases is unknown"),
])  # fmt: skip
def test_a_wrong_source_or_phase_is_named(mixed, override, message):
    assert message in refused_to_load(mixed, override)


def test_null_takes_out_what_another_file_put_in(tmp_path):
    (tmp_path / "base.yaml").write_text(
        to_yaml(SMALL).replace("sources: {}", "sources: {web: {path: w}, code: {path: c}}").replace(
            "mixture: {}", "mixture: {web: 1.0, code: 2.0}"))  # fmt: skip
    assert dict(load_config(tmp_path / "base.yaml").phases[0].mixture) == {"web": 1, "code": 2}
    rest = load_config(tmp_path / "base.yaml", ["phases.0.mixture.code=null"])
    assert dict(rest.phases[0].mixture) == {"web": 1}
    (tmp_path / "over.yaml").write_text("extends: base.yaml\ndata: {sources: {code: null}}\n")
    with pytest.raises(InputError, match=r"mixture is 'code', but must be a configured source: web"):
        load_config(tmp_path / "over.yaml")
