"""A configuration file to extend and to override."""

import pytest

from tests.config_helpers import SMALL, written
from zaya_jax.config import to_yaml


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return written(tmp_path_factory.mktemp("config"), to_yaml(SMALL), "base.yaml")
