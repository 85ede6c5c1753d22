"""A table is a mapping that cannot be changed and that can be hashed."""

import pickle
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.config import Table

entries = st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=4)


@given(entries)
def test_a_table_keeps_its_entries_in_their_order_and_cannot_be_changed(mapping):
    table, items = Table(mapping), list(mapping.items())
    before = hash(table)
    mapping["new"] = 1
    assert isinstance(table, Mapping)
    assert (list(table.items()), len(table), hash(table)) == (items, len(items), before)
    assert pickle.loads(pickle.dumps(table)) == table  # noqa: S301
    assert repr(table) == f"Table({dict(items)!r})"
    with pytest.raises(TypeError):
        table["a"] = 2


@given(entries, entries)
def test_tables_are_equal_where_names_values_and_order_are(first, second):
    same = list(first.items()) == list(second.items())
    assert (Table(first) == Table(second)) == same
    assert Table({"a": 1, "b": 2}) != Table({"b": 2, "a": 1})
    assert Table(first) != first
    assert len({Table(first), Table(second), Table(dict(first))}) == (1 if same else 2)
