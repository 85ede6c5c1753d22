import fcntl

import pytest

from tests.checkpoint.saved_helpers import flip, save_run
from zaya_jax.checkpoint.prune import prune
from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import saved_steps


@pytest.mark.parametrize(("config", "kept"), [
    ({"keep": 1}, [5]),
    ({"keep": 2}, [4, 5]),
    ({"keep": 1, "keep_every": 2}, [2, 4, 5]),
    ({"keep": 1, "keep_best": 1}, [3, 5]),
])  # fmt: skip
def test_what_is_to_be_kept_is(tmp_path, config, kept):
    run = save_run(tmp_path, [1, 2, 3, 4, 5], {2: 2.0, 3: 1.0, 4: 1.5})
    (run / "checkpoints" / "1.stale-20260101T000000").mkdir()
    text = prune(run, CheckpointConfig(**config), quarantined=True, dry_run=True)
    assert text.startswith("Would remove 1")
    assert saved_steps(run / "checkpoints") == [1, 2, 3, 4, 5]
    assert prune(run, CheckpointConfig(**config), quarantined=True).replace("Removed", "Would remove") == text
    assert saved_steps(run / "checkpoints") == kept
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir()) == [str(s) for s in kept]


def test_the_newest_whole_one_stays_though_newer_ones_are_damaged(tmp_path):
    run = save_run(tmp_path, [1, 2, 3, 4])
    flip(run / "checkpoints" / "3")
    flip(run / "checkpoints" / "4")
    text = prune(run, CheckpointConfig(keep=1))
    assert "Kept, though damaged: 3, 4" in text
    assert saved_steps(run / "checkpoints") == [2, 3, 4]


def test_nothing_is_removed_where_nothing_is_whole(tmp_path):
    run = save_run(tmp_path, [1, 2])
    for step in (1, 2):
        flip(run / "checkpoints" / str(step))
    with pytest.raises(InputError, match=r"None of the 2 checkpoints .* none is removed"):
        prune(run, CheckpointConfig(keep=1))
    assert saved_steps(run / "checkpoints") == [1, 2]


def test_a_run_that_trains_is_left_alone(tmp_path):
    run = save_run(tmp_path, [1, 2])
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="in use"):
            prune(run, CheckpointConfig(keep=1))
    assert saved_steps(run / "checkpoints") == [1, 2]
