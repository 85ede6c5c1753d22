"""YAML of strangers ends in a value or in one sentence, soon and in little memory; what is written is read back."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.config.yaml_text import dump_yaml, parse_yaml
from zaya_jax.errors import InputError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
# The characters that YAML 1.1 takes for line breaks, or that stand for nothing visible.
ODD = st.text(st.sampled_from("\x85\u2028\u2029\ufeff\r\n\t\x00\x1b\x7f\xa0\u200b\u3000 a:#-'\""), max_size=9)
BOMB = "".join(f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 9 if level else ['1'] * 9)}]\n"
               for level in range(9))  # fmt: skip


@given(st.recursive(LEAVES | ODD, lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=5) | ODD, inner, max_size=3), max_leaves=8))  # fmt: skip
def test_what_is_written_is_read_back(value):
    assert parse_yaml(dump_yaml(value), "It") == value


@pytest.mark.parametrize("text", ["[" * 300, "{a: " * 300, "- " * 300, "? " * 300, "[" * 51 + "]" * 51])
def test_deep_nesting_is_refused(text):
    with pytest.raises(InputError, match=r"^It is invalid. Line 1 nests more than 50 levels deep\.$"):
        parse_yaml(text, "It")


def test_aliases_count_as_what_they_stand_for():
    assert parse_yaml("a: &x {b: 1}\nc: *x\nd: [*x, *x]", "It") == {"a": {"b": 1}, "c": {"b": 1}, "d": [{"b": 1}] * 2}
    tracemalloc.start()
    with pytest.raises(InputError, match=r"^It is invalid. By line \d it has more than 20,000 values"):
        parse_yaml(BOMB, "It")
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


@pytest.mark.parametrize("text", ["&x [*x]", "a: &x {b: *x}", "&x {? *x : 1}"])
def test_a_value_may_not_contain_itself(text):
    with pytest.raises(InputError, match="refers to a value that contains it"):
        parse_yaml(text, "It")


def test_whole_numbers_may_be_keys_other_values_may_not():
    assert parse_yaml("{0: a, 0x10: b, -1: c}", "It") == {"0": "a", "16": "b", "-1": "c"}
    with pytest.raises(InputError, match="The key '0' appears twice"):
        parse_yaml("{0: a, '0': b}", "It")
    for text, kind in (("yes", "true or false"), ("null", "null"), ("1.5", "a number"), ("2024-01-01", "a date")):
        with pytest.raises(InputError, match=f"YAML reads the key '{text}' on line 2 as {kind}, but it must be a name"):
            parse_yaml(f"a: 1\n{text}: 2", "It")
