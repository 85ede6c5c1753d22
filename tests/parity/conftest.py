"""What the tests of lm-eval's tasks share."""

import pytest

from tests.evaluate_helpers import write_tasks
from tests.parity.evaluation_helpers import write_model


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """Data sets are read from their files, and cached here."""
    import datasets

    from zaya_jax.evaluate import harness

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setenv("HF_ALLOW_CODE_EVAL", "0")
        patch.setattr(harness.load_tasks, "__kwdefaults__", {**harness.load_tasks.__kwdefaults__, "own_only": True})
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The tasks."""
    return write_tasks(tmp_path_factory.mktemp("tasks"), longest=60)


@pytest.fixture(scope="session")
def export(tmp_path_factory):
    """A random model and a tokenizer that adds no token."""
    return write_model(tmp_path_factory.mktemp("export"), bos=False)
