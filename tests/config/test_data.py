"""Sources and a corpus that cannot be."""

import pytest

from tests.config_helpers import NO_PATHS, SMALL, SOURCES, changed, refused
from zaya_jax.config import DataConfig, PhaseConfig, SourceConfig, Table


@pytest.mark.parametrize(("key", "value"), [
    ("heldout_fraction", 0.0), ("heldout_fraction", 1.0), ("suffixes", ()), ("workers", -1), ("workers", 257),
])  # fmt: skip
def test_what_is_outside_its_range_is_named(key, value):
    said = refused({f"data.{key}": value})
    assert said.startswith(f"data.{key} is {list(value) if value == () else value}, but must be ")


@pytest.mark.parametrize("changes", [
    {"data.workers": 256},
    {"data.sources": SOURCES},
    {"data.sources": SOURCES, "phases": (PhaseConfig(1, mixture=Table({"code": 1e-9})),)},
    {"data.sources": Table({"a-b_9": SourceConfig("x", 1e-3)})},
])  # fmt: skip
def test_the_edges_of_the_possible(changes):
    changed(SMALL, changes).check()


def test_a_source_is_read_more_often_than_never():
    said = refused({"data.sources": Table({"web": SourceConfig("web", 0.0)})})
    assert said.startswith("data.sources.web.max_epochs is 0.0, ")


@pytest.mark.parametrize("name", ["", "a b", "1a", "a.b", "a/b", "..", "a\n", "a=b"])
def test_a_source_needs_a_name_that_a_key_can_hold(name):
    said = refused({"data.sources": Table({name: SourceConfig("web")})})
    assert said.startswith(f"data.sources is {name!r}, but must be a name ")


@pytest.mark.parametrize("value", NO_PATHS)
def test_what_can_be_no_path_is_named(value):
    for key, changes in (
        ("data.corpus", {"data.corpus": value}),
        ("data.cache_dir", {"data.cache_dir": value}),
        ("data.sources.web.path", {"data.sources": Table({"web": SourceConfig(value)})}),
    ):
        said = refused(changes)
        assert said.startswith(f"{key} is ")
        assert " is not a valid path: " in said


def test_without_sources_the_corpus_is_the_one_source():
    assert DataConfig().source_names == ["corpus"]
    assert DataConfig(sources=SOURCES).source_names == ["web", "code"]
