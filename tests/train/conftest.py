"""One small run, finished, for the tests that look at what it left."""

import pytest

from tests.train_helpers import compile_once, small_run, trained
from zaya_jax.generate import decode


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Configuration and result of a run; read only."""
    return trained(small_run(tmp_path_factory.mktemp("finished")))


@pytest.fixture
def quick(monkeypatch):
    """Runs share what they compile; see `compile_once`."""
    compile_once(monkeypatch)
    return decode
