import json
import os

import jax

from zaya_jax.checkpoint.environment import environment, versions


def test_it_says_what_numbers_depend_on_and_json_keeps_it():
    recorded = {**environment(), **versions()}
    assert json.loads(json.dumps(recorded)) == recorded
    assert (recorded["jax"], recorded["devices"]) == (jax.__version__, jax.device_count())
    assert (recorded["platform"], recorded["cpus"]) == ("cpu", len(os.sched_getaffinity(0)))
