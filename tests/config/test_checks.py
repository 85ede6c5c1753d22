"""Each check lets through what is allowed, and names key, value and what is allowed of everything else."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config_helpers import NO_PATHS
from zaya_jax.config.checks import require, require_path, require_positive
from zaya_jax.errors import InputError


def test_an_error_names_key_value_and_what_is_allowed():
    with pytest.raises(InputError, match=r"^a\.b is 'x', but must be y\.$"):
        require(False, "a.b", "x", "y")
    require(True, "a.b", "x", "y")


@given(value=st.one_of(st.integers(-3, 3), st.floats(-3, 3)))
def test_every_named_field_must_be_positive(value):
    section = SimpleNamespace(good=1, free=-1, asked=value)
    if value > 0:
        require_positive("a", section, "good", "asked")
    else:
        with pytest.raises(InputError) as caught:
            require_positive("a", section, "good", "asked")
        assert str(caught.value) == f"a.asked is {value!r}, but must be greater than zero."


@pytest.mark.parametrize("value", NO_PATHS)
def test_what_can_be_no_path_is_named(value):
    with pytest.raises(InputError, match=r"^a\.b is .*, which cannot be a path: .*[^.]\.$"):
        require_path("a.b", value)


@pytest.mark.parametrize("value", ["runs/new", "/no/such/folder", "~", "configs/tiny.yaml/below/a/file", ""])
def test_a_path_need_not_exist(value):
    require_path("a.b", value)
