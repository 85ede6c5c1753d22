"""A process that hears nothing ends with a sentence; one that hears, or is told farewell, goes on."""

import subprocess
import sys

import pytest

from tests.train_helpers import ROOT

# The coordinator's store within one process; what the real one does, tests of processes show.
CODE = """
import sys, time
from zaya_jax.parallel.watch import Watch

class Store(dict):
    def key_value_set(self, key, value, allow_overwrite=False):
        self[key] = value

    def key_value_try_get(self, key):
        return self[key]

    def key_value_dir_get(self, prefix):
        return list(self.items())

store = Store()
watches = [Watch(store, process, 2, 0.5) for process in {processes}]
time.sleep(0.3)
{act}
time.sleep(2)
print("still here")
"""


def run(processes, act=""):
    done = subprocess.run([sys.executable, "-c", CODE.format(processes=processes, act=act)], cwd=ROOT, timeout=60,
                          capture_output=True, text=True, check=False)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("process", "other"), [(0, 1), (1, 0)])
def test_silence_ends_a_process(process, other):
    status, out, err = run([process], "" if process == 0 else "store.clear(); store.key_value_set = None")
    assert status == 1
    assert not out
    assert err.startswith(f"Stopped: Process {other} was not heard for 0.5 s.")


def test_those_that_are_heard_go_on():
    assert run([0, 1]) == (0, "still here\n", "")


def test_a_farewell_is_not_silence():
    assert run([0, 1], "watches[1]._farewell()") == (0, "still here\n", "")


@pytest.mark.parametrize("process", [0, 1])
def test_one_that_has_to_end_says_so_for_all(process):
    act = f"store['zaya_jax/beat/{1 - process}'] = '!2 Error: the disk is full.'"
    assert run([process], act) == (2, "", "Error: the disk is full.\n")


def test_the_last_word_is_left_to_the_first():
    later = "import threading; threading.Timer(0.2, watches[0].leave, ['second', 3]).start()"
    act = f"{later}; watches[0].leave('first', 2)"
    assert run([1], act) == (2, "", "first\n")
