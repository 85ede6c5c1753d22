import json
import os

import jax
import pytest

from zaya_jax.checkpoint import environment as module
from zaya_jax.checkpoint.environment import cpu_name, environment, versions


def test_it_says_what_numbers_depend_on_and_json_keeps_it():
    recorded = {**environment(), **versions()}
    assert json.loads(json.dumps(recorded)) == recorded
    assert (recorded["jax"], recorded["devices"]) == (jax.__version__, jax.device_count())
    assert (recorded["platform"], recorded["cpus"]) == ("cpu", len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("text", ["model name\t: A Processor\n", "processor\t: 0\n", None])
def test_the_processor_has_some_name_wherever_it_is(tmp_path, monkeypatch, text):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(module, "Path", lambda _: path)
    assert cpu_name()
    assert (cpu_name() == "A Processor") == ("model name" in (text or ""))
