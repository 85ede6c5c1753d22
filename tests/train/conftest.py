"""One small run, finished, for the tests that look at what it left."""

import pytest

from tests.train_helpers import compile_once, small_run
from zaya_jax.generate import decode
from zaya_jax.train.loop import run_training


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Configuration and result of a run; read only."""
    config = small_run(tmp_path_factory.mktemp("finished"))
    with pytest.MonkeyPatch.context() as patch:
        compile_once(patch)
        return config, run_training(config)


@pytest.fixture
def quick(monkeypatch):
    """Runs share what they compile; see `compile_once`."""
    compile_once(monkeypatch)
    return decode
