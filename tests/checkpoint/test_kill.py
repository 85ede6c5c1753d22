"""A save that is killed anywhere costs no checkpoint and leaves nothing behind."""

import random
import time
from collections import Counter

import pytest

from tests.checkpoint.kill_helpers import check_kills_of_saves
from tests.checkpoint.saved_helpers import write_soak


def test_kills_anywhere_in_a_save_or_a_removal(tmp_path):
    history = check_kills_of_saves(tmp_path / "run", kills=2, seed=5)
    assert history[0].newest > 0
    assert ".deleted" in history[1].of


@pytest.mark.soak
def test_fifty_kills(tmp_path):
    start, seed = time.monotonic(), random.SystemRandom().randrange(2**32)
    history = check_kills_of_saves(tmp_path / "run", kills=50, seed=seed)
    events = Counter(f"{killed.event}{', of a removal' if '.deleted' in killed.of else ''}" for killed in history)
    what = ("a process that saves again and again, killed with SIGKILL at a random file event of a save, or of the "
            "removal of an older checkpoint, and started again, 50 times: each start restores the newest finished "
            "checkpoint bitwise, and nothing else is left in the folder")  # fmt: skip
    write_soak("save_kill", what, start, {"kills": len(history), "killed at": dict(sorted(events.items())),
                                          "checkpoints saved between": history[-1].newest, "lost": 0})  # fmt: skip
