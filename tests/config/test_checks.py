"""Each check lets through what is allowed, and names key, value and what is allowed of everything else."""

import pytest

from tests.config_helpers import NO_PATHS
from zaya_jax.config.checks import require, require_path
from zaya_jax.errors import InputError


def test_an_error_names_key_value_and_what_is_allowed():
    with pytest.raises(InputError, match=r"^a\.b is 'x', but must be y\.$"):
        require(False, "a.b", "x", "y")
    require(True, "a.b", "x", "y")


@pytest.mark.parametrize("value", NO_PATHS)
def test_what_can_be_no_path_is_named(value):
    with pytest.raises(InputError, match=r"^a\.b is .*, which is not a valid path: .*[^.]\.$"):
        require_path("a.b", value)


@pytest.mark.parametrize(
    "value", ["runs/new", "/no/such/folder", "~", "~no_such_user_here/x", "configs/tiny.yaml/below/a/file", ""]
)
def test_a_path_need_not_exist(value):
    require_path("a.b", value)
