import json
import os

import jax
import pytest

from zaya_jax.checkpoint import environment as module
from zaya_jax.checkpoint.environment import cpu_name, environment, versions


def test_it_says_what_numbers_depend_on_and_json_keeps_it():
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["jax"] == jax.__version__
    assert found["platform"] == "cpu"
    assert found["devices"] == jax.device_count()
    assert found["cpus"] == len(os.sched_getaffinity(0))
    assert found == environment()


def test_versions_are_those_of_what_is_installed():
    assert versions()["numpy"] == __import__("numpy").__version__
    assert all(versions().values())


@pytest.mark.parametrize("text", ["model name\t: A Processor\n", "processor\t: 0\n", None])
def test_the_processor_has_some_name_wherever_it_is(tmp_path, monkeypatch, text):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(module, "Path", lambda _: path)
    assert cpu_name() == ("A Processor" if text and "model name" in text else cpu_name())
    assert cpu_name()
