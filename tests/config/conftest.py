"""A configuration file to extend and to override."""

import dataclasses

import pytest

from tests.config_helpers import SMALL, written
from zaya_jax.config import load_config
from zaya_jax.config.yaml_text import dump_yaml


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Of `SMALL`, without what is the default: it is read in each test."""
    model = {field.name: getattr(SMALL.model, field.name) for field in dataclasses.fields(SMALL.model)
             if getattr(SMALL.model, field.name) != field.default}  # fmt: skip
    tree = {"model": model, "phases": [{"tokens": SMALL.phases[0].tokens}], "data": {"context": SMALL.data.context}}
    path = written(tmp_path_factory.mktemp("config"), dump_yaml(tree), "base.yaml")
    assert load_config(path) == SMALL
    return path
