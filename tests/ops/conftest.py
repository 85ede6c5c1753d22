"""Small blocks for the whole room, so that tiny shapes visit several."""

import pytest

from tests.helpers import blocks_of


@pytest.fixture(autouse=True, scope="package")
def small_blocks():
    with blocks_of(8):
        yield
