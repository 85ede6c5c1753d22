"""A table is a mapping that cannot be changed and that can be hashed."""

import pickle
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.config import Table

entries = st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=4)


@given(entries)
def test_it_holds_what_it_was_given_in_that_order(given_entries):
    table = Table(given_entries)
    assert isinstance(table, Mapping)
    assert list(table.items()) == list(given_entries.items())
    assert (len(table), list(table), bool(table)) == (len(given_entries), list(given_entries), bool(given_entries))
    assert dict(table) == given_entries
    assert all(table[name] == value for name, value in given_entries.items())
    assert repr(table) == f"Table({given_entries!r})"


@given(entries, entries)
def test_tables_are_equal_where_names_values_and_order_are(one, two):
    same = list(one.items()) == list(two.items())
    assert (Table(one) == Table(two)) == same
    assert (Table(one) != Table(two)) == (not same)
    if same:
        assert hash(Table(one)) == hash(Table(two))
    assert len({Table(one), Table(two), Table(dict(one))}) == (1 if same else 2)


def test_the_order_tells_tables_apart():
    assert Table({"a": 1, "b": 2}) != Table({"b": 2, "a": 1})
    assert Table({"a": 1}) != {"a": 1}
    assert Table() == Table({})


def test_it_does_not_change_with_what_it_was_made_of():
    given_entries = {"a": 1}
    table = Table(given_entries)
    before = hash(table)
    given_entries["b"] = 2
    assert (dict(table), hash(table)) == ({"a": 1}, before)


def test_it_cannot_be_changed():
    table = Table({"a": 1})
    with pytest.raises(TypeError):
        table["a"] = 2
    with pytest.raises(TypeError):
        del table["a"]
    with pytest.raises(KeyError):
        table["b"]
    assert "b" not in table
    assert table.get("b", 7) == 7


@given(entries)
def test_it_travels_to_another_process(given_entries):
    assert pickle.loads(pickle.dumps(Table(given_entries))) == Table(given_entries)  # noqa: S301
