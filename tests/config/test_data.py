"""Sources and a corpus that cannot be."""

import pytest

from tests.config_helpers import NO_PATHS, SMALL, SOURCES, changed, refused, refused_to_load, written
from zaya_jax.config import DataConfig, PhaseConfig, SourceConfig, Table, from_dict, load_config, to_dict, to_yaml


@pytest.mark.parametrize(("key", "value"), [
    ("heldout_fraction", 0.0), ("heldout_fraction", 1.0), ("suffixes", ()), ("workers", -1), ("workers", 257),
])  # fmt: skip
def test_what_is_outside_its_range_is_named(key, value):
    message = refused({f"data.{key}": value})
    assert message.startswith(f"data.{key} is {list(value) if value == () else value}, but must be ")


@pytest.mark.parametrize("changes", [
    {"data.workers": 256},
    {"data.skip_rows": ((0, 1), (1, 2), (5, 10**15))},
    {"data.sources": SOURCES},
    {"data.sources": SOURCES, "phases": (PhaseConfig(1, mixture=Table({"code": 1e-9})),)},
    {"data.sources": Table({"a-b_9": SourceConfig("x", 1e-3)})},
])  # fmt: skip
def test_the_edges_of_the_possible(changes):
    changed(SMALL, changes).check()


@pytest.mark.parametrize(("ranges", "index", "before"), [
    (((3, 3),), 0, 0), (((-1, 3),), 0, 0), (((4, 3),), 0, 0), (((2, 5), (4, 6)), 1, 5), (((2, 5), (0, 1)), 1, 5),
    (((0, 1, 2),), 0, 0), (((0,),), 0, 0),
])  # fmt: skip
def test_ranges_of_rows_are_pairs_in_order_without_overlap(ranges, index, before):
    message = refused({"data.skip_rows": ranges})
    expected = f"data.skip_rows.{index} is {list(ranges[index])}, but must be [first, end] with {before} <= first < end"
    assert message.startswith(expected)


def test_the_last_row_of_a_range_has_a_bound():
    assert refused({"data.skip_rows": ((0, 10**16),)}).startswith("data.skip_rows.0.1 is 10000000000000000, but ")


def test_ranges_of_rows_are_read_from_a_file_and_from_an_override(tmp_path):
    path = written(tmp_path, to_yaml(changed(SMALL, {"data.skip_rows": ((0, 1), (5, 9))})))
    assert load_config(path).data.skip_rows == ((0, 1), (5, 9))
    assert load_config(path, ["data.skip_rows=[[2, 4]]"]).data.skip_rows == ((2, 4),)
    assert refused_to_load(path, "data.skip_rows=[2, 4]") == "data.skip_rows.0 is 2, but must be a list."
    assert refused_to_load(path, "data.skip_rows=[[2, a]]").startswith("data.skip_rows.0.1 is 'a'")


def test_a_source_is_read_more_often_than_never():
    message = refused({"data.sources": Table({"web": SourceConfig("web", 0.0)})})
    assert message.startswith("data.sources.web.max_epochs is 0.0, ")


@pytest.mark.parametrize("name", ["", "a b", "1a", "a.b", "a/b", "..", "a\n", "a=b"])
def test_a_source_needs_a_name_that_a_key_can_hold(name):
    message = refused({"data.sources": Table({name: SourceConfig("web")})})
    assert message.startswith(f"data.sources is {name!r}, but must be a name ")


@pytest.mark.parametrize("value", NO_PATHS)
def test_what_can_be_no_path_is_named(value):
    for key, changes in (
        ("data.corpus", {"data.corpus": value}),
        ("data.cache_dir", {"data.cache_dir": value}),
        ("data.sources.web.path", {"data.sources": Table({"web": SourceConfig(value)})}),
    ):
        message = refused(changes)
        assert message.startswith(f"{key} is ")
        assert " is not a valid path: " in message


def test_without_sources_the_corpus_is_the_one_source():
    assert DataConfig().source_names == ["corpus"]
    assert DataConfig(sources=SOURCES).source_names == ["web", "code"]


@pytest.mark.parametrize("override", ["data.corpus=texts", "data.suffixes=[.md]", "data.heldout_fraction=0.1"])
def test_a_key_of_the_corpus_is_refused_beside_sources_but_not_of_a_run_that_has_both(tmp_path, override):
    path = written(tmp_path, to_yaml(changed(SMALL, {"data.sources": SOURCES})))
    message = refused_to_load(path, override)
    assert message.startswith(f"{override.partition('=')[0]} is ")
    assert "beside data.sources" in message
    alone = load_config(written(tmp_path, to_yaml(SMALL), "alone.yaml"), [override])
    assert from_dict(to_dict(changed(alone, {"data.sources": SOURCES}))).data.sources == SOURCES
